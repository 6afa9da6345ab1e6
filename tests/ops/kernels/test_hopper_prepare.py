"""Hopper's prepare kernel by itself, on a host machine that watches for races, compared with float64."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from host_machine import defects, some_daily

from beside import load
from deltatune.machine import nvidia
from deltatune.ops.gated_delta import fused_hopper

TEXT = load(Path(__file__).with_name("host_machine.py")).cuda_text(fused_hopper.PREPARE)
# Half of the last place of a pair of bf16, relative to the number; and of fp32.
PAIR, FLOAT, TINY = 2.0**-17, 2.0**-24, 2.0**-116


def chunks_of(array: np.ndarray, chunks: int, beyond: float = 0.0) -> np.ndarray:
    """Return [B, T, H, ...] as [B, H, chunks, 64, ...] in float64, with `beyond` past the end."""
    rest = [(0, 0)] * (array.ndim - 2)
    added = [(0, 0), (0, chunks * 64 - array.shape[1]), *rest]
    array = np.pad(array.astype(np.float64), added, constant_values=beyond)
    return np.moveaxis(array.reshape(array.shape[0], chunks, 64, *array.shape[2:]), 3, 1)


def live_inputs(x: dict[str, np.ndarray | None]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return q, k and beta, which are zero where a step is not live, and the gates, with the rules for a document."""
    live = np.ones(x["q"].shape[:2], bool) if x["mask"] is None else x["mask"]
    arrays = {name: np.where(live.reshape(*live.shape, *[1] * (x[name].ndim - 2)), x[name], 0.0) for name in "qk"}
    arrays["beta"] = np.where(live[..., None], x["beta"], 0.0)
    gates = np.where(live[..., None], np.exp(x["log_g"].astype(np.float64)), 1.0)
    if x["segments"] is not None:
        gates[:, 1:][np.diff(x["segments"], axis=1) != 0] = 0.0
    return arrays, gates


def exact(x: dict[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """Return in float64 solve, scores and factors [B, Hv, chunks, ...], and bounds for the errors of the former two."""
    arrays, gates = live_inputs(x)
    count = -(-gates.shape[1] // 64)
    repeats = gates.shape[2] // x["q"].shape[2]
    q, k = (np.repeat(chunks_of(arrays[name], count), repeats, axis=1) for name in "qk")
    beta, gates = chunks_of(arrays["beta"], count), chunks_of(gates, count, beyond=1.0)
    decay = np.zeros((*gates.shape, 64))
    for i in range(64):
        if i > 0:
            decay[..., i, :] = decay[..., i - 1, :] * gates[..., i, None]
        decay[..., i, i] = 1.0
    scores, n = decay * (q @ k.swapaxes(-1, -2)), np.tril(decay * (k @ k.swapaxes(-1, -2)), -1)
    left = np.linalg.inv(np.eye(64) + n * beta[..., None, :])
    solve = np.tril(left @ n, -1)
    # An error e of N becomes (I + N beta)^-1 e (I + beta N)^-1. Each of the three levels of the solution rounds what it
    # computes and what it multiplies to pairs of bf16, and every product leaves out low times low.
    right = np.linalg.inv(np.eye(64) + beta[..., :, None] * n)
    after = np.concatenate([decay[..., -1, :, None], beta[..., None]], -1)
    return {
        "solve": solve,
        "scores": scores,
        "factors": np.stack([np.cumprod(gates, -1), after[..., 0], after[..., 1]], -2),
        "solve bound": 12 * PAIR * (np.abs(left) @ (np.abs(n) + np.abs(solve)) @ np.abs(right)),
        "scores bound": 2 * PAIR * np.abs(scores) + 128 * FLOAT * decay * (np.abs(q) @ np.abs(k).swapaxes(-1, -2)),
    }


def triangle(array: mx.array) -> np.ndarray:
    """Return the matrix [..., 64, 64] that cores hold."""
    cores = np.array(array.astype(mx.float32), np.float64).reshape(*array.shape[:-1], 8, 9, 8, 8)
    found = np.zeros((*array.shape[:-1], 8, 8, 8, 8))
    for i in range(8):
        for j in range(i + 1):
            found[..., i, j, :, :] = cores[..., i, j, :, :] + cores[..., j, i + 1, :, :]
    return found.swapaxes(-3, -2).reshape(*array.shape[:-1], 64, 64)


@pytest.fixture
def worst(host_folder, host_module, monkeypatch):
    """Return worst(case, text=TEXT, seed=1) -> by output, the largest error in units of its bound."""
    monkeypatch.setattr(nvidia, "limits", lambda: nvidia.H200)
    monkeypatch.setattr(nvidia, "generation", lambda: nvidia.HOPPER)
    machines = {}

    def compare(case, text: str = TEXT, seed: int = 1) -> dict[str, float]:
        if text not in machines:
            machines[text] = host_module.HostMachine(host_folder, text, True, nvidia.H200.block_bytes, cuda=True)
        x = case.inputs(False, 0)
        given = {name: None if x[name] is None else mx.array(x[name]) for name in (*"qkv", "log_g", "beta")}
        given |= {name: given[name].astype(mx.bfloat16) for name in "qkv"}
        given |= {name: None if x[name] is None else mx.array(x[name]) for name in ("mask", "segments")}
        shape = (*x["q"].shape[:3], *x["v"].shape[2:3], 128, x["v"].shape[3])
        masked, segmented = x["mask"] is not None, x["segments"] is not None
        tiling = fused_hopper.choose_hopper_tiling(shape, mx.bfloat16, masked=masked, segmented=segmented)
        launch = tiling.launch("prepare", {name: array for name, array in given.items() if array is not None})
        solve, scores, factors = machines[text].run(launch, seed)
        truth = exact(x | {name: np.array(given[name].astype(mx.float32)) for name in "qk"})
        found = {"solve": triangle(solve), "scores": triangle(scores)}
        errors = {name: _units(found[name] - truth[name], truth[f"{name} bound"]) for name in found}
        # A product of 64 gates, each of them right to two places.
        errors["factors"] = _units(np.array(factors) - truth["factors"], 256 * FLOAT * truth["factors"])
        return errors

    return compare


def _units(error: np.ndarray, bound: np.ndarray) -> float:
    """Low parts of numbers that are nearly too small for fp32 are lost, so that such numbers may be wrong by TINY."""
    units = np.abs(error) / np.maximum(bound, TINY)
    return float("inf") if np.isnan(units).any() else float(units.max())


SIZES = {"batch": 1, "length": 130, "repeats": 2, "key_size": 128, "value_size": 64}
OPEN = {"gates": "open"}
CASES = {
    "two value heads": SIZES,
    "one value head": SIZES | {"repeats": 1, "key_heads": 2},
    "three value heads": SIZES | {"repeats": 3, "length": 70},
    "four value heads": SIZES | {"repeats": 4, "length": 64, "key_heads": 2},
    "three tokens": SIZES | {"length": 3},
    "documents, masked middle": SIZES
    | {"batch": 2, "repeats": 3, "mask": "middle", "segments": True, "gates": "mixed", "length": 90},
    "closed gates": SIZES | {"gates": "closed", "length": 70},
    "few tiny gates": SIZES | {"gates": "few tiny"},
    "one key": SIZES | OPEN | {"keys": "one", "beta": 1.0},
    "near keys, beta 1.9": SIZES | OPEN | {"keys": "near", "beta": 1.9},
    "beta 2": SIZES | OPEN | {"beta": 2.0},
}


# Near keys show what one key does, and documents what three value heads do.
WEEKLY = ("one key", "three value heads")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.weekly] * (name in WEEKLY)) for name in CASES])
def test_beside_float64(name, worst, table):
    errors = worst(table.Case(name, **CASES[name]), seed=len(name))
    assert max(errors.values()) <= 1.0, errors


def test_other_orders_of_the_lanes_give_the_same_bits(worst, table):
    case = table.Case("orders", **SIZES | {"repeats": 3, "gates": "mixed"})
    assert worst(case, seed=1) == worst(case, seed=2)


DEFECTS = defects("gated delta on Hopper, prepare", TEXT)


@pytest.mark.parametrize("name", some_daily(DEFECTS))
def test_a_planted_defect_shows(name, worst, table, host_module):
    case = table.Case("planted", **SIZES | {"repeats": 3, "keys": "near", "length": 64})
    text = host_module.plant(TEXT, *DEFECTS[name])
    assert host_module.shows(lambda: not max(worst(case, text).values()) <= 1.0)
