"""Processes that have MLX compile kernels: what they leave moves whole to where MLX looks, once on a machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from deltatune.machine import mlx_builds
from deltatune.machine.mlx_builds import MlxBuild

PROGRAM = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["MLX_PTX_CACHE_DIR"])
for name in ("gather", "long/name/scatter"):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".ptx", ".txt", ".cu"):
        file.with_suffix(suffix).write_text(sys.argv[1])
with open(os.environ["RUNS"], "a") as runs:
    runs.write("run\\n")
if sys.argv[1] == "slow":
    time.sleep(600)
sys.exit(sys.argv[1] == "wrong")
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    (tmp_path / "computes_kernels.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "ptx"))
    return tmp_path / "ptx"


def runs(folder: Path) -> int:
    path = folder.parent / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_a_process_compiles_moves_to_mlxs_folder_and_is_not_compiled_again(folder, monkeypatch):
    moved: list[str] = []
    monkeypatch.setattr(mlx_builds, "replace", lambda one, other: moved.append(one.suffix) or one.replace(other))
    first = MlxBuild("computes_kernels", "text")
    assert not any(name.startswith("gather") for name in files(folder))
    first.finish()
    assert [name for name in files(folder) if not name.endswith(".built")] == sorted(
        f"{name}{suffix}" for name in ("gather", "long/name/scatter") for suffix in (".ptx", ".txt", ".cu")
    )
    assert (folder / "gather.ptx").read_text() == "text"
    # MLX takes a kernel for complete once its .ptx is there.
    assert moved[-2:] == [".ptx"] * 2
    assert not list(folder.glob(".deltatune-*"))
    MlxBuild("computes_kernels", "text").finish()
    assert runs(folder) == 1
    MlxBuild("computes_kernels", "another").finish()
    assert runs(folder) == 2


def test_a_process_that_fails_leaves_nothing_and_runs_again(folder):
    for count in (1, 2):
        MlxBuild("computes_kernels", "wrong").finish()
        assert files(folder) == []
        assert runs(folder) == count
    assert not list(folder.glob(".deltatune-*"))


def test_a_process_is_ended(folder):
    build = MlxBuild("computes_kernels", "slow")
    while not runs(folder):
        time.sleep(0.01)
    build.stop()
    assert build._process.returncode is not None
    assert build._process.returncode < 0
    assert files(folder) == []
    assert not list(folder.glob(".deltatune-*"))


def test_a_process_that_does_not_end_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(mlx_builds, "SECONDS", 0.1)
    build = MlxBuild("computes_kernels", "slow")
    build.finish()
    assert build._process.returncode is not None
    assert files(folder) == []


def test_a_folder_that_cannot_be_made_starts_nothing(folder):
    folder.write_text("in the way")
    MlxBuild("computes_kernels", "text").finish()
    assert not runs(folder)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MLX_PTX_CACHE_DIR": "/kept/here", "TMPDIR": "/scratch"}, "/kept/here"),
        ({"MLX_PTX_CACHE_DIR": "", "TMPDIR": "/scratch"}, "/scratch/mlx/{}/ptx"),
        ({"MLX_PTX_CACHE_DIR": "", "TMPDIR": "", "TEMP": "/other"}, "/other/mlx/{}/ptx"),
        ({"MLX_PTX_CACHE_DIR": "", "TMPDIR": ""}, "/tmp/mlx/{}/ptx"),
    ],
)
def test_where_mlx_keeps_kernels(monkeypatch, variables, expected):
    for name in ("MLX_PTX_CACHE_DIR", *mlx_builds._TEMPORARY):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(mlx_builds._folder()) == expected.format(mlx_builds.mx.__version__)
