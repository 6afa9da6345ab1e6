"""Scans of very long rows on Apple GPUs are launched in parts, with the bits of a single launch."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from deltatune.ops.gated_delta import fused_passes
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_on
from deltatune.ops.gated_delta.tiling import choose_tiling
from deltatune.ops.kernels.launch import MOST_MULTIPLICATIONS

# Six chunks of sixteen in fp32, the last of them incomplete; heads of no whole tiles. With a mask, a document starts
# where a part of two chunks does.
SIZES = {"length": 81, "key_size": 24, "value_size": 40}
CASES = {
    "no state": (mx.float32, {}),
    "documents and a mask": (mx.float32, {"segments": True, "mask": "middle"}),
    "a gate a channel": (mx.float32, {"segments": True}),
    "bf16": (mx.bfloat16, {"segments": True}),
}


def without_state(*arrays, initial_state, **options):
    return gated_delta_fused(*arrays, tiling_of_call=tiling_on("metal"), **options)


@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_bits_of_one_launch(name, machine, on_host, table, monkeypatch):
    launches = []

    def run(launch, seed):
        launches.append(launch.name)
        return machine.run(launch, seed=seed)

    def results():
        launches.clear()
        dtype, options = CASES[name]
        case = table.Case(name, **SIZES, **options)
        by = without_state if name == "no state" else None
        return on_host(SimpleNamespace(run=run), case, dtype, per_channel="channel" in name, by=by)[0]

    expected = results()
    assert len(launches) == 4
    monkeypatch.setattr(fused_passes, "MOST_STEPS", 2)
    found = results()
    assert all(mx.array_equal(found[key], expected[key]) for key in expected)
    parts = 2 if name == "bf16" else 3
    assert [sum(kernel.endswith(kind) for kernel in launches) for kind in ("scan", "reverse")] == [parts, parts]
    assert len(launches) == 2 + 2 * parts


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
