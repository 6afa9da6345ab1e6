"""The memory of a checkpointed step grows with the length by its saved tensors, as planned and as counted."""

import gc

import mlx.core as mx
import numpy as np
import pytest

from counted_programs import peak_of_step
from deltatune.machine import backend
from deltatune.ops import checkpoint, cross_entropy, layer_cut
from deltatune.ops.attention import blocked
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape, blank_batch
from deltatune.train.distributed import World
from deltatune.train.setup import prepare, training
from deltatune.train.step import Step
from deltatune.train.updates.optimizer import build_optimizer

pytestmark = pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
LAYERS, HIDDEN = 2, 256
# Bytes of one activation of the layers' width, for a token.
ACTIVATION = 4 * HIDDEN
LENGTHS = (256, 384)


@pytest.fixture
def model_and_config(tiny_model, monkeypatch):
    """A model with rows cut into pieces of 128 tokens, for the loss too, and with attention of 32 queries at a time."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 1)
    monkeypatch.setitem(blocked._SCORES, "cpu", 1)
    monkeypatch.setitem(layer_cut.PIECE_BYTES, "cpu", 128 * ACTIVATION)
    monkeypatch.setenv("DELTATUNE_ATTENTION", "blocked")
    gc.collect()
    before = mx.get_active_memory()
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN}
    model = tiny_model("qwen3_5", full_attention_interval=LAYERS, **sizes)
    config = TrainConfig(grad_checkpoint=True, lora_parameters=LoraConfig(rank=4))
    prepare(model, config)
    mx.eval(model.parameters())
    return model, config, before


def counted(model, config, before, length):
    with training(model, config, compare=False) as trained:
        model.train()
        step = Step(model, build_optimizer(config), trained.loss, World())
        return peak_of_step(step, blank_batch(1, length, False), before)


def slope(peaks):
    """Activations of the layers' width that a further token takes."""
    return float(np.diff(peaks)[0]) / np.diff(LENGTHS)[0] / ACTIVATION


@pytest.mark.usefixtures("waiting_queue")
def test_a_token_takes_an_activation_a_layer_and_three(model_and_config):
    model, config, before = model_and_config
    layout = ArrayLayout.measured()
    planned = [forecast_step(model, config, BatchShape(1, length), layout).bytes.amount for length in LENGTHS]
    peaks = [counted(model, config, before, length) for length in LENGTHS]
    print(planned, peaks, slope(planned), slope(peaks))
    # Beyond what each layer keeps, a layer's cotangent, and its gradient in pieces and as a whole. Attention's keys and
    # values are half as wide here: they are held twice, and their gradients once in fp32.
    assert slope(planned) < LAYERS + 3 + 2
    assert planned == pytest.approx(peaks, rel=0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "layer_cut", lambda _: None)
        # The plan, because what the counted step of whole rows frees in time varies by a fifth from run to run.
        whole = [forecast_step(model, config, BatchShape(1, length), layout).bytes.amount for length in LENGTHS]
        assert slope(whole) > 3 * slope(planned)
