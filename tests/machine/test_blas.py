"""blas.py in fresh processes: what MLX binds to can be decided only once in each."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from deltatune.machine import blas

pytestmark = pytest.mark.skipif(platform.system() != "Linux" or not blas._mlx_has_cpu_wheel(), reason="CPU wheel only")

PROBE = """
import json, time, warnings
{before}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import deltatune
    from deltatune.machine import blas
    blas.load()
import mlx.core as mx
a = mx.random.normal((768, 768)); mx.eval(a @ a)
start = time.perf_counter(); mx.eval(a @ a); seconds = time.perf_counter() - start
print(json.dumps(dict(name=blas.status().name, threads=blas.status().threads, path=str(blas.status().path),
                      seconds=seconds, warnings=[str(w.message) for w in caught])))
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


def test_mlx_binds_to_openblas_and_is_faster(cache):
    ours = probe(cache, DELTATUNE_THREADS="1")
    theirs = probe(cache, DELTATUNE_BLAS="system")
    assert (ours["name"], ours["threads"], ours["warnings"]) == ("openblas", 1, [])
    assert (theirs["name"], theirs["warnings"]) == ("system", [])
    assert ours["seconds"] * 3 < theirs["seconds"]


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
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert probe(cache)["name"] == "openblas"
    assert path.read_bytes() == whole


def test_an_unwritable_cache_is_said_and_survived(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    result = probe(occupied)
    assert result["name"] == "system"
    assert "could not be prepared" in result["warnings"][0]


def test_unknown_choice_is_refused(cache):
    with pytest.raises(subprocess.CalledProcessError) as error:
        probe(cache, DELTATUNE_BLAS="mkl")
    assert "expected one of openblas, system" in error.value.stderr
