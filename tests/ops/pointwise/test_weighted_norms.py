"""The kernels of weighted norms against float64, on the host machine or a GPU; their refusals; when they serve."""

from functools import partial

import mlx.core as mx
import pytest
from host_machine import HostMachine, plant

from against_float64 import errors
from deltatune.machine import backend
from deltatune.ops.kernels.launch import Launch, header, on
from deltatune.ops.pointwise.weighted_norms import FILES, WIDEST, branch_norm, sum_norm, weighted_norm
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.graph import all_nodes, read
from pretended import pretended
from two_dtypes import in_two_dtypes

EPS = 1e-3
# Half a last place of the dtype, twice: the sum is rounded, and the result is. fp32: sums of up to 2,560 terms.
BOUND = {mx.float32: 2.0**-20, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
# A piece for some lanes of a group; a group to a row; several pieces a lane; and four groups to a row with a rest.
WIDTHS = [8, 64, 256, 320, 512, 520, 1024, 2560]


def exact_norm(x, weight):
    return x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight


FUNCTIONS = {
    "alone": (lambda x, w: [weighted_norm(x, w, EPS)], lambda x, w: [exact_norm(x, w)], 1),
    "branch": (lambda x, w: branch_norm(x, w, EPS), lambda x, w: [x, exact_norm(x, w)], 1),
    "sum": (
        lambda x, other, w: sum_norm(x, other, w, EPS),
        lambda x, other, w: [x + other, exact_norm(x + other, w)],
        2,
    ),
}


def draw(count, shape, dtype, spread=1.0, weight_dtype=None):
    keys = mx.random.split(mx.random.key(shape[-1]), count + 1)
    arrays = [(spread * mx.random.normal(shape, key=key)).astype(dtype) for key in keys[:-1]]
    return [*arrays, mx.random.normal(shape[-1:], key=keys[-1]).astype(weight_dtype or dtype)]


def check(name, shape, dtype, execute, spread=1.0, weight_dtype=None):
    """Compare values and gradients with float64, at the dtype's rounding of the largest element."""
    function, exact, count = FUNCTIONS[name]
    with on(execute):
        found = errors(function, exact, draw(count, shape, dtype, spread, weight_dtype))
    assert max(found) < BOUND[dtype], found


@pytest.mark.parametrize(("width", "dtype"), in_two_dtypes(WIDTHS))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_against_float64(name, dtype, width, execute):
    check(name, (3, 3, width), dtype, execute)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_shapes_spreads_and_dtypes_of_the_weight(name, execute):
    for shape in ((1, 1024), (4, 64), (2, 1, 3, 64)):
        check(name, shape, mx.float32, execute, spread=30.0)
    check(name, (2, 5, 256), mx.bfloat16, execute, weight_dtype=mx.float32)


def test_a_sum_equals_mlxs(execute):
    x, other, weight = draw(2, (5, 520), mx.bfloat16)
    total, y = sum_norm(x, other, weight, EPS)
    assert mx.array_equal(total, x + other)
    assert mx.array_equal(y, weighted_norm(x + other, weight, EPS))
    kept, y = branch_norm(x, weight, EPS)
    assert mx.array_equal(kept, x)
    assert mx.array_equal(y, weighted_norm(x, weight, EPS))


def test_other_strides_and_the_order_of_lanes_change_no_bit(execute):
    x, other, weight = draw(2, (6, 1032), mx.float32)
    turned = mx.contiguous(x.T).T
    runs = [execute, *([] if execute is Launch.run else [partial(execute, seed=seed) for seed in (2, 3)])]
    found = []
    for given in (x, turned):
        for run in runs:
            with on(run):
                outputs, gradients = mx.vjp(lambda x: sum_norm(x, other, weight, EPS), [given], [other, x])
            found.append([*outputs, *gradients])
    for results in found[1:]:
        assert all(mx.array_equal(one, first) for one, first in zip(results, found[0], strict=True))


@pytest.mark.skipif(backend.device() == "cuda", reason="a GPU does not watch its lanes")
def test_nothing_races_and_a_missing_barrier_is_seen(host_folder):
    text = header("metal", FILES)
    check("sum", (3, 1024), mx.float32, HostMachine(host_folder, text, watch=True).run)
    machine = HostMachine(host_folder, plant(text, "  barrier();\n  a = b", "  a = b"), watch=True)
    with pytest.raises(AssertionError, match="no barrier between them"):
        check("sum", (3, 1024), mx.float32, machine.run)


def test_second_derivatives_and_unfit_arrays_are_refused(execute):
    x, weight = draw(1, (2, 64), mx.float32)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        mx.grad(lambda x: mx.grad(lambda x: weighted_norm(x, weight, EPS).sum())(x).sum())(x)
    for arrays in ((x, weight[:8]), (x[:, :12], weight[:12]), (mx.zeros((1, WIDEST + 8)), mx.zeros(WIDEST + 8))):
        with pytest.raises(ValueError, match="weighted norms: "):
            weighted_norm(*arrays, EPS)
    with pytest.raises(ValueError, match="one shape and dtype"):
        sum_norm(x, x.astype(mx.bfloat16), weight, EPS)


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
