"""The kernel of a step of Adam on moments of 8 bits, on the host machine or a GPU, against MLX's operations."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from deltatune.ops.operator import first_use
from deltatune.ops.pointwise import stored_moments
from deltatune.ops.pointwise.adam import AdamStep
from deltatune.ops.pointwise.stored_moments import EightBitStep, dequantized, quantized
from deltatune.train.updates import optimizer as updates
from deltatune.train.updates.optimizer import OPTIMIZERS

DTYPES = (mx.float32, mx.bfloat16, mx.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
def test_the_trial_accepts_the_kernel(dtype, gradient_dtype, execute):
    assert first_use.agrees(stored_moments.trial_case(dtype, gradient_dtype), execute)


@pytest.mark.parametrize("changed", [1, 3])
def test_the_trial_refuses_codes_two_intervals_off(changed, execute, caplog):
    """Neighbouring codes may come of rounding; no other ones."""

    def off(launch):
        results = execute(launch)
        codes = np.array(results[changed])
        codes[2, 7] += 2 if codes[2, 7] < 100 else -2
        results[changed] = mx.array(codes)
        return results

    assert not first_use.agrees(stored_moments.trial_case(mx.float32, mx.float32), off)


@pytest.mark.parametrize("size", [1, 8, 255, 256, 257, 1031])
def test_codes_and_scales_are_those_of_mlxs_operations(size, execute):
    """Numbers of all decades, in blocks whole and broken, one of them all zeros; rate 0 keeps the parameter."""
    draw = np.random.default_rng(size)
    gradient = mx.array((draw.standard_normal(size) * 10.0 ** draw.uniform(-9, 2, size)).astype(np.float32))
    gradient = mx.where(mx.arange(size) // 256 == 1, 0, gradient)
    optimizer = OPTIMIZERS["adamw8bit"](0.0, betas=[0.0, 0.0])
    optimizer.state["step"] = mx.array(1)
    step = EightBitStep(AdamStep.begun(optimizer, None, mx.array(True)))
    parameter, blocks = mx.arange(size).astype(mx.float32), -(-size // 256)
    state = [mx.zeros(size, mx.uint8), mx.zeros(blocks)] * 2
    kept, m, m_scale, v, v_scale = step(parameter, gradient, *state)
    assert mx.array_equal(kept, parameter)
    for (codes, scales), exact, signed in (((m, m_scale), gradient, True), ((v, v_scale), gradient.square(), False)):
        right, right_scales = quantized(exact, signed)
        assert mx.array_equal(scales, right_scales)
        difference = np.abs(np.array(codes, np.int32) - np.array(right, np.int32))
        # The edge of an interval is computed in another order, so that one number in a hundred may be its neighbour.
        assert difference.max() <= 1
        assert (difference > 0).mean() <= 0.01
        assert (np.array(dequantized(codes, scales, signed))[np.array(exact) == 0] == 0).all()


def random_tree(seed):
    key = iter(mx.random.split(mx.random.key(seed), 2))
    return {"large": mx.random.normal((70, 90), key=next(key)), "small": mx.random.normal((40,), key=next(key))}


def trained(kind, steps=4):
    """The parameters and the state after some steps, of which the second has NaN in its gradients."""
    optimizer, parameters = kind(0.05), random_tree(0)
    optimizer.init(parameters)
    for step in range(steps):
        gradients = random_tree(step + 1)
        if step == 1:
            gradients["small"] = gradients["small"] * mx.nan
        parameters, _ = updates.apply(optimizer, parameters, gradients, mx.array(True), 0.5)
        mx.eval(parameters, optimizer.state)
    return dict(tree_flatten([parameters, optimizer.state]))


@pytest.mark.parametrize("name", ["adam8bit", "adamw8bit"])
def test_a_run_with_the_kernel_learns_as_with_mlxs_operations(name, request):
    kind = partial(OPTIMIZERS[name], bias_correction=True)
    expected = trained(kind)
    launches = request.getfixturevalue("launches")
    found = trained(kind)
    assert launches == ["adam_step_8bit", "adam_step"] * 4
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].dtype == array.dtype
        # A code that is its neighbour moves what later steps make of it by up to an interval.
        far = np.abs(np.array(found[path], np.float64) - np.array(array, np.float64)) > 1e-5 * np.abs(array).max()
        assert far.mean() < 0.02, path
