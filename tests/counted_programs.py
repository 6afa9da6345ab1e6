"""Runs programs that count MLX's buffers, each in a process of its own."""

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
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


def peak_of_step(step: Any, batch: Any, before: int) -> int:
    """MLX's own count of a step's peak above `before`: the lowest of two after the first, as memory is freed late."""
    peaks = []
    for _ in range(3):
        mx.reset_peak_memory()
        mx.eval(step.micro_batch(batch, step.zeros()))
        peaks.append(mx.get_peak_memory() - before)
    return min(peaks[1:])


def within_the_least_memory(main: Callable[[list[str]], int], flags: list[str], capsys: Any) -> Any:
    """Run a command within the least memory that its refusal of 1 MB names, and return its output.

    MLX may hold little more than that, counted from the arrays that there were before.
    """
    assert main([*flags, "--memory", "1MB"]) == 2
    said = capsys.readouterr().err
    least = re.search(r"^deltatune: memory: 1\.0 MB is too little\. .* take ([\d.]+) MB; give that or more", said, re.M)
    memory = round(float(least[1]) * 1e6)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert main([*flags, "--memory", str(memory)]) == 0
    assert mx.get_peak_memory() - before < PLANNED_WITHIN * memory
    return capsys.readouterr()
