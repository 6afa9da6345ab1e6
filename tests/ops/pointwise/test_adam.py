"""The kernel of Adam and AdamW, on the host machine or a GPU, against MLX's optimizers; and when it is used."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten

from deltatune.machine import backend
from deltatune.ops.pointwise import adam
from deltatune.train import optimizer as updates

KINDS = {
    "Adam": partial(mlx.optimizers.Adam, betas=[0.8, 0.95]),
    "Adam, corrected": partial(mlx.optimizers.Adam, bias_correction=True),
    "AdamW": partial(mlx.optimizers.AdamW, weight_decay=0.3, eps=1e-3),
    "AdamW, corrected": partial(mlx.optimizers.AdamW, bias_correction=True),
    "AdamW on a schedule": lambda _: mlx.optimizers.AdamW(mlx.optimizers.schedulers.linear_schedule(0.0, 0.1, 5)),
}


@pytest.fixture
def launches(monkeypatch, execute):
    """The names of the launches, which the host machine runs while the device passes for an NVIDIA GPU."""
    names = []

    def run(launch):
        names.append(launch.name)
        return execute(launch)

    monkeypatch.setattr(backend, "device", lambda: "cuda")
    monkeypatch.setattr(adam, "_passes_trial", lambda *_: True)
    original = adam._step
    monkeypatch.setattr(adam, "_step", lambda *arguments: original(*arguments[:3], run))
    return names


def random_tree(seed):
    shapes = {"a": (40, 7), "b": (3,), "c": {"d": (129,)}}
    key = iter(mx.random.split(mx.random.key(seed), 3))

    def draw(tree):
        if isinstance(tree, tuple):
            return mx.random.normal(tree, key=next(key))
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
    half = {"a": mx.ones((9,), mx.bfloat16)}
    optimizer = mlx.optimizers.AdamW(0.1)
    optimizer.init(half)
    updated, _ = updates.apply(optimizer, half, half, mx.array(True), None)
    assert updated["a"].dtype == mx.bfloat16
    assert launches == []


def test_gradients_of_another_dtype_are_cast_to_fp32(launches):
    optimizer, parameters = mlx.optimizers.AdamW(0.1), {"a": mx.ones((9,))}
    optimizer.init(parameters)
    updated, _ = updates.apply(optimizer, parameters, {"a": mx.ones((9,), mx.bfloat16)}, mx.array(True), None)
    assert launches == ["adam_step"]
    assert updated["a"].dtype == mx.float32


def test_other_devices_do_not_use_the_kernel(monkeypatch):
    monkeypatch.setattr(adam, "_passes_trial", lambda *_: True)
    for device in ("cpu", "metal"):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert adam.AdamStep.of(mlx.optimizers.AdamW(0.1), None, mx.array(True)) is None


def test_a_kernel_that_is_wrong_or_fails_is_not_used(check_trial):
    check_trial(adam._passes_trial, 1.0001)
