"""Tests the number of live buffers of a training step, which Apple's GPUs limit to 499,000, whatever the memory."""

from pathlib import Path

import pytest

from counted_programs import LINUX, output_of

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
