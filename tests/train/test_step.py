"""Tests the training step: accumulation, compilation, dropout and replaced parameters."""

import dataclasses
import io
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from deltatune.data import Batch
from deltatune.options.config import TrainConfig
from deltatune.train.batch_loss import full_loss
from deltatune.train.distributed import World
from deltatune.train.launcher import Launcher
from deltatune.train.step import Step, StepMachine
from deltatune.train.tree import from_host
from deltatune.train.updates.optimizer import UpdateOptions, build_optimizer, restore


class Tiny(nn.Module):
    """An embedding, dropout and a linear layer, which compile quickly."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(8, 11)

    def __call__(self, tokens):
        return self.out(self.dropout(self.embed(tokens)))


def model(dropout=0.0):
    mx.random.seed(3)
    made = Tiny(dropout)
    made.embed.freeze()
    mx.eval(made.parameters())
    return made


def batch(seed, rows=2, width=5, counted=None):
    draw = np.random.default_rng(seed)
    weights = np.zeros((rows, width), np.float32)
    weights.flat[: counted if counted is not None else rows * width] = 1
    tokens = draw.integers(0, 11, (rows, width + 1)).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, None, (("x",),) * rows, ((width,),) * rows)


def joined(*batches):
    fields = {name: np.concatenate([getattr(b, name) for b in batches]) for name in ("inputs", "targets", "weights")}
    return dataclasses.replace(batches[0], **fields)


def step_of(made, config=None, loss=None, **options):
    return Step(made, build_optimizer(config or TrainConfig()), loss or full_loss(made), World(), **options)


def run(made, batches, accumulate, loss=None, **options):
    config = TrainConfig(optimizer="sgd", learning_rate=0.5, lr_schedule="constant", warmup=0.0)
    step = step_of(made, config, loss, update=UpdateOptions(accumulate, **options))
    norms, accumulated, loss_sum, weight_sum = [], step.zeros(), mx.array(0.0), mx.array(0.0)
    for index, each in enumerate(batches, 1):
        loss_value, weight, accumulated, _ = step.micro_batch(each, accumulated)
        loss_sum, weight_sum = loss_sum + loss_value, weight_sum + weight
        if index % accumulate == 0:
            norms.append(step.update(accumulated, loss_sum, weight_sum))
            accumulated, loss_sum, weight_sum = step.zeros(), mx.array(0.0), mx.array(0.0)
        mx.eval(made.parameters(), norms, accumulated)
    return norms


def test_accumulation_weighs_by_tokens():
    """Micro-batches with 1 and 9 counted tokens must make the update of one batch with all ten, not the mean of two."""
    parts = [batch(0, counted=1), batch(1, counted=9)]
    whole, split = model(), model()
    run(whole, [joined(*parts)], 1)
    run(split, parts, 2)
    np.testing.assert_allclose(split.out.weight, whole.out.weight, rtol=0, atol=1e-6)
    assert mx.abs(split.out.weight - model().out.weight).max() > 1e-2


def test_a_batch_without_targets_changes_nothing():
    made = model()
    norms = run(made, [batch(0, counted=0)], 1)
    assert norms[0].item() == 0
    assert mx.array_equal(made.out.weight, model().out.weight)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_compilation_a_width(accumulate):
    made, traced = model(), []
    plain = full_loss(made)

    def counting(*arguments):
        traced.append(arguments[0].shape)
        return plain(*arguments)

    run(made, [batch(i, width=[5, 7, 9][i % 3]) for i in range(12)], accumulate, counting)
    assert sorted(traced) == [(2, 5), (2, 7), (2, 9)]


def test_dropout_is_drawn_anew_each_step_from_the_steps_own_key():
    runs = []
    for _ in range(2):
        made = model(dropout=0.5)
        step = step_of(made)
        step.random[0] = mx.random.key(7)
        losses = [step.micro_batch(batch(0), None)[0].item() for _ in range(3)]
        runs.append(losses)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


@pytest.mark.parametrize("between", ["before the gradients", "before the update"])
def test_a_parameter_that_somebody_replaces_is_the_one_that_trains(between):
    """Parameters are parts of one bundle. The bundle's old numbers must not overwrite a parameter that was replaced."""
    made, config = model(), TrainConfig(optimizer="sgd", learning_rate=0.5, lr_schedule="constant", warmup=0.0)
    step = step_of(made, config)
    loss, weight, gradients, _ = step.micro_batch(batch(0), None)
    step.update(gradients, loss, weight)
    zeros = {"out": {"weight": mx.zeros((11, 8)), "bias": mx.zeros(11)}}
    if between == "before the gradients":
        made.update(zeros)
    loss, weight, gradients, _ = step.micro_batch(batch(1), None)
    found = gradients
    if between == "before the update":
        made.update(zeros)
    step.update(gradients, loss, weight)
    expected = [-0.5 * leaf for _, leaf in sorted(tree_flatten(step.bundles.part(found)))]
    for got, wanted in zip([made.out.bias, made.out.weight], expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    if between == "before the gradients":
        assert loss.item() == pytest.approx(10 * np.log(11))


def test_a_loss_that_is_not_finite_leaves_everything():
    made, poisoned = model(), []
    plain = full_loss(made)

    def loss(inputs, targets, weights):
        total, weight = plain(inputs, targets, weights)
        return total + mx.where(inputs[0, 0] == poisoned[0], mx.array(float("inf")), 0.0), weight

    first = batch(0)
    poisoned.append(int(first.inputs[0, 0]))
    before = dict(tree_flatten(made.parameters()))
    run(made, [first], 1, loss)
    for name, leaf in tree_flatten(made.parameters()):
        assert mx.array_equal(leaf, before[name])


@pytest.mark.parametrize("kinds", [(np.int32, np.int32, np.float32), (np.int64, np.int32, np.float32)], ids=str)
def test_arrays_from_the_host_keep_their_numbers(kinds):
    given = [np.arange(12, dtype=kind).reshape(3, 4)[:, 1:] + kind(1) for kind in kinds]
    for found, array in zip(from_host(*given), given, strict=True):
        assert np.array_equal(np.array(found), array)
    assert [array.shape for array in from_host(given[0], given[1][:2])] == [(3, 3), (2, 3)]
    # MLX would build a kernel for a gather on CUDA, which takes three seconds of a new machine's first step.
    text = io.StringIO()
    mx.export_to_dot(text, *from_host(*given))
    assert "Gather" not in text.getvalue()


def test_settled_parameters_are_computed_and_stay_parts_of_their_bundles():
    model = Tiny()
    step = step_of(model)
    before, weight = step.joined, mx.array(np.array(model.out.weight))
    step.settle()
    assert before
    assert [id(array) for array in step.joined] == [id(array) for array in before]
    assert mx.array_equal(model.out.weight, weight)


def test_results_are_computed_by_operations_of_their_own(tmp_path):
    """Otherwise one thread may give up an array while another clears the list of those that were computed with it."""
    made = model(dropout=0.5)
    step = step_of(made, machine=StepMachine(Launcher()))
    results = [*step.micro_batch(batch(0), step.zeros()), list(step.random)]
    results += [step.update(*(results[index] for index in (2, 0, 1))), step.parameters(), step.optimizer.state]
    last = []
    for path, array in tree_flatten(results):
        mx.export_to_dot(str(tmp_path / "graph.dot"), array)
        last.append((path, re.findall('label ="([A-Za-z]+)"', (tmp_path / "graph.dot").read_text())[-1]))
    assert len(last) > 8
    assert {kind for _, kind in last} == {"Contiguous"}


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_resumed_runs_moments_outlive_the_trace_before_its_first_update(request, launched, optimizer):
    def updated():
        made = model()
        launcher = Launcher() if launched else None
        step = step_of(made, TrainConfig(optimizer=optimizer, warmup=0.0), machine=StepMachine(launcher))
        restore(step.optimizer, tree_map(lambda leaf: leaf + 1 if leaf.ndim else leaf, step.optimizer.state))
        loss, weight, gradients, _ = step.micro_batch(batch(0), step.zeros())
        step.update(gradients, loss, weight)
        return dict(tree_flatten([made.trainable_parameters(), step.optimizer.state]))

    expected = updated()
    request.getfixturevalue("traced_ahead")
    found = updated()
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert mx.array_equal(found[path], array), path
