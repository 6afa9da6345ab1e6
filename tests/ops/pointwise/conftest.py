"""Where the passes run, and what a trial before first use must refuse."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import deltatune  # noqa: F401

# isort: split
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from host_machine import HostMachine

from deltatune.machine import backend
from deltatune.ops.kernels.launch import header
from deltatune.ops.pointwise.pass_launch import BODIES, Execute, Pass


@pytest.fixture(scope="session")
def execute(host_folder):
    """Launches on the host machine, or on the GPU where there is one."""
    return Pass.run if backend.device() == "cuda" else HostMachine(host_folder, header("metal", BODIES)).run


@pytest.fixture
def on_trial(execute, caplog) -> Callable[[Callable[[Execute], bool], float], None]:
    """on_trial(proven, factor): launches pass, those off by `factor` and those that stop are named and refused."""

    def on_trial(proven, factor):
        def wrong(launch):
            return [array * factor for array in execute(launch)]

        def stopped(_):
            raise RuntimeError("no compiler")

        for run, said in ((execute, None), (wrong, "off by"), (stopped, "no compiler")):
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                assert proven(run) is (said is None)
                assert (said or "") in caplog.text

    return on_trial
