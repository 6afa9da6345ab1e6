"""Calls of MLX's attention with every kind of mask give MLX's numbers and gradients where deltatune serves them."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.ops.segments import attention_mask, rule_of
from deltatune.ops.tracing import trace
from deltatune.patches import patched, whole_rows
from deltatune.patches.patch import revert
from deltatune.patches.tables import one_row_products

OURS, UPSTREAM = whole_rows.OURS, whole_rows.UPSTREAM
ON_A_CPU = pytest.mark.skipif(backend.device() != "cpu", reason="only a CPU uses a BLAS")


@pytest.fixture(autouse=True)
def blocked(monkeypatch):
    """Force `blocked`: MLX's own attention would serve rows of a few tokens (ops/attention/choice.py)."""
    monkeypatch.setenv("DELTATUNE_ATTENTION", "blocked")
    whole_rows.reset()
    yield
    revert()


def draw(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def attended(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, **options)


def differentiated(arrays: list[mx.array], call: Callable[..., mx.array]) -> list[mx.array]:
    weights = draw(2, 4, 9, 5, seed=9)
    value, found = mx.value_and_grad(lambda *arrays: (call(*arrays) * weights).sum(), argnums=list(range(len(arrays))))(
        *arrays
    )
    return [value, *found]


def heads() -> list[mx.array]:
    return [draw(2, 4, 9, 8), draw(2, 2, 9, 8, seed=1), draw(2, 2, 9, 5, seed=2)]


BOOLS = {
    "of pairs": lambda: mx.tril(mx.ones((9, 9))) > 0,
    "of padding": lambda: (mx.arange(9) < mx.array([[9], [6]]))[:, None, None],
    "of each head": lambda: mx.random.uniform(shape=(2, 4, 9, 9), key=mx.random.key(3)) < 0.9,
}


@pytest.mark.parametrize("mask", [None, "causal", *BOOLS])
@pytest.mark.parametrize("sinks", [False, True])
def test_masks_of_booleans_and_sinks(mask, sinks):
    mask = BOOLS[mask]() if mask in BOOLS else mask
    if isinstance(mask, mx.array) and mask.shape[-2:] == (9, 9):
        mask = mask | (mx.eye(9) > 0)  # Where a query sees nothing, deltatune gives zeros and MLX does not.
    arrays = heads() + ([draw(4, seed=4)] if sinks else [])

    def call(q: mx.array, k: mx.array, v: mx.array, *sinks: mx.array) -> mx.array:
        return attended(q, k, v, mask=mask, sinks=sinks[0] if sinks else None)

    expected = differentiated(arrays, call)
    with patched():
        actual = differentiated(arrays, call)
    assert whole_rows.served() == {OURS: 1}
    for one, other in zip(expected, actual, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 9), (2, 1, 9, 9), (1, 1, 1, 9), (1, 4, 9, 9)])
def test_a_mask_of_floats_gets_its_gradient(shape):
    """One for all heads is deltatune's. One for each head is as large as the scores, so it stays MLX's."""
    arrays = [*heads(), draw(*shape, seed=5)]

    def call(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
        return attended(q, k, v, mask=mx.tanh(mask))

    expected = differentiated(arrays, call)
    with patched():
        actual = differentiated(arrays, call)
    assert whole_rows.served() == {UPSTREAM if shape == (1, 4, 9, 9) else OURS: 1}
    for one, other in zip(expected, actual, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_attention_that_deltatune_refuses_is_mlxs():
    q, k, v = heads()
    with patched(), whole_rows.whole_rows():
        assert attended(q, k, v, stream=mx.cpu).shape == (2, 4, 9, 5)
        assert whole_rows.served() == {UPSTREAM: 1}
        with pytest.raises(ValueError, match="mask"):
            attended(q, k, v, mask="casual")
        with pytest.raises(ValueError, match="rank"):
            attended(q[0], k[0], v[0])
        # MLX promotes what is mixed.
        assert attended(q.astype(mx.bfloat16), k, v).dtype == mx.float32
    assert whole_rows.served() == {UPSTREAM: 3, OURS: 1}


def test_masks_are_forgotten_with_their_arrays():
    with trace.having():
        mask = attention_mask(mx.array([[0, 0, 1]]))
        rule = rule_of(mask)
        assert rule.window is None
        assert rule.segments.shape == (1, 3)
        assert rule_of(mask + False) is None
        assert len(trace.current().known) == 1
        del mask
        gc.collect()
        assert len(trace.current().known) == 0


@ON_A_CPU
def test_a_faulty_blas_trains_through_deltatune_too(monkeypatch):
    """Both patches of the one function are in force: inference goes to the products of two rows."""
    monkeypatch.setattr(one_row_products, "probe", lambda: one_row_products.ProbeResult("planted", ("fault",)))
    monkeypatch.setattr(one_row_products, "_warned", {str(one_row_products.probe())})
    arrays = heads()
    expected = differentiated(arrays, attended)
    with patched():
        assert one_row_products.in_force()
        whole_rows.reset()
        actual = differentiated(arrays, attended)
        assert whole_rows.served() == {OURS: 1}
        single = attended(arrays[0][:, :, :1], *arrays[1:])
    assert whole_rows.served() == {OURS: 1, UPSTREAM: 1}
    assert mx.allclose(single, attended(arrays[0][:, :, :1], *arrays[1:]), rtol=1e-5, atol=1e-6)
    for one, other in zip(expected, actual, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-5)
