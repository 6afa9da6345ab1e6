"""Tests the number of live buffers of a training step, which Apple's GPUs limit to 499,000, whatever the memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the counter goes into the CPU allocator of Linux wheels")
DEPTHS = (4, 8)


# kimi_k3 passes an object from layer to layer, which the checkpoints must take apart.
@LINUX
@pytest.mark.parametrize("family", ["qwen3_5_moe", "kimi_k3"])
def test_depth_adds_no_constants_and_with_checkpoints_nothing_else(family):
    """A compiled step holds the closures of its gradients; one array in a closure would keep a whole graph alive."""
    if family == "kimi_k3":
        pytest.importorskip("mlx_lm", "0.32")
    command = [sys.executable, str(Path(__file__).parent / "counted_step.py"), family, *map(str, DEPTHS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert max(case["kept"] for case in cases) < 50, cases
    _, shallow, deep = (case["beyond"] for case in cases)
    assert shallow < 250, cases
    assert deep < shallow + 6 * (DEPTHS[1] - DEPTHS[0]), cases
