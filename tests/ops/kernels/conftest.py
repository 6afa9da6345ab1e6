"""Fixtures that run the fused operator, forward and backward, on the host machine, and the recurrence in float64."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from beside import load
from deltatune.ops.gated_delta import float64 as oracle
from deltatune.ops.gated_delta.fused_op import gated_delta_fused, tiling_of
from deltatune.ops.gated_delta.tiling import Tiling
from deltatune.ops.gated_delta.tolerances import fused_bound
from deltatune.ops.kernels.launch import on
from deltatune.ops.operator.measure import as_float64

HERE = Path(__file__).parent


host = load(HERE / "host_machine.py")
cases = load(HERE.parent / "gated_delta" / "cases.py")


# The shared memory of a block on an NVIDIA GPU, in bytes, for tilings that do not fit on a Mac.
NVIDIA_BYTES = 227 * 1024


def metal_tiling(**changes: int) -> Callable:
    """Return a function that chooses a Metal GPU's tiling, with the fields in `changes` replaced."""

    def tiling_of_call(shape: tuple, dtype: mx.Dtype, **options: bool) -> Tiling:
        tiling = replace(tiling_of("metal", shape, dtype, **options), **changes)
        assert tiling.fits or (changes and tiling.largest_bytes <= NVIDIA_BYTES)
        return tiling

    return tiling_of_call


@pytest.fixture(scope="session")
def machine(host_folder):
    return host.HostMachine(host_folder)


@pytest.fixture(scope="session")
def watching(host_folder):
    """A host machine that checks every access to threadgroup memory for races."""
    return host.HostMachine(host_folder, watch=True)


@pytest.fixture(scope="session")
def nvidia_sized(host_folder):
    """Host machines with an NVIDIA GPU's memory per block, by whether they watch for races."""
    return {watch: host.HostMachine(host_folder, watch=watch, bytes=NVIDIA_BYTES) for watch in (False, True)}


@pytest.fixture(scope="session")
def host_module():
    return host


@pytest.fixture
def table():
    """The module of cases, tests/ops/gated_delta/cases.py."""
    return cases


@pytest.fixture
def on_host():
    """Return on_host(machine, case, dtype, lanes=1, per_channel=False, by=None, erases=True, **tiling).

    It returns (results, truth), dictionaries of arrays by name. `lanes` seeds the order of the lanes, `tiling` changes
    fields of the tiling, and `by` is an implementation to run instead of the fused one. Without `erases` the operator
    is linear attention.
    """

    def run(
        machine,
        case,
        dtype: mx.Dtype,
        lanes: int = 1,
        per_channel: bool = False,
        by: Callable | None = None,
        erases: bool = True,
        **tiling,
    ) -> tuple[dict, dict]:
        # Neither its name nor its bound changes what a case computes.
        drawn, dy, dstate, truth = drawn_and_true(replace(case, name="", bound=0.0), dtype, per_channel, erases)
        inputs = dict(drawn)
        constants = {name: inputs[name] for name in ("mask", "segments")}
        constants = {name: None if value is None else mx.array(value) for name, value in constants.items()}

        names = [name for name in oracle.INPUTS if name in inputs]
        options = constants if erases else constants | {"beta": None}

        def call(*arrays: mx.array) -> tuple[mx.array, mx.array]:
            if by is not None:
                return by(*arrays[:-1], initial_state=arrays[-1], **options)
            chosen = metal_tiling(**tiling)
            return gated_delta_fused(*arrays[:-1], initial_state=arrays[-1], tiling_of_call=chosen, **options)

        arrays = [mx.array(inputs[name]) for name in names]
        differentiated = partial(mx.vjp, call, arrays, [dy, mx.array(dstate)])
        if isinstance(machine, host.HostMachine):
            machine.foresee(differentiated)
        with nullcontext() if machine is None else on(partial(machine.run, seed=lanes)):
            outputs, gradients = differentiated()
        return dict(zip(("y", "state", *names), [*outputs, *gradients], strict=True)), truth

    return run


@pytest.fixture
def check(on_host, errors):
    """Return check(machine, case, dtype, **options): run `on_host` and compare every result with the case's bound."""

    def run(machine, case, dtype: str, **options) -> tuple[dict, dict]:
        results = on_host(machine, case, getattr(mx, dtype), **options)
        relative = errors(*results)
        assert all(error <= fused_bound(case.bound, dtype) for error in relative.values()), (case.name, relative)
        return results

    return run


# Defects are planted into one case after another, and float64 takes longer than the kernels.
@lru_cache(maxsize=16)
def drawn_and_true(case, dtype: mx.Dtype, per_channel: bool, erases: bool) -> tuple[dict, mx.array, np.ndarray, dict]:
    """Return a case's inputs, the cotangents of y and of the last state, and the results in float64."""
    inputs = case.inputs(per_channel, 0, erases)
    draw = np.random.default_rng(1)
    dy = mx.array(draw.normal(size=inputs["v"].shape).astype(np.float32)).astype(dtype)
    dstate = draw.normal(size=inputs["initial_state"].shape).astype(np.float32)
    for name in ("q", "k", "v"):
        inputs[name] = mx.array(inputs[name]).astype(dtype)
    exact = inputs | {name: as_float64(inputs[name]) for name in ("q", "k", "v")}
    return inputs, dy, dstate, oracle.recurrence(exact, as_float64(dy), dstate)
