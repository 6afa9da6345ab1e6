"""Parity of the multi-token-prediction head: the ways to train it, and deltatune's side of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from deltatune.models.load import load_model
from deltatune.models.mtp import add_head
from deltatune.options.config import TrainConfig
from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.cases import Adapters, ParityCase, ParityRun
from deltatune.selftest.parity.families import Config, Weights
from deltatune.selftest.parity.ours import as_batch, from_save, install, parts, train
from deltatune.train.batch_loss import LossFunction
from deltatune.train.mtp_loss import mtp_loss

from .pairs import two_layers


@dataclass(frozen=True)
class AheadCase:
    """A way to train the head, with deltatune's options."""

    mtp: bool | str = True
    weight: float = 0.3
    trunk_gradient: bool = False

    @property
    def model(self) -> ParityCase:
        """The model, without its head."""
        return two_layers(draw=7, learning_rate=1e-2)

    @property
    def config(self) -> TrainConfig:
        """The options."""
        return TrainConfig(mtp=self.mtp, mtp_weight=self.weight, mtp_trunk_gradient=self.trunk_gradient)


CASES = {
    "beside": AheadCase(),
    "through": AheadCase(weight=0.7, trunk_gradient=True),
    "only": AheadCase("only"),
}


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors of a head of one layer, by their names in released checkpoints."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer = {
        "self_attn.q_proj": (2 * queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    beside = {"fc": (width, 2 * width), "pre_fc_norm_embedding": (width,), "pre_fc_norm_hidden": (width,)}
    named = {**beside, "norm": (width,), **{f"layers.0.{name}": shape for name, shape in layer.items()}}
    return {f"mtp.{name}.weight": shape for name, shape in named.items()}


def with_head(folder: Path) -> nn.Module:
    """The model of a folder with its head."""
    model = load_model(folder)[0]
    add_head(model, folder)
    return model


def run(
    case: AheadCase,
    config: Config,
    weights: Weights,
    adapters: Adapters,
    once_patched: Callable[[], None] = lambda: None,
) -> ParityRun:
    """Train the Hugging Face save `config` and `weights` from the initial `adapters`.

    The losses are those that the gradients are of. once_patched: called when the patches are in force.
    """
    pytest.importorskip("mlx_vlm", minversion="0.7.10")
    family = case.model.family
    model = from_save(config, weights, with_head)

    def mlx_path(path: str) -> str:
        return path if path.startswith("mtp.") else family.mlx_path(path)

    def prepare() -> LossFunction:
        once_patched()
        loss = mtp_loss(model, parts(model), case.config)

        def whole(*arrays: mx.array) -> tuple[mx.array, ...]:
            total, weight, figures = loss(*arrays)
            added = 0.0 if case.mtp == "only" else case.weight * mx.stop_gradient(figures[0, 0])
            return total + added, weight, figures

        return whole

    modules = install(model, adapters, mlx_path)
    return train(model, modules, mlx_path, family.learning_rate, prepare, lambda index: as_batch(seeded.batch(index)))
