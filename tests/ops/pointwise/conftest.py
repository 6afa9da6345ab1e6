"""Fixtures that run launches, and that check the trial of a kernel before its first use."""

import logging

import mlx.core as mx
import pytest
from host_machine import HostMachine

from deltatune.machine import backend
from deltatune.ops.kernels.launch import Launch, header, on
from deltatune.ops.operator import kernel_operator
from deltatune.ops.pointwise import adam, stored_moments


@pytest.fixture(scope="session")
def execute(host_folder):
    """Runs a launch on a host machine with the text of its kernel, or on the GPU where there is one."""
    machines: dict[tuple[str, ...], HostMachine] = {}

    def run(launch: Launch, seed: int = 1) -> list[mx.array]:
        files = launch.kernel.files
        if files not in machines:
            machines[files] = HostMachine(host_folder, header("metal", files))
        return machines[files].run(launch, seed)

    return Launch.run if backend.device() == "cuda" else run


@pytest.fixture
def check_trial(execute, caplog):
    """Check that a trial accepts right launches, and refuses and names wrong ones (by `factor`) and failing ones."""

    def check(case, factor):
        def wrong(launch):
            return [array * factor for array in execute(launch)]

        def fails(_):
            raise RuntimeError("no compiler")

        for run, warning in ((execute, None), (wrong, "off by"), (fails, "no compiler")):
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                assert kernel_operator.is_right(lambda: case, run=run) is (warning is None)
                assert (warning or "") in caplog.text

    return check


@pytest.fixture
def launches(pretend_gpu, execute):
    """The names of the launches of Adam's steps, which the host machine runs while the device passes for a GPU."""
    cases = (adam.trial_case, stored_moments.trial_case)
    names = pretend_gpu(execute, lambda case_of, *_, **__: case_of in cases)
    with on(None):
        yield names
