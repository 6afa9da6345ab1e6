"""Hopper's kernels for the gated delta rule, run on the host machine and compared with float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from deltatune.machine import nvidia
from deltatune.ops.gated_delta import gated_delta_naive
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_of
from deltatune.ops.gated_delta.tolerances import OVERSHOOTING, REPEATED_KEY, fused_bf16_norm, fused_bound
from deltatune.ops.kernels.launch import FOLDER, header

HERE = Path(__file__).parent
FILES = ("hopper_tiles.h", "gated_delta.h", "gated_delta_hopper.h", "gated_delta_hopper_gradients.h")
HOPPER = "".join(
    [header("metal", ()), (HERE / "hopper_host.h").read_text(), *((FOLDER / name).read_text() for name in FILES)]
)


@pytest.fixture
def run(host_folder, host_module, on_host, monkeypatch):
    """Return run(case, text=HOPPER, seed=1) -> (results, truth), with three blocks for the gradient kernel."""
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.Limits(nvidia.H200.block_bytes, 3))
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    machines = {}

    def differentiate(case, text: str = HOPPER, seed: int = 1) -> tuple[dict, dict]:
        if text not in machines:
            machines[text] = host_module.HostMachine(host_folder, text, bytes=nvidia.H200.block_bytes, cuda=True)
        execute = partial(machines[text].run, seed=seed)
        by = partial(gated_delta_fused, tiling_of_call=partial(tiling_of, "cuda"), execute=execute)
        return on_host(None, case, mx.bfloat16, by=by)

    return differentiate


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
def test_beside_naive(name, run, on_host, errors, norms, table):
    case = table.Case(name, **CASES[name])
    results = run(case, seed=len(name))
    assert max(errors(*results).values()) <= fused_bound(case.bound, "bfloat16"), errors(*results)
    found, naive = norms(*results), norms(*on_host(None, case, mx.bfloat16, by=gated_delta_naive))
    bounds = {key: fused_bf16_norm(error) for key, error in naive.items()}
    assert not {key: (error, bounds[key]) for key, error in found.items() if error > bounds[key]}
    print({key: round(error * 1e3, 2) for key, error in found.items()})
