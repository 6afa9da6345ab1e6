"""The kernels of Adam and AdamW, also on moments of 8 bits, against MLX's optimizers; and when they are used."""

from functools import partial

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from deltatune.machine import backend
from deltatune.ops.operator import kernel_operator
from deltatune.ops.operator.case import judged
from deltatune.ops.operator.measure import ROUNDING
from deltatune.ops.pointwise import adam, stored_moments
from deltatune.ops.pointwise.adam import AdamStep
from deltatune.ops.pointwise.stored_moments import EightBitStep, dequantized, quantized
from deltatune.train.updates import optimizer as updates
from deltatune.train.updates.optimizer import OPTIMIZERS

KINDS = {
    "Adam": partial(mlx.optimizers.Adam, betas=[0.8, 0.95]),
    "Adam, corrected": partial(mlx.optimizers.Adam, bias_correction=True),
    "AdamW": partial(mlx.optimizers.AdamW, weight_decay=0.3, eps=1e-3),
    "AdamW, corrected": partial(mlx.optimizers.AdamW, bias_correction=True),
    "AdamW on a schedule": lambda _: mlx.optimizers.AdamW(mlx.optimizers.schedulers.linear_schedule(0.0, 0.1, 5)),
}


SHAPES = {"a": (40, 7), "b": (3,), "c": {"d": (129,)}}
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
# Dtypes of parameters and of gradients: each of both daily, all pairs weekly.
PAIRS = [
    pytest.param(one, other, marks=[pytest.mark.weekly] * ((i + j) % 3 != 0))
    for i, one in enumerate(DTYPES)
    for j, other in enumerate(DTYPES)
]


def random_tree(seed, dtype=mx.float32, shapes=SHAPES):
    key = iter(mx.random.split(mx.random.key(seed), 3))

    def draw(tree):
        if isinstance(tree, tuple):
            return mx.random.normal(tree, key=next(key)).astype(dtype)
        return {name: draw(shape) for name, shape in tree.items()}

    return draw(shapes)


def trained(kind, clip=0.5, shapes=SHAPES):
    """The parameters and the state after four steps, of which the second has NaN in its gradients."""
    optimizer, parameters = kind(0.05), random_tree(0, shapes=shapes)
    optimizer.init(parameters)
    for step in range(4):
        gradients = random_tree(step + 1, shapes=shapes)
        if step == 1:
            gradients["b"] = gradients["b"] * mx.nan
        parameters, _ = updates.apply(optimizer, parameters, gradients, mx.array(True), clip)
        mx.eval(parameters, optimizer.state)
    return dict(tree_flatten([parameters, optimizer.state]))


@pytest.mark.parametrize(("kind", "clip"), [*((kind, 0.5) for kind in KINDS), ("AdamW", None)])
def test_steps_equal_those_of_mlx_within_a_few_roundings(kind, clip, request):
    expected = trained(KINDS[kind], clip)
    launches = request.getfixturevalue("launches")
    found = trained(KINDS[kind], clip)
    assert launches == ["adam_step"] * 12
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert mx.isfinite(array).all()
        np.testing.assert_allclose(found[name], array, rtol=2e-6, atol=2e-7, err_msg=name)


def test_other_optimizers_and_dtypes_use_mlxs_operations(launches):
    for optimizer in (mlx.optimizers.Lion(0.1), mlx.optimizers.Adamax(0.1), mlx.optimizers.SGD(0.1)):
        parameters = random_tree(0)
        optimizer.init(parameters)
        updates.apply(optimizer, parameters, random_tree(1), mx.array(True), None)
    parameters = {"a": mx.ones((9,), mx.complex64)}
    optimizer = mlx.optimizers.AdamW(0.1)
    optimizer.init(parameters)
    updates.apply(optimizer, parameters, parameters, mx.array(True), None)
    assert launches == []


@pytest.mark.parametrize(("dtype", "gradient_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("healthy", [True, False])
def test_results_are_those_of_fp32_rounded_once(dtype, gradient_dtype, healthy, launches):
    """A 16-bit result may be the neighbour of the rounded one where that lies close to the middle between two."""
    optimizer, parameters, gradients = mlx.optimizers.AdamW(0.05), random_tree(0, dtype), random_tree(1, gradient_dtype)
    optimizer.init(parameters)
    for leaf in (optimizer.state["a"], optimizer.state["b"], optimizer.state["c"]["d"]):
        leaf["m"], leaf["v"] = (mx.full(leaf["m"].shape, start, dtype) for start in (0.3, 0.7))
    wide = tree_map(lambda array: array.astype(mx.float32), [parameters, gradients])
    before = tree_flatten([parameters, optimizer.state])
    other = mlx.optimizers.AdamW(0.05)
    other.init(wide[0])
    other.state = tree_map(lambda x: x.astype(mx.float32) if x.dtype == dtype else x, optimizer.state)
    updated, norm = updates.apply(optimizer, parameters, gradients, mx.array(healthy), 0.5)
    assert launches == ["adam_step"] * 3
    scaled = tree_map(lambda gradient: gradient * updates.clip_scale(norm, 0.5), wide[1])
    expected = [other.apply_gradients(scaled, wide[0]), other.state] if healthy else None
    for (name, found), exact in zip(tree_flatten([updated, optimizer.state]), _listed(expected, before), strict=True):
        exact, rounding = exact.astype(mx.float32), ROUNDING.get(str(found.dtype).rpartition(".")[2], 0.0)
        np.testing.assert_allclose(found.astype(mx.float32), exact, rtol=rounding + 2e-6, atol=2e-7, err_msg=name)
        if name.endswith(("a", "b", "d", "m", "v")):
            assert found.dtype == dtype
            assert healthy or mx.array_equal(found, dict(before)[name])


def _listed(expected, before):
    return [array for _, array in (before if expected is None else tree_flatten(expected))]


def test_fp16_moments_too_small_for_their_dtype_divide_nothing_by_zero(launches):
    """The square of a gradient of 1e-4 is 0 in fp16, and so is Adam's eps; MLX's operations would give infinity."""
    optimizer, parameters = mlx.optimizers.AdamW(0.1), {"a": mx.ones((9,), mx.float16)}
    optimizer.init(parameters)
    gradients = {"a": mx.full((9,), 1e-4, mx.float16)}
    updated, _ = updates.apply(optimizer, parameters, gradients, mx.array(True), None)
    expected = 1 - 0.1 * 0.01 - 0.1 * 1e-5 / (np.sqrt(1e-11) + 1e-8)
    np.testing.assert_allclose(updated["a"].astype(mx.float32), expected, rtol=2 * ROUNDING["float16"])


def test_other_devices_do_not_use_the_kernel(monkeypatch):
    monkeypatch.setattr(kernel_operator, "is_right", lambda *_, **__: True)
    for device in ("cpu", "metal"):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert adam.AdamStep.of(mlx.optimizers.AdamW(0.1), None, mx.array(True)) is None


@pytest.mark.parametrize(("dtype", "gradient_dtype"), PAIRS, ids=str)
def test_the_trial_accepts_the_kernel_of_8_bits(dtype, gradient_dtype, execute):
    assert judged(stored_moments.trial_case(dtype, gradient_dtype), execute, "kernel").passed


@pytest.mark.parametrize("changed", [1, 3])
def test_the_trial_refuses_codes_two_intervals_off(changed, execute, caplog):
    """Neighbouring codes may come of rounding; no other ones."""

    def off(launch):
        results = execute(launch)
        codes = np.array(results[changed])
        codes[2, 7] += 2 if codes[2, 7] < 100 else -2
        results[changed] = mx.array(codes)
        return results

    assert not judged(stored_moments.trial_case(mx.float32, mx.float32), off, "kernel").passed


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


@pytest.mark.parametrize("name", ["adam8bit", "adamw8bit"])
def test_a_run_with_the_kernel_learns_as_with_mlxs_operations(name, request):
    kind, shapes = partial(OPTIMIZERS[name], bias_correction=True), {"large": (70, 90), "b": (40,)}
    expected = trained(kind, shapes=shapes)
    launches = request.getfixturevalue("launches")
    found = trained(kind, shapes=shapes)
    assert launches == ["adam_step_8bit", "adam_step"] * 4
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].dtype == array.dtype
        # A code that is its neighbour moves what later steps make of it by up to an interval.
        far = np.abs(np.array(found[path], np.float64) - np.array(array, np.float64)) > 1e-5 * np.abs(array).max()
        assert far.mean() < 0.02, path
