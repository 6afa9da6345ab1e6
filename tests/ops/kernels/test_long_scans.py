"""Scans of very long rows on Apple GPUs are launched in parts, with the bits of a single launch."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta import fused_passes
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_of
from deltatune.ops.gated_delta.tiling import choose_tiling
from deltatune.ops.kernels.launch import MOST_MULTIPLICATIONS, on

# Seven chunks of sixteen in fp32, the last of them incomplete; heads of no whole tiles.
LENGTH, KEY_HEADS, HEADS, KEY_SIZE, VALUE_SIZE = 100, 1, 2, 24, 40
CASES = {
    "a gate a head": {},
    "documents, a mask and a state": {"documents": True, "stateful": True},
    "a gate a channel": {"per_channel": True, "documents": True},
    "bf16": {"dtype": mx.bfloat16, "stateful": True},
}


def differentiate(machine, launches, dtype=mx.float32, per_channel=False, documents=False, stateful=False):
    """Return y, the last state and all gradients as bytes; the names of the launches go to `launches`."""
    draw = np.random.default_rng(5)

    def drawn(*shape):
        return mx.array(draw.normal(size=shape).astype(np.float32))

    key_heads = HEADS if per_channel else KEY_HEADS
    q, k = (0.2 * drawn(2, LENGTH, key_heads, KEY_SIZE).astype(dtype) for _ in range(2))
    v, log_g = drawn(2, LENGTH, HEADS, VALUE_SIZE).astype(dtype), -mx.abs(drawn(2, LENGTH, HEADS))
    log_g = -mx.abs(drawn(2, LENGTH, HEADS, KEY_SIZE)) if per_channel else log_g
    arrays = [q, k, v, log_g, mx.sigmoid(drawn(2, LENGTH, HEADS))]
    arrays += [drawn(2, HEADS, VALUE_SIZE, KEY_SIZE)] if stateful else []
    options = {}
    if documents:
        # A document starts inside a part, and one at its start.
        segments = (np.arange(LENGTH) >= 40).astype(np.int32) + (np.arange(LENGTH) >= 64)
        mask = draw.uniform(size=(2, LENGTH)) < 0.9
        options = {"segments": mx.array(np.stack([segments] * 2)), "mask": mx.array(mask)}

    def execute(launch):
        launches.append(launch.name)
        return machine.run(launch, seed=1)

    def call(*given):
        state = given[5] if stateful else None
        by = {"tiling_of_call": partial(tiling_of, "metal")}
        return list(gated_delta_fused(*given[:5], initial_state=state, **by, **options))

    cotangents = [drawn(*v.shape).astype(dtype), drawn(2, HEADS, VALUE_SIZE, KEY_SIZE)]
    with on(execute):
        outputs, gradients = mx.vjp(call, arrays, cotangents)
    return [np.array(each.astype(mx.float32)).tobytes() for each in (*outputs, *gradients)]


@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_bits_of_one_launch(name, machine, monkeypatch):
    whole, divided = [], []
    expected = differentiate(machine, whole, **CASES[name])
    monkeypatch.setattr(fused_passes, "MOST_STEPS", 2)
    found = differentiate(machine, divided, **CASES[name])
    assert found == expected
    assert len(whole) == 4
    parts = 2 if name == "bf16" else 4
    assert [sum(kernel.endswith(kind) for kernel in divided) for kind in ("scan", "reverse")] == [parts, parts]
    assert len(divided) == 2 + 2 * parts


def test_only_very_long_rows_are_divided():
    """Heads of Qwen3.5-9B: a row of 262,144 tokens is one launch; more rows, or more tokens, are several."""

    def parts(batch, length, machine="metal"):
        shape = (batch, length, 16, 32, 128, 128)
        return fused_passes._parts(choose_tiling(machine, shape, mx.bfloat16, masked=False, segmented=False))

    assert len(parts(1, 262_144)) == 1
    assert len(parts(1, 262_145)) == 2
    assert len(parts(4, 262_144)) > 1
    assert len(parts(4, 262_144, "cuda")) == 1
    first, last = parts(8, 262_144)[0]
    assert 8 * 32 * 128 * (last - first) * 16 * 4 * (128 + 16) <= MOST_MULTIPLICATIONS
