"""Heads of 192 and 256 as a Mac is given them, within its 32 KB of threadgroup memory, against the recurrence."""

from __future__ import annotations

import mlx.core as mx
import pytest

from deltatune.ops.gated_delta.fused_op import tiling_of
from deltatune.ops.gated_delta.tolerances import OVERSHOOTING, REPEATED_KEY, fused_bound
from deltatune.ops.kernels.launch import header

FLOATS = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
HARD = {
    "mixed gates": {"gates": "mixed"},
    "one key": {"keys": "one", "gates": "open", "beta": 1.0, "bound": REPEATED_KEY},
    "near keys, beta 1.9": {"keys": "near", "gates": "open", "beta": 1.9, "bound": OVERSHOOTING},
}
# Every dtype with either kind of gate; each shape compiles its own kernels.
SIZES = [
    (192, 192, "float32", False),
    (256, 128, "float16", False),
    (256, 256, "bfloat16", False),
    (256, 256, "float32", True),
    (192, 64, "bfloat16", True),
    (200, 40, "float16", True),
]


def case_of(table, key_size: int, value_size: int, **more):
    sizes = {"batch": 1, "length": 35, "mask": "middle", "segments": True}
    return table.Case("wide", **sizes | {"key_size": key_size, "value_size": value_size} | more)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_and_backward(size, machine, on_host, errors, table):
    key_size, value_size, dtype, per_channel = size
    for lanes, (name, hard) in enumerate(HARD.items()):
        case = case_of(table, key_size, value_size, **hard)
        found = errors(*on_host(machine, case, FLOATS[dtype], lanes=lanes + 1, per_channel=per_channel))
        assert max(found.values()) <= fused_bound(case.bound, dtype), (name, found)


@pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])
def test_no_two_lanes_race(per_channel, watching, on_host, errors, table):
    """A far plan that two spans of channels, or two members of a group of heads, could trip over."""
    case = case_of(table, 192, 16, length=20)
    found = errors(*on_host(watching, case, mx.float32, per_channel=per_channel))
    assert max(found.values()) <= fused_bound(case.bound, "float32"), found


BETWEEN_SPANS = "if (UNSTAGED && m > 0) {\n        barrier();"


def test_a_removed_barrier_between_spans(watching, host_module, host_folder, on_host, table):
    text = header("metal")
    assert BETWEEN_SPANS in text, "the text has changed: plant this defect elsewhere"
    text = text.replace(BETWEEN_SPANS, BETWEEN_SPANS.replace("barrier();", ";"))
    wrong = host_module.HostMachine(host_folder, text, watch=True)

    class Mixed:
        def run(self, launch, seed: int):
            return (wrong if launch.name == "gated_delta_channel_gradients" else watching).run(launch, seed)

    with pytest.raises(host_module.HostError, match="no barrier between them"):
        on_host(Mixed(), case_of(table, 192, 16, length=20), mx.float32, per_channel=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("machine_name", ["metal", "cuda"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])
def test_every_size_up_to_256_has_a_tiling(machine_name, dtype, per_channel):
    options = {"masked": True, "segmented": True, "per_channel": per_channel}
    for key_size in (4, 7, *range(16, 257, 16), 200, 250):
        for value_size in (4, 16, 100, 128, 192, 256):
            shape = (2, 100, 2, 4, key_size, value_size)
            tiling = tiling_of(machine_name, shape, FLOATS[dtype], **options)
            assert tiling is not None, shape
            assert tiling.unstaged <= (machine_name == "metal")
