"""LoRA+: B matrices train with their own learning rate, under every optimizer, and nothing else changes."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from deltatune.data import Batch
from deltatune.lora.linear import LoRALinear
from deltatune.machine.compiling import without_kernels
from deltatune.options.config import TrainConfig
from deltatune.train.batch_loss import full_loss
from deltatune.train.distributed import World
from deltatune.train.setup import build_step
from deltatune.train.updates.optimizer import OPTIMIZERS, build_optimizer

RATE, RATIO = 0.01, 16.0
SETTINGS = {"adafactor": {"relative_step": False}, "sgd": {"momentum": 0.9}, "adamw": {"bias_correction": True}}


class Tiny(nn.Module):
    """Two adapters around frozen layers, and a bias that trains beside them."""

    def __init__(self, rank=4):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = [LoRALinear.from_base(nn.Linear(8, 8), rank) for _ in range(2)]
        self.out = nn.Linear(8, 11)
        self.freeze()
        for layer in self.layers:
            layer.lora_b = mx.random.normal(layer.lora_b.shape)
            layer.unfreeze_adapter()
        self.out.unfreeze(keys=["bias"])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def tiny():
    mx.random.seed(4)
    made = Tiny()
    mx.eval(made.parameters())
    return made


def batch():
    tokens = np.random.default_rng(0).integers(0, 11, (2, 6)).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((2, 5), np.float32), None, (("x",),) * 2, ((5,),) * 2)


def config(name, **options):
    """The options of a run."""
    settings = {"optimizer_config": {name: SETTINGS.get(name)}, "lr_schedule": "constant", "warmup": 0.0}
    return TrainConfig(optimizer=name, learning_rate=RATE, **settings, **options)


def trained(name, steps=3, **options):
    """The parameters after some compiled steps."""
    made, settings = tiny(), config(name, grad_clip=1.0, **options)
    with without_kernels():
        step = build_step(made, build_optimizer(settings), full_loss(made), settings, World())
        for _ in range(steps):
            loss, weight, gradients, _ = step.micro_batch(batch(), None)
            mx.eval(step.update(gradients, loss, weight), made.parameters())
    return dict(tree_flatten(made.trainable_parameters()))


def by_optimizers_of_mlx(name, steps=3):
    """The same by MLX alone: an optimizer for B, with a rate RATIO times the others', one for A, one for the bias."""
    made = tiny()
    optimizers = {end: build_optimizer(config(name)) for end in ("lora_a", "lora_b", "bias")}
    optimizers["lora_b"].learning_rate = RATE * RATIO
    if hasattr(optimizers["bias"], "weight_decay"):
        optimizers["bias"].weight_decay = 0.0
    example = batch()

    def loss(model):
        logits = model(mx.array(example.inputs))
        return nn.losses.cross_entropy(logits, mx.array(example.targets)).mean()

    for _ in range(steps):
        gradients = dict(tree_flatten(nn.value_and_grad(made, loss)(made)[1]))
        norm = mx.sqrt(sum(value.square().sum() for value in gradients.values()))
        scaled = {path: value * mx.minimum(1.0 / (norm + 1e-6), 1.0) for path, value in gradients.items()}
        for end, optimizer in optimizers.items():
            part = [(path, value) for path, value in scaled.items() if path.endswith(end)]
            optimizer.update(made, tree_unflatten(part))
        mx.eval(made.parameters())
    return dict(tree_flatten(made.trainable_parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_optimizers_of_mlx(name):
    found, expected, plain = trained(name, loraplus_lr_ratio=RATIO), by_optimizers_of_mlx(name), trained(name, 1)
    for path, value in expected.items():
        scale = mx.abs(value).max().item()
        np.testing.assert_allclose(found[path], value, rtol=0, atol=3e-5 * scale, err_msg=path)
    start, first = dict(tree_flatten(tiny().trainable_parameters())), trained(name, 1, loraplus_lr_ratio=RATIO)
    for path in start:
        moved = mx.linalg.norm((first[path] - start[path]).reshape(-1))
        before = mx.linalg.norm((plain[path] - start[path]).reshape(-1))
        expected_ratio = RATIO if path.endswith("lora_b") else 1.0
        assert (moved / before).item() == pytest.approx(expected_ratio, rel=2e-3), path


def test_rates_follow_the_bundles(tiny_model):
    settings = config("adamw", loraplus_lr_ratio=RATIO)
    step = build_step(tiny(), build_optimizer(settings), lambda *_: None, settings, World())
    assert [(bundle.paths[0], bundle.group.rate) for bundle in step.bundles.all] == [
        ("layers.0.lora_a", 1.0),
        ("layers.0.lora_b", RATIO),
    ]
    assert [step.bundles.group(f"together.{index}").rate for index in range(2)] == [1.0, RATIO]
