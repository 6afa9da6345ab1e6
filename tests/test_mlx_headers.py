"""Tests that the kernels of mx.compile are built with headers that g++ has read before."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_headers import FLAGS, HEADER, INCLUDE, kept_in, read_once

FOUND = shutil.which("g++") or ""


@pytest.fixture
def program(tmp_path, monkeypatch):
    folders = os.environ["PATH"].split(os.pathsep)
    monkeypatch.setenv("PATH", os.pathsep.join(name for name in folders if "mlx-headers" not in name))
    if not read_once(tmp_path / "a folder"):
        pytest.skip("MLX builds no kernels with g++ here")
    return tmp_path / "a folder" / "g++"


def test_a_kernel_is_built_with_headers_that_were_read_before(program, tmp_path):
    source = tmp_path / "kernel.cpp"
    source.write_text(f'#include "{HEADER}"\nextern "C" float half(float x) {{ return x / 2; }}\n')
    command = [program, *FLAGS, "-shared", "-I", INCLUDE, "-H", source, "-o", tmp_path / "kernel.so"]
    built = subprocess.run(command, capture_output=True, text=True, check=True)
    # g++ marks what it has kept and takes by an exclamation mark; it would list each header that it reads by dots.
    assert built.stderr.startswith(f"! {program.parent / HEADER}.gch")
    assert [file.name for file in program.parent.rglob("*.gch*")] == [f"{HEADER.rpartition('/')[2]}.gch"]


def test_the_flags_are_those_of_mlx():
    library = INCLUDE.parent / "lib" / "libmlx.so"
    if not library.is_file():
        pytest.skip("MLX is no shared library here")
    (flags,) = set(re.findall(rb"g\+\+ ([^{}\0]*)-shared \{\}", library.read_bytes()))
    assert flags.decode().split() == list(FLAGS), mx.__version__


@pytest.mark.skipif(not os.access(sys.prefix, os.W_OK), reason="the environment cannot be written to")
def test_tests_run_with_it(program):
    """This process has it from conftest.py, and programs that it starts have it from this process."""
    assert Path(FOUND) == kept_in(Path(sys.prefix)) / "g++"
