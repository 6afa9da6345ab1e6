"""A step planned by a few layers needs the memory of the step planned with all of them."""

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.ops.recomputation import Checkpoints
from deltatune.options.config import TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.few_layers import few_layers
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape
from deltatune.train.setup import prepare

pytestmark = pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
LAYERS = 12
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 128, "intermediate_size": 256}
EVERY = Checkpoints(range(LAYERS))
# The family, the options, the recomputed layers.
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
    few, layout, paths = few_layers(model, checkpoints), ArrayLayout.measured(), list(map(id, model.layers))
    assert len(few.chosen) <= 8
    active = mx.get_active_memory()
    whole, planned = (
        forecast_step(model, config, BatchShape(1, 192), layout, checkpoints, few=layers) for layers in (None, few)
    )
    assert list(map(id, model.layers)) == paths
    assert mx.get_active_memory() - active < 1 << 16, "nothing is computed"
    # MLX's order differs a little from layer to layer, by arrays that are a hundredth of a small model's memory.
    assert planned.bytes.amount == pytest.approx(whole.bytes.amount, rel=0.015)
    assert planned.buffers.amount == pytest.approx(whole.buffers.amount, rel=0.01)
    assert (planned.counts, planned.sizes) == (whole.counts, whole.sizes)
