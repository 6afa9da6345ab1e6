"""The process in which MLX builds kernels of its own for the doctor."""

import subprocess

import pytest

from deltatune.doctor import mlx_kernels
from deltatune.machine import backend


@pytest.mark.parametrize(("device", "processes"), [("cuda", 1), ("metal", 0), ("cpu", 0)])
def test_it_runs_where_mlx_has_kernels_to_build(monkeypatch, device, processes):
    ended, run = [], subprocess.run

    def watched(*arguments, **options):
        ended.append(run(*arguments, **options))

    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(subprocess, "run", watched)
    mlx_kernels.build()
    assert [process.returncode for process in ended] == [0] * processes
