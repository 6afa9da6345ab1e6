"""A step on preferences takes the memory of a supervised one with the same tokens, as planned and as counted."""

from __future__ import annotations

import gc

import deltatune  # noqa: F401

# isort: split
import mlx.core as mx
import pytest

from deltatune.config import LoraConfig, TrainConfig
from deltatune.machine import backend
from deltatune.models.head import split_head
from deltatune.ops import cross_entropy
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import blank_batch
from deltatune.train.distributed import World
from deltatune.train.optimizer import build_optimizer
from deltatune.train.preferences.loss import chunked_token_losses, full_token_losses, preference_loss
from deltatune.train.preferences.objectives import OBJECTIVES
from deltatune.train.setup import prepare, training
from deltatune.train.step import LossFunction, Step

pytestmark = pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
ROWS, LENGTH = 2, 160
# What a step on preferences may take of a supervised step's peak.
LIMIT = 1.3


@pytest.fixture
def model_and_before(tiny_model, monkeypatch):
    """A model with a loss in many chunks, as real sizes have it, and the bytes in use before it was made."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 1)
    gc.collect()
    before = mx.get_active_memory()
    model = tiny_model("qwen3_5", vocab_size=8192, num_hidden_layers=2, full_attention_interval=2)
    prepare(model, options("sft"))
    mx.eval(model.parameters())
    return model, before


def options(loss: str) -> TrainConfig:
    return TrainConfig(loss=loss, num_layers=-1, grad_checkpoint=True, lora_parameters=LoraConfig(rank=4))


def counted(model, before: int, loss_function: LossFunction, pairs: int) -> int:
    """The peak of the second step by MLX's own count."""
    step = Step(model, build_optimizer(TrainConfig()), loss_function, World())
    batch = blank_batch(ROWS, LENGTH, False, pairs)
    for _ in range(2):
        mx.reset_peak_memory()
        mx.eval(step.micro_batch(batch, step.zeros()))
    return mx.get_peak_memory() - before


@pytest.mark.usefixtures("waiting_queue")
def test_the_peak_is_that_of_a_supervised_step(model_and_before):
    """ORPO reads the most of its answers; benchmarks/preference_memory.py plans all losses of a real size."""
    model, before = model_and_before
    config, pairs = options("orpo"), ROWS // 2
    planned = forecast_step(model, config, ROWS, LENGTH, ArrayLayout.measured(), preferences=pairs).bytes.amount
    objective = OBJECTIVES["orpo"]
    with training(model, options("sft"), compare=False) as trained:
        model.train()
        supervised = counted(model, before, trained.loss, 0)
        chunked = chunked_token_losses(*split_head(model)[:2])
        preferences = counted(model, before, preference_loss(chunked, objective, config), pairs)
        # The limit can tell: the logits of all tokens at once are beyond it.
        whole = preference_loss(full_token_losses(model), objective, config)
        assert counted(model, before, whole, pairs) > LIMIT * supervised
    assert preferences <= LIMIT * supervised
    assert planned == pytest.approx(preferences, rel=0.05)
