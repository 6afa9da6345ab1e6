"""A short form of benchmarks/long_run.py: as many buffers are alive after 60 steps of varying length as after 20."""

import json
from pathlib import Path

import pytest

from counted_programs import LINUX, output_of

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
