"""The same run in other surroundings: locale, terminal, umask, home and an empty environment change no figure of it."""

import json
import locale
import os
import subprocess
import sys
from pathlib import Path

import pytest

from console import SCRIPT, called, deltatune
from deltatune.machine.environment import cache_directory

ROW = {"prompt": "the quick brown fox “ü” → 狐", "completion": "jumps İ over"}
FLAGS = ["--iters", "1", "--batch-size", "2", "--max-seq-length", "96", "--num-layers", "2", "--steps-per-report", "1"]
# The cache of this session, with what the functions of upstream were found to do: to ask them takes seconds.
PATH = {"PATH": os.environ["PATH"], "DELTATUNE_THREADS": "1", "DELTATUNE_CACHE": str(cache_directory())}
# The environment, and the umask. Where a locale is not installed, C's takes its place.
SURROUNDINGS = {
    "an empty environment": ({}, 0o077),
    "Turkish, on a narrow dumb terminal": (
        {"LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "tr", "HOME": "/", "TERM": "dumb", "COLUMNS": "20"},
        0o000,
    ),
    "Latin-1": ({"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 0o022),
}


def words(checkpoint, data, target) -> list:
    flags = [*FLAGS, "--sample-prompts", *["the fox"] * 4]
    return ["train", "--model", checkpoint, "--data", data, "--adapter-path", target, *flags]


def train(checkpoint, data, target, environment, umask=-1) -> subprocess.CompletedProcess[bytes]:
    command = [SCRIPT, *words(checkpoint, data, target)]
    return subprocess.run(command, capture_output=True, env=PATH | environment, umask=umask, timeout=600)


def figures(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = ("iteration", "train_loss", "val_loss", "grad_norm", "samples")
    return [{name: record[name] for name in kept if name in record} for record in records]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dätä İ")
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text((json.dumps(ROW, ensure_ascii=False) + "\n") * 2, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def usual(checkpoint, data, tmp_path_factory):
    target = tmp_path_factory.mktemp("usual") / "adapters"
    done = called(*words(checkpoint, data, target))
    assert (done.returncode, done.stdout.count("Answering 4 sample prompts.")) == (0, 2), done.stderr
    return target


def is_installed(name: str) -> bool:
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except locale.Error:
        return False
    locale.setlocale(locale.LC_CTYPE, before)
    return True


def rights(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_run_is_the_same_anywhere(checkpoint, data, usual, tmp_path, surroundings):
    target, (environment, umask) = tmp_path / "adapters İ", SURROUNDINGS[surroundings]
    if environment.get("PYTHONUTF8") == "0" and not is_installed(environment["LC_ALL"]):
        pytest.skip("without this locale Python may not decode the folders' names, which a test below sees refused")
    done = train(checkpoint, data, target, environment, umask)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stdout + done.stderr
    assert figures(target) == figures(usual)
    assert (target / "adapters.safetensors").read_bytes() == (usual / "adapters.safetensors").read_bytes()
    assert "the fox" in (target / "report.html").read_text(encoding="utf-8")
    assert rights(target) == {0o666 & ~umask}


@pytest.mark.parametrize("umask", [0o000, 0o077], ids=oct)
def test_merged_files_have_the_rights_that_the_umask_leaves(checkpoint, usual, tmp_path, umask):
    merge = ["merge", "--model", checkpoint, "--adapter-path", usual, "--save-path", tmp_path / "merged"]
    before = os.umask(umask)
    try:
        done = called(*merge)
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert rights(tmp_path / "merged") == {0o666 & ~umask}


def test_a_home_that_cannot_be_written_is_told(checkpoint, data, usual, tmp_path):
    """OpenBLAS is prepared in the cache, so the sums of MLX's own BLAS differ in their last bits."""
    done = train(checkpoint, data, tmp_path / "a", {"HOME": "/dev/null/home", "DELTATUNE_CACHE": ""})
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stdout + done.stderr
    if sys.platform == "linux":
        assert done.stderr.count(b"Set DELTATUNE_CACHE to a folder that can be written.") == 1
    ours, theirs = ([row["val_loss"] for row in figures(run) if "val_loss" in row] for run in (tmp_path / "a", usual))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_text_that_python_may_not_decode_is_one_message(checkpoint, tmp_path):
    """Python reads arguments as UTF-8 even in the C locale, unless these two variables forbid it."""
    named = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = deltatune("train", "--model", checkpoint, "--data", tmp_path / "fehlt→", **named)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--data: expected text in UTF-8" in done.stderr
