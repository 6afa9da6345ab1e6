"""The kernels of weighted norms: races, and the work for a frozen weight; test_passes.py compares them with float64."""

import mlx.core as mx
import pytest
from host_machine import HostMachine, plant

from against_float64 import drawn
from deltatune.machine import backend
from deltatune.ops.kernels.launch import header, on
from deltatune.ops.pointwise.weighted_norms import FILES, sum_norm, weighted_norm
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.graph import all_nodes, read
from pretended import pretended

EPS = 1e-3


@pytest.mark.skipif(backend.device() == "cuda", reason="a GPU does not watch its lanes")
def test_nothing_races_and_a_missing_barrier_is_seen(host_folder):
    text = header("metal", FILES)

    def differentiated(text):
        arrays, d = drawn((3, 1024), (3, 1024), (1024,)), mx.ones((3, 1024))
        with on(HostMachine(host_folder, text, watch=True).run):
            mx.eval(mx.vjp(lambda x, other, weight: sum_norm(x, other, weight, EPS), arrays, [d, d])[1])

    differentiated(text)
    with pytest.raises(AssertionError, match="no barrier between them"):
        differentiated(plant(text, "  barrier();\n  a = b", "  a = b"))


def test_a_frozen_weight_costs_no_gradient_work():
    """With the weight's gradient unused, a compiled step holds one launch each way and no sum over tokens."""
    x, weight = mx.zeros((64, 1024), mx.bfloat16), mx.zeros((1024,), mx.bfloat16)

    def names(argnums):
        launched = []

        def run(launch):
            launched.append(launch.name)
            return [mx.zeros(shape, dtype) for shape, dtype in launch.outputs.values()]

        with pretended("cuda"), on(run):
            function = mx.grad(lambda x, w: weighted_norm(x, w, EPS).sum(), argnums=argnums)
            gradients = function(x, weight)
        listed = [gradients] if isinstance(gradients, mx.array) else list(gradients)
        return launched, {node.kind for node in all_nodes(read(ArrayLayout.measured(), listed, set()))}

    launched, kinds = names(0)
    assert launched == ["weighted_norm_forward", "weighted_norm_backward"]
    assert "Reduce" not in kinds
    assert "Reduce" in names((0, 1))[1]
