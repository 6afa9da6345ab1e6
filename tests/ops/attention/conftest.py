"""Gives the tests of attention the cases of oracle.py, and its functions that run and measure an implementation."""

from pathlib import Path

import pytest

from beside import load

oracle = load(Path(__file__).with_name("oracle.py"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", oracle.CASES, ids=lambda case: case.name)


@pytest.fixture
def case_named():
    return {case.name: case for case in oracle.CASES}.__getitem__


@pytest.fixture
def differentiate():
    return oracle.differentiate


@pytest.fixture
def norms():
    return oracle.norms
