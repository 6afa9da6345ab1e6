"""Padding on the right reaches no real position, forward or backward, without a mask, as `Batch` claims."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from deltatune.data import collate


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "kimi_linear"])
def test_tokens_in_padding_change_neither_loss_nor_gradient(tiny_model, examples_of, family):
    model = tiny_model(family)
    model.train()
    batch = collate([examples_of([11])], 24, packed=False)
    other = batch.inputs.copy()
    other[:, 10:] = np.random.default_rng(0).integers(3, 300, (1, 14))

    def loss(model: nn.Module, inputs: np.ndarray) -> mx.array:
        losses = nn.losses.cross_entropy(model(mx.array(inputs)), mx.array(batch.targets))
        return (losses * mx.array(batch.weights)).sum()

    step = nn.value_and_grad(model, loss)
    (value, gradient), (other_value, other_gradient) = step(model, batch.inputs), step(model, other)
    assert other_value.item() == value.item()
    changed = dict(tree_flatten(other_gradient))
    for name, array in tree_flatten(gradient):
        np.testing.assert_array_equal(changed[name], array, err_msg=name)
