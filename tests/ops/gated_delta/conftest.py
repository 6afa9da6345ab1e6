"""Fixtures that run an implementation on a case, and the recurrence in float64."""

from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from beside import load
from deltatune.ops.gated_delta import float64 as oracle
from deltatune.ops.gated_delta import gated_delta_chunk, gated_delta_naive
from poison import poison

cases = load(Path(__file__).with_name("cases.py"))
# Of linear attention's, which erases nothing, one kind of gates for each case is daily, and cases of beta are none.
EVERY = [
    pytest.param(
        case,
        erases,
        per_channel,
        id=f"{case.name}-{'gated_delta' if erases else 'linear_attention'}-{'channel' if per_channel else 'scalar'}",
        marks=[pytest.mark.weekly] * (not erases and (at + per_channel) % 2 == 0),
    )
    for at, case in enumerate(cases.CASES)
    for erases in ((True, False) if case.beta is None else (True,))
    for per_channel in (False, True)
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize(("case", "erases", "per_channel"), EVERY)
        return
    if "erases" in metafunc.fixturenames:
        metafunc.parametrize("erases", [True, False], ids=["gated_delta", "linear_attention"])
    if "per_channel" in metafunc.fixturenames:
        metafunc.parametrize("per_channel", [False, True], ids=["scalar", "channel"])


@pytest.fixture
def chunk(erases):
    """Return the chunkwise form of either operator; linear attention's takes no beta."""
    return gated_delta_chunk if erases else partial(gated_delta_chunk, beta=None)


@pytest.fixture
def naive(erases):
    return gated_delta_naive if erases else partial(gated_delta_naive, beta=None)


@pytest.fixture
def tolerances():
    return cases


@pytest.fixture
def case_named():
    return {case.name: case for case in cases.CASES}.__getitem__


@pytest.fixture
def run():
    """Return run(implementation, inputs, dy, dstate) -> y, state and the gradients of the inputs, by name."""

    def differentiate(implementation, inputs: dict, dy: np.ndarray, dstate: np.ndarray) -> dict[str, mx.array]:
        poison()
        constants = {name: inputs[name] for name in ("mask", "segments")}
        constants = {name: None if value is None else mx.array(value) for name, value in constants.items()}
        dy, dstate = mx.array(dy), mx.array(dstate)

        def scalar_of(primals: list[mx.array]) -> tuple[mx.array, dict[str, mx.array]]:
            y, state = implementation(*primals[:-1], initial_state=primals[-1], **constants)
            value = (y.astype(mx.float32) * dy).sum() + (state * dstate).sum()
            return value, {"y": y, "state": state}

        names = [name for name in oracle.INPUTS if name in inputs]
        primals = [mx.array(inputs[name]) for name in names]
        (_, outputs), gradients = mx.value_and_grad(scalar_of)(primals)
        results = outputs | dict(zip(names, gradients, strict=True))
        mx.eval(results)
        return results

    return differentiate


@pytest.fixture
def cotangents():
    """Return cotangents(inputs, seed) -> dy and dstate in fp32."""

    def draw(inputs: dict, seed: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(seed + 1000)
        state = generator.normal(size=inputs["initial_state"].shape)
        return generator.normal(size=inputs["v"].shape).astype(np.float32), state.astype(np.float32)

    return draw
