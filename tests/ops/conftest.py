"""Runs the launches of a test on the device that its fixture `execute` is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltatune.ops.kernels.launch import on


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    if "execute" not in request.fixturenames:
        yield
        return
    with on(request.getfixturevalue("execute")):
        yield
