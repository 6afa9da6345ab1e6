"""Fixtures that run an implementation on a case of oracle.py and measure its errors against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from beside import load
from poison import poison

oracle = load(Path(__file__).with_name("oracle.py"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", oracle.CASES, ids=lambda case: case.name)


@pytest.fixture
def case_named() -> Callable:
    return {case.name: case for case in oracle.CASES}.__getitem__


@pytest.fixture
def make_case() -> type:
    return oracle.Case


@pytest.fixture
def differentiate() -> Callable:
    """Return differentiate(implementation, case, dtype, **more) -> (results, truth), y and the gradients by name."""

    def run(implementation: Callable, case, dtype: mx.Dtype = mx.float32, **more) -> tuple[dict, dict]:
        given = {name: mx.array(x) for name, x in case.arrays().items()}
        given = {name: x if name == "sinks" else x.astype(dtype) for name, x in given.items()}
        options = case.options()
        constants = {name: mx.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        inputs = [name for name in given if name != "dy"]

        def call(*arrays: mx.array) -> list[mx.array]:
            named = dict(zip(inputs, arrays, strict=True))
            return [implementation(named.pop("q"), named.pop("k"), named.pop("v"), **named, **constants, **more)]

        poison()
        outputs, gradients = mx.vjp(call, [given[name] for name in inputs], [given["dy"]])
        mx.eval(outputs, gradients)
        exact = {name: np.array(x.astype(mx.float32), np.float64) for name, x in given.items()}
        sinks = exact.pop("sinks", None)
        truth = oracle.attention64(**exact, sinks=sinks, **options)
        return dict(zip(truth, [*outputs, *gradients], strict=True)), truth

    return run


@pytest.fixture
def norms() -> Callable[[dict, dict], dict[str, float]]:
    """Return norms(results, truth) -> by name, the norm of the error relative to that of the truth.

    Where the truth cancels to 0, the norm is relative to the largest one of all names.
    """

    def measure(results: dict, truth: dict) -> dict[str, float]:
        found, largest = {}, max(np.linalg.norm(exact) for exact in truth.values())
        for name, exact in truth.items():
            result = np.array(results[name].astype(mx.float32), np.float64)
            assert result.shape == exact.shape, name
            error, size = np.linalg.norm(result - exact), np.linalg.norm(exact)
            found[name] = float(error / (size if size > 1e-6 * largest else largest))
            found[name] = np.inf if np.isnan(error) else found[name]
        return found

    return measure
