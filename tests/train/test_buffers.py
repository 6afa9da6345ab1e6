"""Graphs and buffers of whole steps, in programs of their own: few live buffers, and launches alone in an update."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from counted_programs import LINUX, output_of
from deltatune.plan.primitives import VIEWS

DEPTHS = (4, 6)


# kimi_k3 passes an object from layer to layer, which the checkpoints must take apart.
@LINUX
@pytest.mark.parametrize("family", ["qwen3_5_moe", pytest.param("kimi_k3", marks=pytest.mark.weekly)])
def test_depth_adds_no_constants_and_with_checkpoints_nothing_else(family):
    """A compiled step holds the closures of its gradients; one array in a closure would keep a whole graph alive."""
    cases = output_of(Path(__file__).parent / "counted_step.py", family, *DEPTHS)
    assert max(case["kept"] for case in cases) < 50, cases
    _, shallow, deep = (case["beyond"] for case in cases)
    assert shallow < 250, cases
    assert deep < shallow + 6 * (DEPTHS[1] - DEPTHS[0]), cases


# What stands for a launch in a graph of pretended.py, and views.
STANDS_FOR_A_LAUNCH = {"Full", "Broadcast", *VIEWS}


@pytest.fixture(scope="module")
def phases():
    command = [sys.executable, str(Path(__file__).with_name("full_step.py"))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_an_update_has_no_operation_on_whole_parameters_but_its_launches(phases):
    assert not {kind for kind, size in phases[1] if size > 1000} - STANDS_FOR_A_LAUNCH


def test_gradients_reach_the_update_as_rows(phases):
    """A launch would copy a transposed array before it reads it, and two launches read each gradient."""
    assert len(phases[2]) > 10
    assert {kind for kind, _ in phases[2]} == {"Contiguous"}
