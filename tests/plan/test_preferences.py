"""A step on preferences takes the memory of a supervised one with the same tokens, as planned and as counted."""

import gc

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from counted_programs import peak_of_step
from deltatune.machine import backend
from deltatune.ops import cross_entropy
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape, blank_batch
from deltatune.train.batch_loss import LossFunction
from deltatune.train.distributed import World
from deltatune.train.preferences.loss import full_token_losses
from deltatune.train.setup import prepare, training
from deltatune.train.step import Step
from deltatune.train.updates.optimizer import build_optimizer

pytestmark = pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
ROWS, LENGTH, VOCABULARY = 2, 160, 8192
# The bytes of the logits of a chunk of the loss.
CHUNK = 4 * cross_entropy.FEWEST_TOKENS * VOCABULARY
# What a step on preferences may take of a supervised step's peak.
LIMIT = 1.3


@pytest.fixture
def model(tiny_model, monkeypatch):
    """A model with a loss in many chunks, as real sizes have it."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 1)
    model = tiny_model("qwen3_5", vocab_size=VOCABULARY, num_hidden_layers=2, full_attention_interval=2)
    prepare(model, options("sft"))
    mx.eval(model.parameters())
    return model


def options(loss: str) -> TrainConfig:
    return TrainConfig(loss=loss, grad_checkpoint=True, lora_parameters=LoraConfig(rank=4))


def counted(model, loss_function: LossFunction, pairs: int) -> int:
    # Plans, steps and earlier tests leave arrays behind that only a collection frees.
    gc.collect()
    before = mx.get_active_memory() - sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    step = Step(model, build_optimizer(TrainConfig()), loss_function, World())
    return peak_of_step(step, blank_batch(ROWS, LENGTH, False, pairs), before)


@pytest.mark.usefixtures("waiting_queue")
def test_the_peak_is_that_of_a_supervised_step(model, monkeypatch):
    """ORPO reads the most of its answers; benchmarks/preference_memory.py plans all losses of a real size."""
    layout, pairs = ArrayLayout.measured(), ROWS // 2

    def planned(loss: str, preferences: int) -> int:
        shape = BatchShape(ROWS, LENGTH, preferences=preferences)
        return forecast_step(model, options(loss), shape, layout).bytes.amount

    supervised, preferences = planned("sft", 0), planned("orpo", pairs)
    assert preferences <= LIMIT * supervised
    with training(model, options("orpo"), compare=False) as trained:
        model.train()
        count = counted(model, trained.loss, pairs)
    # On a busy machine MLX may be some chunks of the loss ahead.
    assert 0.95 * preferences < count < 1.05 * preferences + 2 * CHUNK
    # The limit can tell: the logits of all tokens at once are beyond it.
    monkeypatch.setattr("deltatune.train.setup.chunked_token_losses", lambda *_: full_token_losses(model))
    assert planned("orpo", pairs) > LIMIT * supervised
