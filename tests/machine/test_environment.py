"""Tests the environment variables that deltatune sets for MLX and CUDA."""

import errno
import os
import pwd
import subprocess
import sys

import pytest

from deltatune.errors import UserError
from deltatune.machine import backend, environment
from deltatune.models.load import load
from deltatune.ops import IMPLEMENTATIONS

# Prints the variables as C has them, since MLX reads them there, and what a plan counts with.
PROBE = """
import ctypes, deltatune
from deltatune.machine import backend, environment
from deltatune.models.load import load
from deltatune.plan.simulate import PACES
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(*(getenv(name).decode() for name in (b"MLX_ENABLE_TF32", b"MLX_MAX_MB_PER_BUFFER", b"MLX_MAX_OPS_PER_BUFFER")))
print((PACES["cuda"].elements >> 20) - 1, PACES["cuda"].operations - 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="for NVIDIA GPUs")
def test_an_import_sets_the_variables_of_mlx(tmp_path):
    (tmp_path / "bounded.yaml").write_text("iters: 3\nmemory: 8GB\n")
    sizes = (environment.TF32, environment.ELEMENTS, environment.OPERATIONS)
    env = {name: value for name, value in os.environ.items() if name not in sizes}
    command = [sys.executable, "-c", PROBE, "-c", "bounded.yaml"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "200", "100", "200", "100"]


@pytest.mark.parametrize(("before", "after"), [(None, False), ("1", True), ("0", False)])
def test_fp32_stays_fp32_unless_the_user_chose(before, after, monkeypatch):
    monkeypatch.delenv(environment.TF32, raising=False)
    if before is not None:
        monkeypatch.setenv(environment.TF32, before)
    environment.keep_full_fp32()
    assert environment.tf32() is after


@pytest.mark.parametrize(
    ("arguments", "before", "after"),
    [
        ([], {}, [800, 400]),
        (["--memory", "8GB"], {}, [200, 100]),
        (["--memory=8GB"], {environment.ELEMENTS: "50"}, [50, 100]),
        (["-c", "bounded.yaml"], {}, [200, 100]),
        (["--config=bounded.yaml"], {}, [200, 100]),
        (["--config", "bounded.json"], {}, [200, 100]),
        (["--config", "other.yaml", "-c", "missing.yaml", "-c"], {}, [800, 400]),
        ([], {environment.ELEMENTS: "1000"}, [1000, 400]),
        ([], {environment.OPERATIONS: "20"}, [800, 20]),
    ],
)
def test_work_goes_to_the_gpu_in_pieces_of_one_size_unless_the_user_chose(
    arguments, before, after, tmp_path, monkeypatch
):
    (tmp_path / "bounded.yaml").write_text("iters: 3\nmemory: 8GB\n")
    (tmp_path / "bounded.json").write_text('{"iters": 3, "memory": "8GB"}')
    (tmp_path / "other.yaml").write_text("iters: 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "argv", ["deltatune", *arguments])
    for name in (environment.ELEMENTS, environment.OPERATIONS, environment.CHECKS_RECORDS):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    environment.limit_queue()
    assert [*environment.queued().values()] == after, "a plan counts with them"
    assert os.environ[environment.CHECKS_RECORDS] == "0"


@pytest.mark.parametrize(
    ("device", "memory", "before", "after"),
    [
        ("cuda", 24e9, None, "128"),
        ("cuda", 24e9, "300", "300"),
        ("cuda", 80e9, None, None),
        ("cpu", 0, None, None),
        ("metal", 12e9, None, None),
    ],
)
def test_mlx_keeps_few_recorded_pieces_on_a_small_gpu(device, memory, before, after, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(backend, "gpu_memory", lambda: memory)
    monkeypatch.setenv(environment.RECORDS, before or "")
    if before is None:
        monkeypatch.delenv(environment.RECORDS)
    with pytest.raises(UserError, match="no such"):
        load(tmp_path / "missing")
    assert os.environ.get(environment.RECORDS) == after


@pytest.mark.parametrize(("platform", "sizes"), [("darwin", [50, 7]), ("linux", [50, 50])])
def test_a_plan_for_metal_counts_with_the_variables_that_a_mac_reads(platform, sizes, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.delenv(environment.ELEMENTS, raising=False)
    monkeypatch.setenv(environment.OPERATIONS, "7")
    assert list(environment.queued_on_metal().values()) == sizes


@pytest.mark.parametrize(
    ("value", "on"), [(None, True), ("1", True), (" 2", True), ("0", False), ("", False), ("x", False)]
)
def test_tf32_is_read_as_mlx_reads_it(value, on, monkeypatch):
    monkeypatch.setattr(os, "environ", {} if value is None else {environment.TF32: value})
    assert environment.tf32() is on


@pytest.mark.parametrize(
    ("given", "gpus", "seen"),
    [
        ({"MLX_RANK": "1"}, 2, "1"),
        ({"MLX_RANK": "5"}, 4, "1"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 4, "3"),
        ({"MLX_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, 8, "6"),
        ({"MLX_RANK": "1", "CUDA_VISIBLE_DEVICES": "0"}, 8, "0"),
        ({"MLX_RANK": "1", "CUDA_VISIBLE_DEVICES": ""}, 8, ""),
        ({"MLX_RANK": "0"}, 1, None),
        ({}, 2, None),
    ],
)
def test_each_rank_sees_a_gpu_of_its_own(monkeypatch, given, gpus, seen):
    for name in (*environment.RANKS, environment.GPUS):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "_nvidia_gpus", lambda: gpus)
    environment.see_own_gpu()
    assert os.environ.get(environment.GPUS) == seen


@pytest.fixture
def homeless(monkeypatch):
    """As in a container with a user that has only a number."""

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME", environment.CACHE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.bad_input("no home folder, where kernels' verdicts would be kept")
def test_a_user_without_a_home_names_a_folder_for_the_cache(homeless, monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"HOME is not set, .*: set HOME, or DELTATUNE_CACHE to a folder"):
        environment.check(IMPLEMENTATIONS)
    monkeypatch.setenv(environment.CACHE, str(tmp_path))
    environment.check(IMPLEMENTATIONS)


def test_a_cache_in_a_folder_that_cannot_be_entered_keeps_nothing_from_running(monkeypatch, tmp_path):
    """There, asking whether a path exists may raise."""
    closed, plain = tmp_path / "closed", os.stat

    def stat(path, *arguments, **options):
        if str(path).startswith(str(closed)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return plain(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setenv(environment.CACHE, str(closed / "cache"))
    assert environment.cache_directory() == closed / "cache"


def test_a_pipe_with_options_is_not_read_to_choose_the_size(tmp_path):
    os.mkfifo(tmp_path / "options")
    command = [sys.executable, "-c", "import deltatune", "--config", "options"]
    # Nobody writes to it, so that reading it would wait for ever.
    subprocess.run(command, cwd=tmp_path, timeout=60, check=True)
