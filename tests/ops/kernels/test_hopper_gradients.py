"""Hopper's kernel for the gradients of the gated delta rule, run on the host machine after the Metal text's scans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from beside import load
from deltatune.machine import nvidia
from deltatune.ops.gated_delta import gated_delta_naive, hopper_gradients
from deltatune.ops.gated_delta.fused_op import tiling_of
from deltatune.ops.gated_delta.tolerances import OVERSHOOTING, REPEATED_KEY, fused_bf16_norm
from deltatune.ops.kernels.launch import FOLDER, Launch, header

HERE = Path(__file__).parent
FILES = ("hopper_tiles.h", "gated_delta.h", "gated_delta_hopper_gradients.h")
HOPPER = "".join(
    [header("metal", ()), (HERE / "hopper_host.h").read_text(), *((FOLDER / name).read_text() for name in FILES)]
)
saved_states = load(HERE / "saved_states.py")
CHUNKS_OF_64 = {"chunk": 64, "gradient_groups": 8, "stages": 2, "overlay": False, "slice": 32, "split": 2}


class WithHopper:
    """Runs Hopper's kernel on one host machine, with the scans' results in CUDA's form, and others on another."""

    def __init__(self, machine, hopper):
        self.machine, self.hopper = machine, hopper

    def run(self, launch: Launch, seed: int = 1) -> list[mx.array]:
        if launch.name != "gated_delta_hopper_gradients":
            return self.machine.run(launch, seed)
        size, chunk = launch.values["DV"], hopper_gradients.CHUNK
        saved = {name: saved_states.as_cuda(launch.inputs[name], size, chunk) for name in ("u", "d_right")}
        return self.hopper.run(replace(launch, inputs=launch.inputs | saved), seed)


@pytest.fixture
def make(host_folder, host_module, nvidia_sized, monkeypatch):
    """Return make(text) -> a machine on which gated_delta_fused runs the kernel in this text, in three blocks."""
    monkeypatch.setattr(hopper_gradients, "serves", lambda tiling: True)
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, 3))

    def machine(text: str = HOPPER):
        hopper = host_module.HostMachine(host_folder, text, bytes=nvidia.H200.block_bytes, cuda=True)
        return WithHopper(nvidia_sized[False], hopper)

    return machine


SIZES = {"batch": 1, "length": 130, "repeats": 1, "key_size": 128, "value_size": 128}
OPEN = {"gates": "open"}
CASES = {
    "130 tokens": SIZES,
    "three tokens": SIZES | {"length": 3},
    "documents, masked middle": SIZES
    | {"batch": 2, "key_heads": 2, "repeats": 2, "mask": "middle", "segments": True, "gates": "mixed", "length": 90},
    "closed gates, three heads": SIZES | {"repeats": 3, "gates": "closed", "length": 70},
    "few closed gates, values of 64": SIZES | {"value_size": 64, "gates": "few closed"},
    "one key": SIZES | OPEN | {"keys": "one", "beta": 1.0, "bound": REPEATED_KEY},
    "near keys, beta 1.9": SIZES | OPEN | {"keys": "near", "beta": 1.9, "bound": OVERSHOOTING},
    "beta 2": SIZES | OPEN | {"beta": 2.0, "bound": OVERSHOOTING},
}


@pytest.mark.parametrize("name", CASES)
def test_beside_naive(name, make, check, on_host, norms, table):
    case = table.Case(name, **CASES[name])
    found = norms(*check(make(), case, "bfloat16", lanes=len(name), **CHUNKS_OF_64))
    naive = norms(*on_host(None, case, mx.bfloat16, by=gated_delta_naive))
    bounds = {key: fused_bf16_norm(error) for key, error in naive.items()}
    assert not {key: (error, bounds[key]) for key, error in found.items() if error > bounds[key]}


def test_the_order_of_lanes_and_the_number_of_blocks_change_no_bit(make, on_host, table, monkeypatch):
    case = table.Case("order", **CASES["documents, masked middle"])
    first, _ = on_host(make(), case, mx.bfloat16, lanes=1, **CHUNKS_OF_64)
    for lanes, blocks in ((2, 3), (3, 1)):
        monkeypatch.setattr(nvidia, "limits", lambda blocks=blocks: nvidia.Limits(nvidia.H200.block_bytes, blocks))
        again, _ = on_host(make(), case, mx.bfloat16, lanes=lanes, **CHUNKS_OF_64)
        for key in ("q", "k", "log_g", "beta"):
            assert mx.array_equal(first[key].view(mx.uint16), again[key].view(mx.uint16)), (key, lanes)


# Defects by name: a part of the kernel's text, and what replaces it.
DEFECTS = {
    "a stage overwritten before it is read": ("if (use > 0) mbarrier_wait(barriers.read(stage), use - 1);", ""),
    "a stage announced before it arrives": ("pieces_wait<3>();", ""),
    "sums read before they are written": ("    mbarrier_wait(barriers.sums(), step);\n", ""),
    "the other panel": ("own_panel = PART * Memory::panel", "own_panel = (1 - PART) * Memory::panel"),
    "weights of the last value head alone": ("weights[4 * i + j] += before[j];", ""),
    "dq of the last value head alone": ("dq[4 * i + j] += before[j];", ""),
    "rows past the end": ("      if (i >= length) continue;\n      const long to", "      const long to"),
    "no weights with q": ("Half::columns(dk, y_turned[plane], queries);", ""),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_shows(name, make, on_host, norms, table, host_module):
    machine = make(host_module.plant(HOPPER, *DEFECTS[name]))
    case = table.Case("planted", **SIZES | {"length": 300, "repeats": 2, "gates": "mixed"})
    try:
        worst = max(norms(*on_host(machine, case, mx.bfloat16, **CHUNKS_OF_64)).values())
    except host_module.HostError as refusal:
        worst = np.inf
        print(refusal)
    assert not worst <= fused_bf16_norm(0.0)


# Defects that the gradient of the gates alone shows.
TAILS = {
    "the tail of another tile": ("(PART * 4 + warp) * 2);", "(PART * 4 + (warp ^ 1)) * 2);"),
    "tails without their sign": ("^ 0xa000a000u", "^ 0x20002000u"),
    "rows by one part alone": ("if (s % 2 == PART) add_operand_dots", "if (s % 2 == 0) add_operand_dots"),
    "R without its low plane in the pairs": ("Half::columns(sums.pairs, right_low, high);", ""),
    "pairs of P alone": ("row_sums[t * 4 + b] += row_sums[256 + t * 4 + b];", ""),
}


@pytest.mark.parametrize("name", TAILS)
def test_what_only_the_gradient_of_the_gates_shows(name, make, on_host, norms, table, host_module):
    machine = make(host_module.plant(HOPPER, *TAILS[name]))
    case = table.Case("planted", **SIZES | OPEN | {"keys": "near", "beta": 1.9})
    assert not norms(*on_host(machine, case, mx.bfloat16, **CHUNKS_OF_64))["log_g"] <= fused_bf16_norm(0.0)


def test_which_calls_the_kernel_serves():
    def tiling(machine="cuda", dtype=mx.bfloat16, key_size=128, value_size=128):
        shape = (1, 100, 2, 4, key_size, value_size)
        return tiling_of(machine, shape, dtype, masked=False, segmented=False, per_channel=False)

    assert hopper_gradients.serves(tiling())
    assert hopper_gradients.serves(tiling(value_size=64))
    others = [tiling("metal"), tiling(dtype=mx.float16), tiling(key_size=64), tiling(value_size=96)]
    assert not any(hopper_gradients.serves(other) for other in others)
