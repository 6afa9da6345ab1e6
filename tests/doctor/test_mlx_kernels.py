"""The processes in which MLX builds kernels of its own for the doctor."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltatune.doctor import mlx_kernels
from deltatune.machine import backend


@pytest.mark.parametrize(("device", "processes"), [("cuda", 2), ("metal", 0), ("cpu", 0)])
def test_they_run_where_mlx_has_kernels_to_build(monkeypatch, device, processes):
    ended, run = [], subprocess.run

    def watched(*arguments, **options):
        ended.append(run(*arguments, **options))

    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(subprocess, "run", watched)
    with ThreadPoolExecutor() as builders:
        mlx_kernels.build(builders)
    assert [process.returncode for process in ended] == [0] * processes
