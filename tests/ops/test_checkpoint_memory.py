"""The peak memory of checkpointed layers does not grow with their number, as it does under mx.checkpoint."""

import os
import subprocess
import sys

import pytest

from deltatune.machine import backend

DEPTH_PROBE = """
from contextlib import contextmanager
import sys
import deltatune
import mlx.core as mx
import mlx.nn as nn
from deltatune.ops.checkpoint import checkpointed

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def __call__(self, x):
        h = self.up(x)
        for _ in range(4):
            h = nn.silu(h) + mx.tanh(h)
        return x + self.down(h)

def peak(depth, wrap):
    layers = [Layer() for _ in range(depth)]
    model, x = nn.Sequential(*layers), mx.random.normal((256, 64))
    mx.eval(model.parameters(), x)
    step = nn.value_and_grad(model, lambda: (model(x) ** 2).mean())
    with wrap(layers):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        found = step()
        mx.eval(found)
    gradients = depth * sum(array.nbytes for array in (layers[0].up.weight, layers[0].down.weight))
    return (mx.get_peak_memory() - before - gradients - depth * x.nbytes) / (256 * 512 * 4)

@contextmanager
def upstream(layers):
    call = Layer.__call__

    def recomputed(self, x):
        def inner(parameters, x):
            self.update(parameters)
            return call(self, x)

        return mx.checkpoint(inner)(self.trainable_parameters(), x)

    Layer.__call__ = recomputed
    yield
    Layer.__call__ = call

# MLX waits for each operation before it makes room for the next: how far it runs ahead is a matter of time.
mx.set_memory_limit(1)
for wrap in (checkpointed, upstream)[: int(sys.argv[1])]:
    print(*(peak(depth, wrap) for depth in (2, 12)))
"""


@pytest.mark.any_blas
@pytest.mark.skipif(backend.device() != "cpu", reason="counts what a CPU queues")
@pytest.mark.parametrize("width", [1, pytest.param(20, marks=pytest.mark.weekly), 1000])
def test_peak_memory_does_not_grow_with_depth(width):
    """In units of one intermediate, of which a layer has 13; docs/figures.md has the figures for real layers."""
    done = subprocess.run(
        [sys.executable, "-c", DEPTH_PROBE, "2" if width == 1000 else "1"],
        env=os.environ | {"MLX_BFS_MAX_WIDTH": str(width)},
        check=True,
        capture_output=True,
        text=True,
    )
    (shallow, deep), *beside = ([float(word) for word in line.split()] for line in done.stdout.splitlines())
    # One intermediate may be given back late, when the next operation has begun.
    assert deep <= shallow + 1
    if width == 1000:
        # The test can fail: recomputation that waits for the layers' outputs alone exceeds the bound.
        assert beside[0][1] > shallow + 20
