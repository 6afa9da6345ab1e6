"""The kernel of Adam and AdamW, on the host machine or a GPU, against MLX's optimizers; and when it is used."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from deltatune.machine import backend
from deltatune.ops.operator import first_use
from deltatune.ops.operator.measure import ROUNDING
from deltatune.ops.pointwise import adam
from deltatune.train.updates import optimizer as updates

KINDS = {
    "Adam": partial(mlx.optimizers.Adam, betas=[0.8, 0.95]),
    "Adam, corrected": partial(mlx.optimizers.Adam, bias_correction=True),
    "AdamW": partial(mlx.optimizers.AdamW, weight_decay=0.3, eps=1e-3),
    "AdamW, corrected": partial(mlx.optimizers.AdamW, bias_correction=True),
    "AdamW on a schedule": lambda _: mlx.optimizers.AdamW(mlx.optimizers.schedulers.linear_schedule(0.0, 0.1, 5)),
}


def random_tree(seed, dtype=mx.float32):
    shapes = {"a": (40, 7), "b": (3,), "c": {"d": (129,)}}
    key = iter(mx.random.split(mx.random.key(seed), 3))

    def draw(tree):
        if isinstance(tree, tuple):
            return mx.random.normal(tree, key=next(key)).astype(dtype)
        return {name: draw(shape) for name, shape in tree.items()}

    return draw(shapes)


def trained(kind, steps=4, clip=0.5, gradients=random_tree):
    """The parameters and the state after some steps, of which the second has NaN in its gradients."""
    optimizer, parameters = KINDS[kind](0.05), random_tree(0)
    optimizer.init(parameters)
    for step in range(steps):
        given = gradients(step + 1)
        if step == 1:
            given["b"] = given["b"] * mx.nan
        parameters, _ = updates.apply(optimizer, parameters, given, mx.array(True), clip)
        mx.eval(parameters, optimizer.state)
    return dict(tree_flatten([parameters, optimizer.state]))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_those_of_mlx_within_a_few_roundings(kind, clip, request):
    expected = trained(kind, clip=clip)
    launches = request.getfixturevalue("launches")
    found = trained(kind, clip=clip)
    assert launches == ["adam_step"] * 12
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert mx.isfinite(array).all()
        np.testing.assert_allclose(found[name], array, rtol=2e-6, atol=2e-7, err_msg=name)


def test_an_unhealthy_step_changes_nothing(launches):
    optimizer, parameters = mlx.optimizers.AdamW(0.1), random_tree(0)
    optimizer.init(parameters)
    parameters, _ = updates.apply(optimizer, parameters, random_tree(1), mx.array(True), None)
    before = tree_flatten([parameters, optimizer.state])
    after, _ = updates.apply(optimizer, parameters, random_tree(2), mx.array(False), None)
    assert len(launches) == 6
    for (name, one), (_, other) in zip(before, tree_flatten([after, optimizer.state]), strict=True):
        assert mx.array_equal(one, other), name


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


@pytest.mark.parametrize("gradient_dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
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
    monkeypatch.setattr(first_use, "is_right", lambda *_, **__: True)
    for device in ("cpu", "metal"):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert adam.AdamStep.of(mlx.optimizers.AdamW(0.1), None, mx.array(True)) is None
