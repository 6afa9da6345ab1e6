"""Live buffers of a training step: Apple's GPUs have 499,000 of them, whatever the memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the counter goes into the CPU allocator of Linux wheels")
DEPTHS = (4, 8)


# The second hands an object from layer to layer, which the checkpoints take apart.
@LINUX
@pytest.mark.parametrize("family", ["qwen3_5_moe", "kimi_k3"])
def test_depth_adds_no_constants_and_with_checkpoints_nothing_else(family):
    """A compiled step keeps the closures of its gradients: an array of the trace in one keeps a whole graph alive."""
    if family == "kimi_k3":
        pytest.importorskip("mlx_lm", "0.32")
    command = [sys.executable, str(Path(__file__).parent / "counted_step.py"), family, *map(str, DEPTHS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(each["kept"] for each in found) < 50, found
    _, shallow, deep = (each["beyond"] for each in found)
    assert shallow < 250, found
    assert deep < shallow + 6 * (DEPTHS[1] - DEPTHS[0]), found
