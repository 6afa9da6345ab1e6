"""A step planned by a few layers needs the memory of the step planned with all of them."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.models.vision.inputs import ImageShapes
from deltatune.ops import cross_entropy, layer_cut
from deltatune.ops.attention import blocked
from deltatune.ops.experts import block
from deltatune.ops.gated_delta import chunk
from deltatune.ops.recomputation import Checkpoints
from deltatune.options.config import TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.few_layers import ModelLayers
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape
from deltatune.train.setup import prepare
from families import FAMILIES

pytestmark = pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
LAYERS = 12
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 128, "intermediate_size": 256}
EVERY = Checkpoints(range(LAYERS))
RUNS = {
    "checkpointed": ("qwen3_5", {"grad_checkpoint": True}, EVERY),
    "some checkpointed": ("qwen3_5", {"grad_checkpoint": True}, Checkpoints([0, 1, 2, 4])),
    "packed, the last layers": ("qwen3_5", {"pack": True, "num_layers": 4}, Checkpoints()),
    "all weights": ("qwen3_5", {"fine_tune_type": "full"}, Checkpoints()),
    "mixture": ("qwen3_5_moe", {}, Checkpoints()),
    "attention alone": ("qwen3", {}, Checkpoints()),
}
OFTEN = ("checkpointed", "packed, the last layers", "attention alone")
WEEKLY = [pytest.param(name, marks=pytest.mark.weekly) for name in RUNS if name not in OFTEN]


@pytest.mark.parametrize("name", [*OFTEN, *WEEKLY])
def test_a_step_of_all_layers_is_computed_from_a_few(tiny_model, name):
    family, options, checkpoints = RUNS[name]
    model, config = tiny_model(family, **SIZES), TrainConfig(**{"num_layers": -1} | options)
    prepare(model, config)
    few, layout, paths = ModelLayers(model).few(checkpoints), ArrayLayout.measured(), list(map(id, model.layers))
    assert len(few.chosen) <= 8
    every = few.every._replace(shortened=False)
    active = mx.get_active_memory()
    # Of fewer rows the update takes the most, which joins the small arrays of all layers.
    whole, planned = (forecast_step(model, config, BatchShape(4, 128), layout, layers) for layers in (every, few))
    assert list(map(id, model.layers)) == paths
    assert mx.get_active_memory() - active < 1 << 16, "nothing is computed"
    # MLX's order differs from layer to layer by a few arrays, a hundredth of the memory of so small a model.
    assert planned.bytes.amount == pytest.approx(whole.bytes.amount, rel=0.015)
    assert planned.buffers.amount == pytest.approx(whole.buffers.amount, rel=0.01)
    assert (planned.counts, planned.sizes) == (whole.counts, whole.sizes)


@pytest.mark.parametrize(
    ("family", "chosen"),
    [("qwen3_5", [0, 1, 2, 3, 4, 7]), ("olmo_hybrid", range(8)), ("gemma3_text", range(6)), ("kimi_k3", range(LAYERS))],
)
def test_the_chosen_layers_are_called_as_among_all(tiny_model, family, chosen):
    """OLMo finds its masks by positions, Gemma's alternate, and Kimi-K3 counts its layers by its options."""
    model = tiny_model(family, num_hidden_layers=LAYERS)
    assert ModelLayers(model).few(Checkpoints()).chosen == [*chosen]


@pytest.mark.parametrize(
    ("family", "recomputed"),
    [("qwen3_5", True), pytest.param("qwen3_vl", False, marks=pytest.mark.weekly), ("qwen3_vl", True)],
)
def test_a_step_with_images_is_computed_from_a_few(tiny_vision_model, family, recomputed):
    """Qwen3-VL's images enter its first layers, too; the tower alone needs the most where layers are recomputed."""
    model, config = tiny_vision_model(family, num_hidden_layers=LAYERS), TrainConfig(grad_checkpoint=recomputed)
    prepare(model, config)
    few, layout = ModelLayers(model).few(EVERY if recomputed else Checkpoints()), ArrayLayout.measured()
    assert len(few.chosen) <= 8
    shape = BatchShape(1, 192, ImageShapes(3, 640))
    whole, planned = (
        forecast_step(model, config, shape, layout, layers) for layers in (few.every._replace(shortened=False), few)
    )
    assert planned.bytes.amount == pytest.approx(whole.bytes.amount, rel=0.01)
    assert planned.buffers.amount == pytest.approx(whole.buffers.amount, rel=0.01)
    assert planned.bytes.where == whole.bytes.where


LONG = {
    "kept": ("qwen3_5", {}),
    "kept in 16 bits": ("qwen3_5", {}),
    "in pieces": ("qwen3_5", {"grad_checkpoint": True}),
    "attention in pieces": ("qwen3", {"grad_checkpoint": True}),
    "mixture": ("qwen3_5_moe", {"fine_tune_type": "full"}),
    "preferences": ("qwen3", {"loss": "orpo"}),
}


@pytest.mark.usefixtures("waiting_queue")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.weekly) if name == "kept" else name for name in LONG]
)
def test_a_long_row_is_traced_without_most_turns_of_its_loops(tiny_model, monkeypatch, name):
    """Small blocks, chunks and pieces, of which a row of 512 tokens has as many as real sizes have of a long one.

    MLX's queue would hold several pieces of so small a model.
    """
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 1)
    monkeypatch.setattr(cross_entropy, "FEWEST_TOKENS", 32)
    monkeypatch.setitem(blocked._SCORES, "cpu", 1)
    monkeypatch.setitem(layer_cut.PIECE_BYTES, "cpu", 64 * 4 * SIZES["hidden_size"])
    monkeypatch.setattr(block, "CPU_CHUNK_BYTES", 1)
    monkeypatch.setitem(chunk._GROUP_ELEMENTS, "cpu", 1)
    monkeypatch.setenv("DELTATUNE_ATTENTION", "blocked")
    family, options = LONG[name]
    # Of attention in pieces, the first layers are traced by their last pieces alone.
    layers = 4 if name == "attention in pieces" else 2
    model = tiny_model(family, **SIZES | {"num_hidden_layers": layers, "full_attention_interval": 2})
    if "16 bits" in name:
        model.set_dtype(mx.bfloat16)
    config = TrainConfig(num_layers=-1, **options)
    prepare(model, config)
    few, layout = (
        ModelLayers(model).few(Checkpoints(range(layers) if config.grad_checkpoint else ())),
        ArrayLayout.measured(),
    )
    shape = BatchShape(1 + (config.loss == "orpo"), 512, preferences=int(config.loss == "orpo"))
    whole, planned = (
        forecast_step(model, config, shape, layout, few._replace(shortened=shortened)) for shortened in (False, True)
    )
    assert planned.bytes.amount == pytest.approx(whole.bytes.amount, rel=0.01)
    assert planned.sizes == whole.sizes


LARGE = FAMILIES["qwen3"] | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
# A process of its own, which prints the parameters' bytes, the planned bytes and the most memory that it had.
PLANNED = """
import json, resource, sys
from deltatune.models.load import new_model
from deltatune.options.config import TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape
from deltatune.train.setup import prepare

model, config = new_model(json.loads(sys.argv[1]), lazy=True), TrainConfig(from_scratch=True)
prepare(model, config)
plan = forecast_step(model, config, BatchShape(1, 32), ArrayLayout.measured())
taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.platform == "linux":
    # There ru_maxrss begins with that of the process that started this one.
    taken = 1024 * int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
print(json.dumps([plan.sizes["parameters"], plan.bytes.amount, taken]))
"""


def test_a_plan_of_a_large_model_from_scratch_takes_little_memory():
    child = subprocess.run([sys.executable, "-c", PLANNED, json.dumps(LARGE)], check=True, capture_output=True)
    parameters, planned, taken = json.loads(child.stdout.splitlines()[-1])
    assert parameters > 7e9 * 4
    assert planned > 4 * parameters
    assert taken < 1e9
