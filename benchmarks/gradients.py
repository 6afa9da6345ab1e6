"""Measures the error of a training step's gradients, for each way to compute them.

The reference is mlx-lm's own model, loop over tokens, LoRA and loss in fp32. The error is the norm of the difference
divided by the norm of the reference, over all adapters together. The error of the same loop in bf16 shows what the
rounding to bf16 costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import trainers
from trainers import RANK, SCALE, Shape

Gradients = dict[str, np.ndarray]


def distances(shape: Shape, tokens: int) -> dict[str, float]:
    """The errors of `loop`, `deltatune` and `arrays with autodiff` in the shape's dtype."""
    rows = shape.rows(tokens)
    truth = of_mlx_lm(shape, rows, "float32")
    found = {"loop": of_mlx_lm(shape, rows, shape.dtype), "deltatune": of_deltatune(shape, rows)}
    trainers.without_loop()
    found["arrays with autodiff"] = of_mlx_lm(shape, rows, shape.dtype)
    return {name: _distance(gradients, truth) for name, gradients in found.items()}


def of_mlx_lm(shape: Shape, rows: np.ndarray, dtype: str) -> Gradients:
    model = trainers.mlx_model(shape, dtype)
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.tuner.trainer import default_loss
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model.freeze()
    linear_to_lora_layers(model, shape.layers, {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    _draw_adapters(model)
    model.train()
    lengths = mx.array([[0, rows.shape[1] - 1]] * len(rows))
    (_, _), gradients = nn.value_and_grad(model, default_loss)(model, mx.array(rows), lengths)
    return _flat(gradients)


def of_deltatune(shape: Shape, rows: np.ndarray) -> Gradients:
    """The gradients of the patched, checkpointed and compiled step."""
    model = trainers.mlx_model(shape)
    import mlx.core as mx

    from deltatune.lora import convert_to_lora
    from deltatune.options.config import LoraConfig, TrainConfig
    from deltatune.train.batch_loss import arrays, mean_loss_and_gradients
    from deltatune.train.setup import training

    convert_to_lora(model, LoraConfig(rank=RANK, scale=SCALE), num_layers=-1)
    _draw_adapters(model)
    with training(model, TrainConfig(grad_checkpoint=True), compare=False) as trained:
        loss = trained.loss
        model.train()
        step: Callable = mx.compile(lambda batch: mean_loss_and_gradients(model, loss, batch), inputs=[model.state])
        _, _, gradients = step(arrays(trainers.batch_of(rows)))
        return _flat(gradients)


def _draw_adapters(model: Any) -> None:
    """Draw lora_b, since its usual start at zero would leave lora_a without a gradient."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    drawn = []
    for number, (name, x) in enumerate(sorted(tree_flatten(model.trainable_parameters()))):
        draw = np.random.default_rng(number)
        drawn.append((name, mx.array(draw.normal(size=x.shape).astype(np.float32) * 0.02).astype(x.dtype)))
    model.update(tree_unflatten(drawn))


def _flat(gradients: Any) -> Gradients:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    wide = [(name, x.astype(mx.float32)) for name, x in tree_flatten(gradients)]
    mx.eval([x for _, x in wide])
    return {name: np.array(x) for name, x in wide}


def _distance(found: Gradients, truth: Gradients) -> float:
    if found.keys() != truth.keys():
        raise ValueError(f"not the same adapters: {sorted(found.keys() ^ truth.keys())[:4]}")
    apart = sum(float(np.square(found[name] - truth[name]).sum()) for name in truth)
    return (apart / sum(float(np.square(x).sum()) for x in truth.values())) ** 0.5
