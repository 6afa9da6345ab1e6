"""Hopper's kernel for products of rows sorted by expert, run on the host machine and compared with float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from beside import load
from deltatune.machine import backend, nvidia
from deltatune.ops.experts import grouped_hopper
from deltatune.ops.experts.grouped_hopper import HopperTile
from deltatune.ops.experts.tolerances import GROUPED
from deltatune.ops.kernels.launch import FOLDER, header, numbers

HERE = Path(__file__).parent
FILES = ("hopper_tiles.h", "expert_product_hopper.h")
HOPPER = "".join(
    [header("metal", ()), (HERE / "hopper_host.h").read_text(), *((FOLDER / name).read_text() for name in FILES)]
)
of_any_machine = load(HERE / "test_expert_product.py")

# How many rows the experts have, the sizes of their matrices, and the number of blocks.
UNEVEN = ([70, 0, 3, 131, 64, 1], 192, 192)
CASES = {
    "uneven": UNEVEN,
    "empty experts, two tiles high": ([0, 0, 200, 0, 16, 0], 128, 320),
    "all rows on the first": ([193, 0], 384, 128),
    "more experts than lanes": ([0] * 20 + [5] + [2] * 20 + [0, 1], 128, 128),
    "one row": ([0, 1, 0], 128, 128),
}


@pytest.fixture
def run(host_folder, host_module, monkeypatch):
    """Return run(case, transpose, onto=None, text=HOPPER, seed=1, blocks=3) -> the kernel's product."""
    machines = {}

    def multiply(case, transpose, onto=None, text=HOPPER, seed=1, blocks=3):
        monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, blocks))
        if text not in machines:
            machines[text] = host_module.HostMachine(host_folder, text, bytes=nvidia.H200.block_bytes, cuda=True)
        weight = case.weight if transpose else mx.contiguous(case.weight.swapaxes(-1, -2))
        tile = grouped_hopper.product_tile(case.weight.shape[1])
        launch = grouped_hopper.product_launch(
            case.rows, weight, case.ends, transpose, numbers(case.scale), onto, tile
        )
        return machines[text].run(launch, seed)[0]

    return multiply


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_product(name, transpose, run):
    case = of_any_machine.ExpertCase(*CASES[name])
    assert of_any_machine._error(run(case, transpose), case.truth) <= GROUPED["bfloat16"]
