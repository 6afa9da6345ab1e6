"""The graph of a full fine-tuning's step on an NVIDIA GPU: its update is the launches and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltatune.plan.primitives import VIEWS

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
