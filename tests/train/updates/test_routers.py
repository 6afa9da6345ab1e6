"""The load-balancing loss of routers: its values, its gradients, and parameters left alone."""

import contextlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from deltatune.data import Batch
from deltatune.errors import UserError
from deltatune.layers import describe
from deltatune.machine.compiling import without_kernels
from deltatune.models.layer_caches import carries
from deltatune.ops import layer_cut
from deltatune.ops.checkpoint import checkpointed
from deltatune.options.config import TrainConfig
from deltatune.patches import patched
from deltatune.train.batch_loss import arrays, full_loss, mean_loss_and_gradients
from deltatune.train.distributed import World
from deltatune.train.setup import build_step
from deltatune.train.updates.optimizer import build_optimizer
from deltatune.train.updates.routers import RouterLoss, real_lengths, router_loss
from families import FAMILIES as FAMILY_OPTIONS
from model_gradients import difference_norms, rounding_bounds

FAMILIES = ("qwen3_5_moe", "qwen3_next", "kimi_linear", "bailing", "kimi_k3")
SIGMOIDS = ("kimi_linear", "bailing", "kimi_k3")
_KINDS = {"kda_layers": [1], "full_attn_layers": [2]}
KIMI = {"linear_attn_config": FAMILY_OPTIONS["kimi_k3"]["linear_attn_config"] | _KINDS}
LENGTHS = (24, 17)
# The bytes of a row of activations: 24 tokens, 64 wide, in fp32.
ROW_BYTES = 24 * 64 * 4
FACTOR = 0.5
ROUTERS = RouterLoss(FACTOR)


def batch(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Batch:
    """Rows of `lengths`; the first three tokens of each do not count in the loss."""
    draw, shape = np.random.default_rng(seed), (len(lengths), max(LENGTHS))
    inputs, targets = (draw.integers(3, 300, shape).astype(np.int32) for _ in range(2))
    weights = np.ones(shape, np.float32)
    for row, length in enumerate(lengths):
        inputs[row, length:], targets[row, length:] = 0, 0
        weights[row, :3] = weights[row, length:] = 0
    return Batch(inputs, targets, weights, None, (("x",),) * len(lengths), tuple((n,) for n in lengths))


class Heard(nn.Module):
    """A module that notes the first argument and the result of each call."""

    def __init__(self, module, notes):
        super().__init__()
        self.module, self._notes = module, (notes,)

    def __call__(self, *arguments):
        result = self.module(*arguments)
        self._notes[0].append((arguments, result))
        return result


@contextlib.contextmanager
def heard(model):
    """Yields the calls of all gates, and those of all experts, in order."""
    gates, experts, changed = [], [], []
    for module in model.modules():
        if "switch_mlp" in module:
            for name, notes in (("gate", gates), ("switch_mlp", experts)):
                changed.append((module, name, module[name]))
                module[name] = Heard(module[name], notes)
    yield gates, experts
    for module, name, original in changed:
        module[name] = original


def routed(model, tokens, family):
    """(logits, indices) of every router, computed by upstream's code, in float64 and as integers."""
    with heard(model) as (gates, experts):
        model(tokens)
    found = []
    for ((x, *_), result), ((_, indices), _) in zip(gates, experts, strict=True):
        found.append((result if family != "bailing" else x, indices))
    weights = [m.gate.weight for m in model.modules() if "switch_mlp" in m]
    flat = []
    for (logits, indices), weight in zip(found, weights, strict=True):
        logits = np.array(logits, np.float64)
        if family == "bailing":
            logits = logits @ np.array(weight, np.float64).T
        flat.append((logits.reshape(-1, 8), np.array(indices).reshape(-1, indices.shape[-1])))
    return flat


def defined(family, found, real):
    """The loss by its definition, in float64; `real` [N] says which tokens count."""
    logits = np.concatenate([one[real] for one, _ in found])
    chosen = np.concatenate([indices[real] for _, indices in found])
    if family in SIGMOIDS:
        scores = 1 / (1 + np.exp(-logits))
        probabilities = scores / scores.sum(axis=1, keepdims=True)
    else:
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    share = np.array([(chosen == expert).sum() / len(chosen) for expert in range(8)])
    return 8 * (share * probabilities.mean(axis=0)).sum()


def gradients(model, given, routers=ROUTERS, lengths=None):
    """(sums, gradients, figures) under the patches, compiled as a step is."""
    lengths = real_lengths(given) if lengths is None else lengths
    with patched(model):
        total, weight, found, *figures = mean_loss_and_gradients(
            model, full_loss(model), arrays(given), None, routers, lengths
        )
        mx.eval(figures)
    return (total, weight), dict(tree_flatten(found)), figures


@pytest.fixture
def family_model(tiny_model):
    def make(family):
        layers = KIMI if family.startswith("kimi") else {"full_attention_interval": 2, "layer_group_size": 2}
        made = tiny_model(family, num_hidden_layers=2, **layers)
        for module in made.modules():
            if "switch_mlp" in module:
                # Random gates are nearly uniform; these choose, and Kimi's bias changes the choice.
                module.gate.weight = module.gate.weight * 8
                for holder in (module, module.gate):
                    for name in ("e_score_correction_bias", "expert_bias"):
                        if name in holder:
                            holder[name] = mx.random.uniform(-0.3, 0.3, holder[name].shape, key=mx.random.key(1))
        made.train()
        mx.eval(made.parameters())
        return made

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_the_definition_over_real_tokens(family_model, family):
    model, given = family_model(family), batch()
    real = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).reshape(-1)
    expected = defined(family, routed(model, mx.array(given.inputs), family), real)
    _, _, (figures,) = gradients(model, given)
    values, counts = np.array(figures)
    np.testing.assert_allclose(values / counts, expected, rtol=2e-5)
    assert counts.tolist() == [given.weights.sum()]


def by_autodiff(model, given):
    """The gradients of the mean loss with the term, by MLX's own rules on upstream's code."""
    tokens, targets, weights = (mx.array(each) for each in (given.inputs, given.targets, given.weights))
    real = (mx.arange(tokens.shape[1]) < real_lengths(given)[:, None]).reshape(-1, 1)

    def loss(model):
        with heard(model) as (gates, experts):
            logits = model(tokens).astype(mx.float32)
        mean = (nn.losses.cross_entropy(logits, targets) * weights).sum() / weights.sum()
        routers = mx.concatenate([gate.reshape(-1, 8) for _, gate in gates])
        chosen = mx.concatenate([indices.reshape(-1, indices.shape[-1]) for (_, indices), _ in experts])
        every = mx.concatenate([real] * len(gates))
        rows = every.sum()
        share = ((chosen[:, :, None] == mx.arange(8)).sum(axis=1) * every).sum(axis=0) / rows
        mass = (mx.softmax(routers, axis=1) * every).sum(axis=0) / rows
        return mean + FACTOR * 8 * (share * mass).sum()

    return dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1]))


@pytest.mark.parametrize("how", ["checkpoints", "pieces of rows", "rows in pieces"])
def test_gradients_are_those_of_autodiff(family_model, monkeypatch, how):
    model, given = family_model("qwen3_next"), batch()
    expected = by_autodiff(model, given)
    bounds = rounding_bounds(model, lambda: by_autodiff(model, given), expected)
    if how != "checkpoints":
        size = {"pieces of rows": 1, "rows in pieces": 4}[how]
        monkeypatch.setattr(layer_cut, "PIECE_BYTES", dict.fromkeys(layer_cut.PIECE_BYTES, ROW_BYTES // size))
    layers = describe(model)
    with checkpointed([layer.module for layer in layers], carries(model, layers)):
        found = gradients(model, given)[1]
        mx.eval(found)
    assert expected.keys() == {name.replace(".module.", ".") for name in found}
    differences = difference_norms(expected, found)
    assert {name: norm for name, norm in differences.items() if not norm <= bounds[name]} == {}
    # A choice of experts that turns over in the changed model would make the bounds so wide that they see nothing.
    assert all(bounds[name] < 1e-3 * mx.linalg.norm(value) for name, value in expected.items())


def test_without_weights_the_gradients_have_the_same_bits(family_model):
    model, given = family_model("qwen3_next"), batch()
    with checkpointed(model.layers):
        off, watched = gradients(model, given, None), gradients(model, given, RouterLoss(0.0))
        mx.eval(off, watched)
    assert off[2] == []
    assert float(watched[2][0][0, 0]) > 0
    for name, value in off[1].items():
        assert mx.array_equal(value, watched[1][name]), name


def test_micro_batches_weigh_by_their_targets(family_model):
    """The compiled step's sums over two micro-batches are the gradients of each, weighted by targets."""
    model, given = family_model("qwen3_next"), [batch(1), batch(2, (20, 6))]
    alone = [gradients(model, each) for each in given]
    options = TrainConfig(router_aux_loss_coef=FACTOR, grad_accumulation_steps=2)
    with patched(model), without_kernels():
        step = build_step(model, build_optimizer(options), full_loss(model), options, World())
        accumulated = step.zeros()
        for each in given:
            _, _, accumulated, figures = step.micro_batch(each, accumulated)
            mx.eval(accumulated)
        np.testing.assert_allclose(figures[0], alone[1][2][0], rtol=2e-6)
        found = dict(tree_flatten(step.bundles.part(accumulated)))
    for name, value in found.items():
        expected = sum(each[1][name] * each[0][1] for each in alone)
        assert mx.abs(value - expected).max() <= 1e-5 * mx.abs(expected).max() + 1e-6, name


def test_a_batch_without_a_target_trains_nothing(family_model):
    given = batch()
    given.weights[:] = 0
    _, found, (figures,) = gradients(family_model("qwen3_next"), given)
    assert all(mx.array_equal(value, mx.zeros_like(value)) for value in found.values())
    assert not np.array(figures).any()


def test_a_run_reports_them_when_they_are_off(tiny_checkpoint, make_trainer, read_metrics):
    folder = tiny_checkpoint("qwen3_next", num_hidden_layers=2, full_attention_interval=2)
    trainer = make_trainer(model=str(folder), iters=2, val_batches=0, steps_per_report=2)
    trainer.run()
    (record,) = [each for each in read_metrics(trainer.outputs.directory) if "train_loss" in each]
    assert 2 <= record["aux_loss"] < 3


@pytest.mark.bad_input("`router_aux_loss_coef` for a model without a mixture of experts")
def test_a_model_without_routers_is_refused(tiny_model):
    model = tiny_model("qwen3_5", num_hidden_layers=2, full_attention_interval=2)
    with patched(model):
        with pytest.raises(UserError, match="router_aux_loss_coef: read only for a model with a router"):
            router_loss(model, TrainConfig(router_aux_loss_coef=0.1), World())
        assert router_loss(model, TrainConfig(), World()) is None
