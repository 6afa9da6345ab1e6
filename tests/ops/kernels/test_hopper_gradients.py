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
    print({key: float(np.round(found[key] * 1e3, 3)) for key in ("q", "k", "log_g", "beta")})
