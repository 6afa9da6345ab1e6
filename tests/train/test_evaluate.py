"""Tests the loss per token of an evaluation, and that the model is afterwards as it was before."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from deltatune.data import BatchOrder
from deltatune.patches import patched, served
from deltatune.train.batch_loss import full_loss
from deltatune.train.distributed import World
from deltatune.train.evaluation.evaluate import Evaluation, evaluating
from deltatune.train.setup import Training, choose_loss


@pytest.fixture
def model(make_trainer):
    """A model with adapters that are not zero, and with dropout, which would change the loss."""
    made = make_trainer().model
    mx.random.seed(5)
    for path, leaf in tree_flatten(made.trainable_parameters()):
        if path.endswith("lora_b"):
            made.update(tree_unflatten([(path, 0.1 * mx.random.normal(leaf.shape))]))
    made.train()
    return made


def order(splits):
    return BatchOrder(splits.valid, 4, 64)


def test_the_loss_is_per_token_whatever_the_batches(model, splits):
    """The reference is each example alone, summed in float64; 6 rows fill one batch of 4, and half of another."""
    with patched(model):
        got = Evaluation(model, Training(choose_loss(model)[0]), World())(order(splits))
        total = tokens = 0.0
        model.eval()
        for example in splits.valid:
            logits = model(mx.array(example.tokens[None, :-1])).astype(mx.float32)
            chosen = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
            losses = -np.array(chosen, np.float64)[np.arange(example.positions), example.tokens[1:]]
            total += losses[example.targets[1:]].sum()
            tokens += example.targets[1:].sum()
    assert got == pytest.approx(total / tokens, rel=1e-5)


def test_the_chunked_loss_is_the_full_one(model, splits):
    with patched(model):
        chunked, how = choose_loss(model)
        assert "chunked" in how
        losses = [Evaluation(model, Training(loss), World())(order(splits)) for loss in (chunked, full_loss(model))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_no_dropout_and_every_mode_given_back(model, splits):
    model.train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    with patched(model):
        evaluation = Evaluation(model, Training(choose_loss(model)[0]), World())
        assert evaluation(order(splits)) == evaluation(order(splits))
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ZeroDivisionError), evaluating(model):
        1 / 0  # noqa: B018
    assert [module.training for module in model.modules()] == modes


def test_the_recurrence_is_ours_in_evaluation_too(model, splits):
    with patched(model):
        before = served()["deltatune"]
        Evaluation(model, Training(full_loss(model)), World())(order(splits), 1)
        assert served()["deltatune"] == before + 1


def test_it_can_be_cut_short_and_interrupted(model, splits):
    with patched(model):
        evaluation = Evaluation(model, Training(full_loss(model)), World())
        seen = []
        evaluation(order(splits), 1, lambda done, total: seen.append((done, total)) is not None)
        assert seen == [(1, 1)]
        assert evaluation(order(splits), -1, lambda done, total: True) is None
