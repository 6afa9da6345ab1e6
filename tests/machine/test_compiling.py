"""Tests that mx.compile builds no kernels inside without_kernels(), and works as before after it."""

import os
import subprocess
import sys

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.machine.compiling import compiles, without_kernels

# MLX would fuse this chain into a kernel and build it in the temporary folder.
PROGRAM = """
import deltatune
import mlx.core as mx
from deltatune.machine.compiling import without_kernels

def chain(x):
    return mx.exp(x * 2 + 1) - mx.abs(x)

x = mx.arange(5.0)
with without_kernels() as how:
    with without_kernels():
        pass
    inside = mx.compile(chain)(x)
    mx.eval(inside)
print(how)
"""


@pytest.mark.skipif(backend.device() != "cpu", reason="kernels are built with g++ on a CPU only")
def test_no_kernel_is_built_within_it(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "DELTATUNE_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "compiled (operations are not fused)\n"
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(("device", "how"), [("cuda", " (operations are not fused)"), ("metal", "")])
def test_on_which_gpus_kernels_are_built(device, how, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: device)
    with without_kernels() as found:
        assert found == "compiled" + how


def test_one_trace_a_shape_within_it_and_compilation_as_before_afterwards():
    calls = []

    def function(x):
        calls.append(x.shape)
        return mx.exp(x) * 2

    with without_kernels():
        assert compiles()
        compiled = mx.compile(function)
        for size in (3, 4, 3, 4):
            assert mx.array_equal(compiled(mx.ones(size)), mx.exp(mx.ones(size)) * 2)
    assert calls == [(3,), (4,)]
    assert compiles()


def test_compilation_switched_off_stays_off():
    mx.disable_compile()
    try:
        with without_kernels() as how:
            assert how == "not compiled (mx.compile is off)"
            assert not compiles()
        assert not compiles()
    finally:
        mx.enable_compile()
