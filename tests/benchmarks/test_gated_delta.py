"""The GPU benchmark on sizes for a CPU: a failure is recorded and the others go on; tables and plot are made."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "benchmarks"
NAMES = ["deltatune fused", "FLA Triton", "deltatune chunk", "arrays with autodiff"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "results.json"
    command = [sys.executable, HERE / "gated_delta.py", path, "--tiny", "--only", *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return json.loads(path.read_text()), done.stdout, path


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


def test_table_and_plot(results):
    _, printed, path = results
    table = subprocess.run([sys.executable, HERE / "tables.py", path], capture_output=True, text=True, check=True)
    assert table.stdout.strip() in printed
    assert "| deltatune chunk | " in table.stdout
    assert "Not timed: deltatune fused: UserError" in table.stdout
    picture = path.with_suffix(".svg")
    subprocess.run([sys.executable, HERE / "plot.py", path, picture], capture_output=True, check=True)
    text = picture.read_text()
    assert "deltatune chunk" in text
    assert len(text) < 200_000


def test_the_wrong_get_no_time():
    sys.path.insert(0, str(HERE))
    import tables

    size = {"name": "B1"}
    wrong = {"implementation": "fast", "size": size, "failed": "wrong: dk is 3.0e-01 off the recurrence: not timed"}
    assert tables.line(wrong) == "fast, B1: wrong: dk is 3.0e-01 off the recurrence: not timed"
    machine = {"gpu": "a GPU", "cpu": "a CPU"}
    result = {"date": "today", "machine": machine, "versions": "mlx 1", "table": [size], "records": [wrong]}
    assert "Not timed: fast: wrong" in tables.gated_delta_tables(result)
