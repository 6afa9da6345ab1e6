"""The GPU benchmarks on sizes for a CPU: tables, failures, every step of the ladder, and live buffers of a long run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from counted_programs import LINUX, output_of
from deltatune.machine import backend

HERE = Path(__file__).parents[2] / "benchmarks"
NAMES = ["deltatune fused", "FlashQLA", "deltatune chunk", "arrays with autodiff"]


def run(*arguments, **variables):
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=os.environ | variables)
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "results.json"
    printed = run(
        HERE / "gated_delta.py", path, "--tiny", "--sizes", "1x64x2/4/channel", "--lengths", "64", "--only", *NAMES
    )
    return json.loads(path.read_text()), printed, path


@pytest.mark.weekly
def test_records(results):
    result, printed, _ = results
    found = {(record["implementation"], record["size"]["name"]): record for record in result["records"]}
    sizes = [size["name"] for size in [*result["table"], *result["sweep"]]]
    assert {name for _, name in found} == set(sizes)
    for (name, size), record in found.items():
        if name in ("deltatune chunk", "arrays with autodiff"):
            assert record["agrees"], record
            assert record["how"].endswith("calls enqueued, compiled")
            assert min(record[key] for key in ("as_called", "in_a_row", "forward")) > 0, record
        else:
            assert "failed" in record, (name, size)
    assert "UserError: DELTATUNE_GATED_DELTA=fused asks for GPU kernels" in printed
    # A peer that is not installed is named once.
    assert "flash_qla" in result["missing"]["FlashQLA"]
    assert "FlashQLA" not in {name for name, _ in found}
    assert printed.count("FlashQLA: not installed") == 1


@pytest.mark.weekly
def test_table_and_plot(results):
    _, printed, path = results
    table = run(HERE / "tables.py", path)
    assert table.strip() in printed
    assert "| deltatune chunk | " in table
    assert "Not timed: deltatune fused: UserError" in table
    picture = path.with_suffix(".svg")
    run(HERE / "plot.py", path, picture)
    text = picture.read_text()
    assert all(label in text for label in ("deltatune chunk", "ms per 1,000 tokens", "tokens in the sequence, T"))
    assert len(text) < 200_000


def test_the_wrong_get_no_time():
    import tables

    size = {"name": "B1"}
    wrong = {"implementation": "fast", "size": size, "failed": "wrong: dk is 3.0e-01 off the recurrence: not timed"}
    assert tables.line(wrong) == "fast, B1: wrong: dk is 3.0e-01 off the recurrence: not timed"
    machine = {"gpu": "a GPU", "cpu": "a CPU"}
    result = {"date": "today", "machine": machine, "versions": "mlx 1", "table": [size], "records": [wrong]}
    assert "Not timed: fast: wrong" in tables.gated_delta_tables(result)


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


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "long_run.py"
SMALL = {"rank": 4, "steps": 60, "depth": 2, "layers": [0, 1], "hidden": 32, "inner": 16, "examples": 100}


@pytest.fixture(scope="module")
def steps():
    return output_of(BENCHMARK, "--worker", json.dumps(SMALL))["steps"]


@LINUX
def test_nothing_grows_from_step_to_step(steps):
    """The comparison starts when every length has occurred, since the trace of each new length holds its constants."""
    widths = [step["width"] for step in steps]
    start = max(widths.index(width) for width in set(widths)) + 2
    assert set(widths) == {32, 64, 96, 128}
    assert start <= 20
    later = steps[start:]
    assert {step["buffers"] for step in later} == {later[0]["buffers"]}
    # A result may take over a buffer some KB too large.
    assert max(abs(step["bytes"] - later[0]["bytes"]) for step in later) < 32 * 1024
    for width in set(widths):
        peaks = [step["peak_buffers"] for step in later if step["width"] == width]
        assert max(peaks[len(peaks) // 2 :]) <= 1.1 * max(peaks[: len(peaks) // 2])
