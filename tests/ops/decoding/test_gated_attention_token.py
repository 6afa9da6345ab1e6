"""The kernel of one token of a gated attention layer against its definition, and its refusals."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from deltatune.ops.decoding.gated_attention_token import (
    BOUNDS,
    KERNEL,
    GatedAttention,
    RowArrays,
    covers,
    gated_attention_token,
    serves,
    trial_case,
)
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator.case import judged


def layer_of(heads: int, key_heads: int, size: int, rotary_dims: int) -> GatedAttention:
    return GatedAttention(heads, key_heads, size, 1e-6, 1e-5, rotary_dims, 1e4, size**-0.5)


# Layers, and whether the projections are one array.
CASES = [
    (layer_of(2, 2, 32, 16), False),
    (layer_of(6, 2, 64, 64), True),
    (layer_of(8, 2, 128, 32), False),
    (layer_of(8, 1, 256, 64), True),
]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).split(".")[-1])
def test_a_token_is_that_of_the_definition(number, dtype, running):
    layer, whole = CASES[number]
    other = mx.float32 if number % 2 else dtype
    verdict = judged(trial_case(layer, whole, (dtype, dtype, other)), running(KERNEL, nvidia=True), "kernel")
    assert verdict.passed, (verdict.errors, verdict.problem)


def arrays_of(layer: GatedAttention, rows: int = 2, capacity: int = 9) -> RowArrays:
    keys = iter(mx.random.split(mx.random.key(3), 7))
    drawn = lambda *shape: mx.random.normal(shape, key=next(keys))  # noqa: E731
    projected = tuple(drawn(rows, 1, width) for width in layer.widths)
    kept = (rows, layer.key_heads, capacity, layer.size)
    offsets = mx.array([0, 3][:rows], mx.int32)
    return RowArrays(projected, drawn(layer.size), drawn(layer.size), drawn(*kept), drawn(*kept), offsets)


def test_keys_behind_a_row_do_not_matter(running):
    """Behind a row's last key lies NaN, and only the token's own place is written."""
    layer = layer_of(4, 2, 32, 32)
    given = arrays_of(layer)
    behind = mx.arange(9)[None, None, :, None] >= given.offsets[:, None, None, None]
    keys, values = (mx.where(behind, mx.nan, array) for array in (given.keys, given.values))
    mx.eval(keys, values, given.keys, given.values)
    with on(running(KERNEL, nvidia=True)):
        y, expected = (
            gated_attention_token(layer, arrays) for arrays in (replace(given, keys=keys, values=values), given)
        )
    assert mx.array_equal(y, expected)
    for array in (keys, values):
        assert (mx.isnan(array).any(axis=(1, 3)) == (mx.arange(9) > given.offsets[:, None])).all()


def test_a_wrong_kernel_is_refused(running):
    layer, whole = CASES[0]

    def wrong(launch: Launch) -> list[mx.array]:
        (y,) = running(KERNEL, nvidia=True)(launch)
        return [y * 1.001]

    verdict = judged(trial_case(layer, whole, (mx.float32,) * 3), wrong, "kernel")
    assert not verdict.passed
    assert verdict.worst == "y"


def test_other_shapes_are_refused():
    layer = layer_of(4, 2, 32, 32)
    given = arrays_of(layer)
    assert covers(layer, given)
    refused = [
        replace(given, keys=given.keys[:, :1]),
        replace(given, values=given.values[:, :, :4]),
        replace(given, offsets=given.offsets.astype(mx.uint32)),
        replace(given, q_weight=given.q_weight[:16]),
        replace(given, projected=given.projected[::-1]),
        replace(given, keys=given.keys.astype(mx.bfloat16)),
    ]
    for each in refused:
        assert not covers(layer, each)
        with pytest.raises(ValueError, match=r"gated_attention_token: .* do not fit GatedAttention"):
            gated_attention_token(layer, each)
    assert not covers(replace(layer, rotary_dims=24), given)


def test_a_cpu_keeps_mlx_operations(monkeypatch):
    monkeypatch.setattr("deltatune.machine.backend.device", lambda: "cpu")
    layer = layer_of(4, 2, 32, 32)
    assert not serves(layer, arrays_of(layer))
