"""Runs the fused op, forward and backward, on the host machine, beside the recurrence in float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta.fused import Plan
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, plan_on
from deltatune.selftest import recurrence as oracle

HERE = Path(__file__).parent


def _load(path: Path) -> ModuleType:
    qualified = f"{path.parent.name}_{path.stem}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, path)
        sys.modules[qualified] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[qualified])
    return sys.modules[qualified]


host = _load(HERE / "host_machine.py")
cases = _load(HERE.parent / "gated_delta" / "cases.py")


# Threadgroup memory for plans that no Mac could hold: what a block has on an NVIDIA GPU.
MORE_BYTES = 227 * 1024


def metal_cut(**asked: int) -> Callable:
    """The plan of a Metal GPU, with another cut where a test asks for one."""

    def cut(shape: tuple, dtype: mx.Dtype, **what: bool) -> Plan:
        plan = plan_on("metal", shape, dtype, **what)
        plan = replace(plan, **asked)
        assert plan.fits or (max(plan.prepare_bytes, plan.scan_bytes, plan.gradient_bytes) <= MORE_BYTES and asked)
        return plan

    return cut


@pytest.fixture(scope="session")
def machine(host_folder: Path):
    return host.HostMachine(host_folder)


@pytest.fixture(scope="session")
def watching(host_folder: Path):
    """The machine that looks at every access to threadgroup memory."""
    return host.HostMachine(host_folder, watch=True)


@pytest.fixture(scope="session")
def roomy(host_folder: Path):
    """A machine with an NVIDIA GPU's memory a block, and the same one watching: for plans that no Mac could hold."""
    return {watch: host.HostMachine(host_folder, watch=watch, bytes=MORE_BYTES) for watch in (False, True)}


@pytest.fixture(scope="session")
def host_module() -> ModuleType:
    return host


@pytest.fixture
def table() -> ModuleType:
    """The table of tolerances and the kinds of cases."""
    return cases


@pytest.fixture
def on_host() -> Callable:
    """on_host(machine, case, dtype, lanes=1, per_channel=False, by=None, **cut) -> (results, truth): arrays by name.

    by: another implementation, run in the fused one's place.
    """

    def run(
        machine, case, dtype: mx.Dtype, lanes: int = 1, per_channel: bool = False, by: Callable | None = None, **asked
    ) -> tuple[dict, dict]:
        inputs = case.inputs(per_channel, 0)
        draw = np.random.default_rng(1)
        dy = mx.array(draw.normal(size=inputs["v"].shape).astype(np.float32)).astype(dtype)
        dstate = draw.normal(size=inputs["initial_state"].shape).astype(np.float32)
        for name in ("q", "k", "v"):
            inputs[name] = mx.array(inputs[name]).astype(dtype)
        constants = {name: inputs[name] for name in ("mask", "segments")}
        constants = {name: None if value is None else mx.array(value) for name, value in constants.items()}

        def call(*arrays: mx.array) -> tuple[mx.array, mx.array]:
            if by is not None:
                return by(*arrays[:-1], initial_state=arrays[-1], **constants)
            launched = partial(machine.run, seed=lanes)
            more = {"cut": metal_cut(**asked), "execute": launched} | constants
            return gated_delta_fused(*arrays[:-1], initial_state=arrays[-1], **more)

        outputs, gradients = mx.vjp(call, [mx.array(inputs[name]) for name in oracle.INPUTS], [dy, mx.array(dstate)])
        names = ("y", "state", *oracle.INPUTS)
        exact = inputs | {name: _wide(inputs[name]) for name in ("q", "k", "v")}
        truth = oracle.recurrence(exact, _wide(dy), dstate)
        return dict(zip(names, [*outputs, *gradients], strict=True)), truth

    return run


def _wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), dtype=np.float64)


@pytest.fixture
def errors() -> Callable[[dict, dict], dict[str, float]]:
    """errors(results, truth) -> largest error over the largest true element, by name; infinite where not finite."""

    def measure(results: dict, truth: dict) -> dict[str, float]:
        found = {}
        for name, exact in truth.items():
            result = _wide(results[name])
            assert result.shape == exact.shape, name
            error, largest = np.abs(result - exact).max(), np.abs(exact).max()
            # Where the truth is zero throughout, only zero is right.
            found[name] = error / largest if largest > 0 else (np.inf if error > 0 else 0.0)
            found[name] = np.inf if np.isnan(error) else found[name]
        return found

    return measure


def _norm(error: np.ndarray, exact: np.ndarray) -> float:
    """Where the truth is zero throughout, only zero is right."""
    size, largest = np.linalg.norm(error), np.linalg.norm(exact)
    return float(size / largest) if largest > 0 else (np.inf if size > 0 else 0.0)


@pytest.fixture
def norms() -> Callable[[dict, dict], dict[str, float]]:
    """norms(results, truth) -> the error's norm over the truth's, by name."""

    def measure(results: dict, truth: dict) -> dict[str, float]:
        return {name: _norm(_wide(results[name]) - exact, exact) for name, exact in truth.items()}

    return measure
