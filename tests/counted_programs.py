"""Runs programs that count MLX's buffers, each in a process of its own."""

import json
import subprocess
import sys
from typing import Any

import pytest

from deltatune.machine import environment

# What MLX counts in a pass by layers is at most so many times what is planned for it: how far the queue runs ahead
# differs from CPU to CPU by an operation's results.
PLANNED_WITHIN = 1.07
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the counter goes into the CPU allocator of Linux wheels")


def output_of(*command: object) -> Any:
    """Run a Python program with the paths of this process; return the JSON in its last line."""
    env = environment.of_child()
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
