"""Parity of the multi-token-prediction head: the ways to train it, and deltatune's side of a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from deltatune.models.adapted_base import add_head
from deltatune.models.load import load_model
from deltatune.options.config import TrainConfig
from deltatune.selftest.parity import seeded
from deltatune.selftest.parity.cases import STEPS, Adapters, ParityCase, ParityRun
from deltatune.selftest.parity.families import COMMON, FAMILIES, Config, Family, Weights
from deltatune.selftest.parity.ours import as_batch, from_save, install, parts, train
from deltatune.train.batch_loss import LossFunction
from deltatune.train.mtp_loss import mtp_loss

from .pairs import two_layers

# Latent attention, a dense layer and one of experts. The indexer of sparse attention takes all tokens of short rows.
_GLM = Family(
    "glm_moe_dsa",
    {
        **COMMON,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 256,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "moe_intermediate_size": 28,
        "moe_layer_freq": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    not_adapted=("lm_head", "kv_b_proj", "indexer.wq_b", "indexer.wk", "indexer.weights_proj"),
)


@dataclass(frozen=True)
class AheadCase:
    """A way to train the head of a family, with deltatune's options; `draw` is one of the seeded checkpoints."""

    mtp: bool | str = True
    weight: float = 0.3
    trunk_gradient: bool = False
    family: str = "qwen3_5"
    draw: int = 7

    @property
    def model(self) -> ParityCase:
        """The model, without its head."""
        if self.family == "qwen3_5":
            return two_layers(draw=self.draw, learning_rate=1e-2)
        family = FAMILIES.get(self.family, _GLM)
        return ParityCase(replace(family, draw=self.draw, learning_rate=1e-2))

    @property
    def config(self) -> TrainConfig:
        """The options."""
        return TrainConfig(mtp=self.mtp, mtp_weight=self.weight, mtp_trunk_gradient=self.trunk_gradient)


CASES = {
    "beside": AheadCase(),
    "through": AheadCase(weight=0.7, trunk_gradient=True),
    "only": AheadCase("only"),
    "qwen3_next": AheadCase("only", family="qwen3_next", draw=6),
    "nemotron_h": AheadCase("only", family="nemotron_h", draw=0),
    "glm_moe_dsa": AheadCase("only", family="glm_moe_dsa", draw=1),
}


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
    steps: int = STEPS,
) -> ParityRun:
    """Train the Hugging Face save `config` and `weights` from the initial `adapters`.

    The losses are those that the gradients are of. once_patched: called when the patches are in force.
    """
    pytest.importorskip("mlx_vlm", minversion="0.7.10")
    family = case.model.family
    model = from_save(config, weights, with_head)
    # GLM's head is a module of mlx-vlm around the one with its parameters.
    around = "mtp." if "mtp" in model["mtp"] else ""

    def mlx_path(path: str) -> str:
        return around + path if path.startswith("mtp.") else family.mlx_path(path)

    def prepare() -> LossFunction:
        once_patched()
        loss = mtp_loss(model, parts(model), case.config)

        def whole(*arrays: mx.array) -> tuple[mx.array, ...]:
            total, weight, figures = loss(*arrays)
            added = 0.0 if case.mtp == "only" else case.weight * mx.stop_gradient(figures[0, 0])
            return total + added, weight, figures

        return whole

    modules = install(model, adapters, mlx_path)
    rate = family.learning_rate
    return train(model, modules, mlx_path, rate, prepare, lambda index: as_batch(seeded.batch(index)), steps)
