"""Tests that the first place that is not finite is found: layer output, loss, gradient or parameter."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from deltatune.data import Batch
from deltatune.train.batch_loss import full_loss
from deltatune.train.evaluation.nonfinite import cause, damage, first_place


class Layer(nn.Module):
    """A linear layer that can spoil its output, or only its gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.spoil = None

    def __call__(self, x):
        out = self.linear(x)
        if self.spoil == "output":
            out = out * mx.array(float("inf")) * 0
        if self.spoil == "gradient":
            # The derivative of sqrt at 0 is infinite, and infinity times the 0 of x * 0 is NaN.
            out = out + mx.sqrt(x * 0)
        return out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = [Layer() for _ in range(3)]
        self.head = nn.Linear(8, 11)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def model():
    mx.random.seed(0)
    return Model()


@pytest.fixture
def watched(model):
    return [(f"layer {index}", layer) for index, layer in enumerate(model.layers)]


def batch(source="data.jsonl:7"):
    tokens = np.arange(6, dtype=np.int32)[None]
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((1, 5), np.float32), None, ((source,),), ((5,),))


def test_a_sound_batch_has_no_cause(model, watched):
    assert first_place(model, full_loss(model), batch(), watched) is None
    assert cause(model, full_loss(model), [batch()], watched).startswith("no cause was found")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_first_output_is_named(model, watched, index):
    for layer in model.layers[index:]:
        layer.spoil = "output"
    assert (
        first_place(model, full_loss(model), batch(), watched)
        == f"the output of layer {index} is the first that is not finite, in float32"
    )


def test_the_gradient_is_followed_backward(model, watched):
    model.layers[2].spoil = "gradient"
    found = first_place(model, full_loss(model), batch(), watched)
    assert found == "going backward, the gradient that reaches the output of layer 1 is the first that is not finite"


def test_the_loss_itself(model, watched):
    def loss(inputs, targets, weights):
        total, weight = full_loss(model)(inputs, targets, weights)
        return total + mx.log(mx.array(0.0)), weight

    assert first_place(model, loss, batch(), watched) == "every layer's output is finite, but the loss is not"


def test_a_parameter_behind_the_first_layer(model, watched):
    model.layers[0].spoil = "gradient"
    found = first_place(model, full_loss(model), batch(), watched)
    assert found == "the gradient of embed.weight is not finite"


def test_a_tensor_that_is_not_finite_before_the_step(model):
    assert damage(model) is None
    model.head.bias = model.head.bias * float("nan")
    assert "1 of the model's 9 tensors hold NaN or infinity, the first head.bias" in damage(model)


def test_the_batch_is_named_and_the_layers_are_as_before(model, watched):
    model.layers[2].spoil = "output"
    kinds = [type(layer) for layer in model.layers]
    assert cause(model, full_loss(model), [batch("a:1")], watched).endswith("not finite, in float32; batch: a:1")
    assert [type(layer) for layer in model.layers] == kinds
