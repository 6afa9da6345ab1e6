"""Linear layers for the next tokens of a batch take norms, SwiGLU, sums and adapters along, with the same results."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from deltatune.lora.linear import LoRALinear, projected, token_output
from deltatune.ops.decoding import token_products
from deltatune.ops.decoding.token_products import normed, swiglu, total
from deltatune.ops.recomputation import small_cases
from deltatune.ops.tracing import trace

WIDTH, OUT, ROWS = 16, 12, 3


def linear(adapted: bool, seed: int, inputs: int = WIDTH, outputs: int = OUT) -> nn.Module:
    mx.random.seed(seed)
    layer = nn.Linear(inputs, outputs, bias=False)
    if not adapted:
        return layer.eval()
    layer = LoRALinear.from_base(layer, rank=2 + seed, scale=3.0)
    layer.lora_b = mx.random.normal(layer.lora_b.shape)
    return layer.eval()


def check_close(actual: mx.array, expected: mx.array) -> None:
    assert np.abs(np.array(actual) - np.array(expected)).max() < 2**-18 * np.abs(np.array(expected)).max()


@pytest.fixture
def rows():
    return mx.random.normal((ROWS, 1, WIDTH), key=mx.random.key(1))


@pytest.fixture
def calls(monkeypatch):
    """The calls of the products that are computed, in which `small_cases` has MLX's operations serve."""
    made = []
    naive = token_products.linear_token

    def noted(call):
        made.append(call)
        return naive(call)

    monkeypatch.setattr(token_products, "linear_token", noted)
    return made


@pytest.mark.parametrize("adapted", [(False, False), (True, True), (True, False), (False, True)], ids=str)
def test_a_block_is_two_products_and_their_narrow_ones(rows, adapted, calls):
    gate, up, down = linear(adapted[0], 0), linear(adapted[1], 1), linear(adapted[0], 2, OUT, WIDTH)
    weight, eps = mx.random.normal((WIDTH,), key=mx.random.key(2)), 1e-6
    plain = mx.fast.rms_norm(rows, weight, eps)
    expected = rows + down(nn.silu(gate(plain)) * up(plain))
    with small_cases(), trace.having(next_tokens=True):
        x = normed(mx.full(rows.shape, mx.nan), rows, weight, eps)
        product = swiglu(token_output(gate, x), token_output(up, x))
        y = total(rows, token_output(down, product))
    # The normed rows are never read: each product norms them itself.
    check_close(y, expected)
    last = calls[-1]
    assert last.residual is rows
    assert (last.low_rank is not None) == adapted[0]


@pytest.mark.parametrize("adapted", [(False,) * 3, (True,) * 3, (True, False, True)], ids=str)
def test_projections_are_one_product(rows, adapted):
    layers = [linear(kind, seed, outputs=OUT - seed) for seed, kind in enumerate(adapted)]
    expected = mx.concatenate([layer(rows) for layer in layers], axis=-1)
    with small_cases(), trace.having(next_tokens=True):
        (y,) = projected(layers, rows)
    check_close(y, expected)


def test_other_layers_and_rows_are_left_alone(rows):
    biased, dropping = nn.Linear(WIDTH, OUT), linear(True, 0)
    dropping.dropout = nn.Dropout(0.5)
    dropping.train()
    with small_cases(), trace.having(next_tokens=True):
        assert token_output(biased, rows) is None
        assert token_output(dropping, rows) is None
        assert token_output(linear(False, 0), rows.swapaxes(0, 1)) is None
        assert len(projected([biased, linear(False, 0)], rows)) == 2
        # A sum is not taken along twice, nor products of different rows.
        y = total(rows[..., :OUT], token_output(linear(False, 0), rows))
        check_close(total(y, y), 2 * y)
        other = mx.array(rows)
        assert swiglu(token_output(linear(False, 0), rows), token_output(linear(False, 1), other)) is None
    assert token_output(linear(False, 0), rows) is None
