"""Every step of the ladder computes the recurrence at a tiny size, and one that does not gets no time."""

import sys
from dataclasses import replace

import mlx.core as mx
import pytest

from deltatune.machine import backend


@pytest.fixture
def ladder():
    import ladder

    return ladder


@pytest.mark.skipif(backend.device() != "cpu", reason="the test is of the host machine")
def test_every_step_computes_the_recurrence_and_is_timed(ladder):
    rows = {name.partition(",")[0]: row for name, *row in ladder.climb(ladder.TINY[0], rounds=1)}
    assert list(rows) == ["naive", "chunk", "scan", "three phases", "Hopper"]
    assert rows.pop("Hopper")[1:3] == [None, None]
    for _, error, milliseconds, remark in rows.values():
        assert error < 1e-6
        assert milliseconds > 0
        assert remark


@pytest.mark.skipif(backend.device() != "cpu", reason="the test is of the host machine")
def test_a_wrong_step_gets_no_time(ladder, monkeypatch):
    monkeypatch.setattr(ladder, "TEXT", ladder.TEXT.replace("answer += state", "answer -= state"))
    *_, scan, _, _ = ladder.climb(ladder.TINY[0], rounds=1)
    assert scan[3:] == (None, "differs from naive: no time")


def test_chunks_of_odd_lengths_and_shared_key_heads(ladder):
    from sizes import FLOATS, inputs

    given = inputs(replace(ladder.TINY[0], batch=2, tokens=ladder.CHUNK + 1)).arrays
    arrays = [mx.array(given[name]) for name in FLOATS]
    assert mx.allclose(ladder.chunk(*arrays), ladder.naive(*arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is installed on Linux alone")
def test_the_scan_compiles_for_cuda(ladder):
    from deltatune.ops.kernels import nvrtc
    from deltatune.ops.kernels.cubin import CubinKernel
    from deltatune.ops.kernels.launch import header

    def compiled(launch):
        assert launch.kernel.memory in ladder.TEXT
        kernel = CubinKernel(
            launch.name,
            tuple(launch.inputs),
            tuple(launch.outputs),
            launch.source,
            header("cuda", ()) + ladder.TEXT,
            launch.bytes,
        )
        axes = [x.ndim if f"{name}_shape" in launch.source else 0 for name, x in launch.inputs.items()]
        dtypes = [x.dtype for x in launch.inputs.values()]
        text = kernel.text(tuple(launch.values.items()), dtypes, axes, [dtype for _, dtype in launch.outputs.values()])
        assert nvrtc.compiled(text, launch.name, "sm_90a")
        return [mx.zeros(shape, dtype) for shape, dtype in launch.outputs.values()]

    heads, gates = mx.zeros((1, 2, 2, 128), mx.bfloat16), mx.zeros((1, 2, 2))
    ladder.scan(heads, heads, heads, gates, gates, execute=compiled)


def test_the_kernel_has_fifty_lines(ladder):
    lines = ladder.TEXT.splitlines()
    code = [line for line in lines if line.strip() and not line.startswith("//")]
    assert len(code) <= 50
