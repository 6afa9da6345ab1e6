"""Heads of 192 and 256 with a Mac's 32 KB of threadgroup memory, against the recurrence in float64."""

import mlx.core as mx
import pytest

from deltatune.ops.gated_delta.fused import FILES
from deltatune.ops.gated_delta.fused_op import tiling_of
from deltatune.ops.gated_delta.tolerances import OVERSHOOTING, REPEATED_KEY
from deltatune.ops.kernels.launch import header

HARD = {
    "mixed gates": {"gates": "mixed"},
    "one key": {"keys": "one", "gates": "open", "beta": 1.0, "bound": REPEATED_KEY},
    "near keys, beta 1.9": {"keys": "near", "gates": "open", "beta": 1.9, "bound": OVERSHOOTING},
}
# Key size, value size, dtype, and whether gates are per channel: every dtype occurs with either kind of gate.
SIZES = [
    (192, 192, "float32", False),
    (256, 128, "bfloat16", False),
    (256, 64, "float32", True),
    (200, 40, "float16", True),
    *(
        pytest.param((256, 256, dtype, dtype == "float32"), marks=pytest.mark.weekly)
        for dtype in ("float32", "bfloat16")
    ),
]


def case_of(table, key_size: int, value_size: int, **more):
    sizes = {"name": "wide", "batch": 1, "length": 35, "mask": "middle", "segments": True}
    return table.Case(**sizes | {"key_size": key_size, "value_size": value_size} | more)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_and_backward(size, machine, check, table):
    key_size, value_size, dtype, per_channel = size
    for lanes, (name, hard) in enumerate(HARD.items()):
        case = case_of(table, key_size, value_size, name=name, **hard)
        check(machine, case, dtype, lanes=lanes + 1, per_channel=per_channel)


@pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])
def test_no_two_lanes_race(per_channel, watching, check, table):
    """An unstaged tiling, with two spans of channels and two value heads per key head that could race."""
    check(watching, case_of(table, 192, 16, length=20), "float32", per_channel=per_channel)


BETWEEN_SPANS = "if (UNSTAGED && m > 0) {\n        barrier();"


def test_a_removed_barrier_between_spans(watching, host_module, host_folder, on_host, table):
    text = host_module.plant(header("metal", FILES), BETWEEN_SPANS, BETWEEN_SPANS.replace("barrier();", ";"))
    wrong = host_module.HostMachine(host_folder, text, watch=True)
    mixed = host_module.OneKernelReplaced("gated_delta_channel_gradients", wrong, watching)
    with pytest.raises(host_module.HostError, match="no barrier between them"):
        on_host(mixed, case_of(table, 192, 16, length=20), mx.float32, per_channel=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("machine_name", ["metal", "cuda"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channel"])
def test_every_size_up_to_256_has_a_tiling(machine_name, dtype, per_channel):
    options = {"masked": True, "segmented": True, "per_channel": per_channel}
    for key_size in (4, 7, *range(16, 257, 16), 200, 250):
        for value_size in (4, 16, 100, 128, 192, 256):
            shape = (2, 100, 2, 4, key_size, value_size)
            tiling = tiling_of(machine_name, shape, getattr(mx, dtype), **options)
            assert tiling is not None, shape
            assert tiling.unstaged <= (machine_name == "metal")
