"""Tests optimizers and schedules against those of mlx-lm and MLX, and that nothing changes without a finite norm."""

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import build_schedule as upstream_schedule

from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.options.config import TrainConfig
from deltatune.train.updates.optimizer import OPTIMIZERS, apply, build_optimizer, build_schedule, global_norm


def tree(seed):
    mx.random.seed(seed)
    return {
        "a": mx.random.normal((4, 6)),
        "layers": [{"b": mx.random.normal((6,))}, {}, {"c": mx.random.normal((3, 4))}],
    }


def flat(values):
    return {name: np.array(leaf) for name, leaf in tree_flatten(values)}


def test_every_optimizer_of_mlx_is_known_by_its_name():
    assert {"adam", "adamw", "muon", "sgd", "adafactor", "lion", "rmsprop"} <= OPTIMIZERS.keys()
    assert isinstance(build_optimizer(TrainConfig(optimizer="AdamW")), mlx.optimizers.AdamW)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adm"}, r"unknown name 'adm' \(did you mean 'adam'\?\); known: .*lion"),
        ({"optimizer_config": {"adma": {}}}, r"unknown optimizer 'adma'"),
        ({"optimizer_config": {"adamw": {"beta": 1}}}, r"adamw has no setting 'beta' \(did you mean 'betas'\?\)"),
        (
            {"optimizer": "rmsprop", "optimizer_config": {"rmsprop": {"eps": -1}}},
            r"rmsprop: eps: expected a number above 0, got -1",
        ),
        ({"lr_schedule": {"name": "cosine", "arguments": [1]}}, r"did you mean 'cosine_decay'\?"),
        ({"lr_schedule": {"name": "cosine_decay"}}, "^lr_schedule: .* must list the arguments of cosine_decay"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1]}}, "missing 1 required"),
        ({"lr_schedule": {"nam": "x"}}, r"unknown key 'nam' \(did you mean 'name'\?\)"),
        (
            {"lr_schedule": {"name": "step_decay", "arguments": [1, 1, 1], "warmup": -1}},
            r"warmup, in optimizer steps: expected a whole number of 0 or more, got -1",
        ),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        build_optimizer(TrainConfig(**options))


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "cosine_decay", "arguments": [1e-3, 10, 1e-5]},
        {"name": "cosine_decay", "arguments": [1e-3, 10], "warmup": 4, "warmup_init": 1e-6},
        {"name": "linear_schedule", "arguments": [1e-3, 0.0, 7], "warmup": 3},
        {"name": "exponential_decay", "arguments": [1e-1, 0.9]},
    ],
)
def test_schedules_are_those_of_mlx_lm(settings):
    ours, theirs = build_schedule(settings), upstream_schedule(settings)
    for step in range(20):
        assert mx.array(ours(mx.array(step))).item() == mx.array(theirs(mx.array(step))).item()


# The rates of the first updates by get_scheduler() of transformers 5.23: 8 updates of 2e-4.
TRANSFORMERS = {
    ("cosine", 3): [0.0, 6.66666667e-05, 1.33333333e-04, 2e-4, 1.80901699e-04, 1.30901699e-04, 6.90983006e-05],
    ("cosine", 0.0): [2e-4, 1.92387953e-04, 1.70710678e-04, 1.38268343e-04, 1e-4, 6.17316568e-05, 2.92893219e-05],
    ("linear", 0.25): [0.0, 1e-4, 2e-4, 1.66666667e-04, 1.33333333e-04, 1e-4, 6.66666667e-05],
    ("constant", 2): [0.0, 1e-4, 2e-4, 2e-4, 2e-4, 2e-4, 2e-4],
    ("constant", 0): [2e-4] * 7,
}


@pytest.mark.parametrize(("word", "warmup"), TRANSFORMERS)
def test_a_schedule_over_the_run_is_that_of_transformers(word, warmup):
    config = TrainConfig(lr_schedule=word, warmup=warmup, learning_rate=2e-4, iters=17, grad_accumulation_steps=2)
    optimizer, rates = build_optimizer(config), []
    optimizer.init({"w": mx.array(0.0)})
    for _ in range(7):
        optimizer.apply_gradients({"w": mx.array(1.0)}, {"w": mx.array(0.0)})
        rates.append(optimizer.learning_rate.item())
    np.testing.assert_allclose(rates, TRANSFORMERS[word, warmup], rtol=1e-5, atol=1e-10)


def test_adam_corrects_its_bias_unless_told_otherwise():
    for name in ("adam", "adamw", "adam8bit", "adamw8bit"):
        assert build_optimizer(TrainConfig(optimizer=name)).bias_correction
        config = TrainConfig(optimizer=name, optimizer_config={name: {"bias_correction": False, "eps": 1e-6}})
        assert (build_optimizer(config).bias_correction, build_optimizer(config).eps) == (False, 1e-6)


def test_a_single_update_has_the_whole_rate():
    for iters, rate in ((1, 2e-4), (2, 0.0)):
        assert build_optimizer(TrainConfig(iters=iters)).learning_rate.item() == pytest.approx(rate)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_update_is_that_of_mlx(name):
    parameters, gradients = tree(0), tree(1)
    config = TrainConfig(optimizer=name, learning_rate=1e-2, warmup=0.0)
    reference, ours = build_optimizer(config), build_optimizer(config)
    reference.init(parameters), ours.init(parameters)
    expected, got = parameters, parameters
    for _ in range(3):
        expected = reference.apply_gradients(gradients, expected)
        got, norm = apply(ours, got, gradients, mx.array(True), None)
    assert norm.item() == pytest.approx(np.sqrt(sum((g**2).sum() for g in flat(gradients).values())), rel=1e-6)
    # On CUDA, Adam and AdamW are computed by one kernel, which rounds less often.
    off = {"rtol": 0, "atol": 0} if backend.device() == "cpu" else {"rtol": 2e-6, "atol": 2e-7}
    for key, value in flat(expected).items():
        np.testing.assert_allclose(flat(got)[key], value, **off)
    for key, value in flat(reference.state).items():
        np.testing.assert_allclose(flat(ours.state)[key], value, **off)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), None])
def test_nonfinite_gradient_reaches_neither_parameters_nor_optimizer(name, poison):
    parameters, gradients = tree(0), tree(1)
    optimizer = build_optimizer(TrainConfig(optimizer=name, learning_rate=1e-2, warmup=0.0))
    optimizer.init(parameters)
    parameters, _ = apply(optimizer, parameters, gradients, mx.array(True), 1.0)
    before, state = flat(parameters), flat(optimizer.state)
    if poison is not None:
        gradients["layers"][2]["c"] = gradients["layers"][2]["c"] * poison
    got, norm = apply(optimizer, parameters, gradients, mx.array(poison is not None), 1.0)
    assert bool(mx.isfinite(norm)) == (poison is None)
    for key, value in before.items():
        np.testing.assert_array_equal(flat(got)[key], value)
    for key, value in flat(optimizer.state).items():
        np.testing.assert_array_equal(value, state[key])


@pytest.mark.parametrize(("clip", "scale"), [(0.5, True), (1e6, False)])
def test_clipping_scales_the_whole_gradient(clip, scale):
    parameters, gradients = tree(0), tree(1)
    norm = global_norm(gradients).item()
    optimizer = build_optimizer(TrainConfig(optimizer="sgd", learning_rate=1.0, warmup=0.0))
    optimizer.init(parameters)
    got, reported = apply(optimizer, parameters, gradients, mx.array(True), clip)
    assert reported.item() == pytest.approx(norm)
    moved = np.sqrt(sum(((flat(got)[key] - value) ** 2).sum() for key, value in flat(parameters).items()))
    assert moved == pytest.approx(clip if scale else norm, rel=1e-5)


@pytest.mark.skipif(backend.device() != "cpu", reason="counts what a CPU queues")
def test_an_update_never_holds_all_parameters_twice(peak_bytes):
    count, size = 120, 1 << 16
    parameters = {f"p{index}": mx.zeros(size) for index in range(count)}
    gradients = {name: mx.ones(size) for name in parameters}
    optimizer = build_optimizer(TrainConfig(learning_rate=1e-2))
    optimizer.init(parameters)
    mx.eval(parameters, gradients, optimizer.state)

    def update():
        updated, norm = apply(optimizer, parameters, gradients, mx.array(True), None)
        # Parameters and gradients are released before the evaluation, so that MLX can reuse their buffers.
        parameters.clear()
        gradients.clear()
        return updated, optimizer.state, norm

    extra = peak_bytes(update) / (4 * size)
    # The update of one parameter holds its gradient, two moments and the new value.
    assert extra < 5, f"{extra:.0f} of {count} parameters"
