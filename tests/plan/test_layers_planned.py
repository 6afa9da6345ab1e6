"""Tests the plan of a step by layers; benchmarks/layers_planned.py compares such plans with what MLX counts."""

import dataclasses
import re

from deltatune.options.config import TrainConfig
from deltatune.plan import simulate
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape
from deltatune.train.setup import prepare


def test_what_a_queue_holds_ends_with_a_layer(tiny_model, monkeypatch):
    """A queue as long as an NVIDIA GPU's holds what several layers of a whole step have computed."""
    monkeypatch.setitem(simulate.PACES, "cpu", simulate.PACES["cuda"])
    model = tiny_model("qwen3_5", num_hidden_layers=12, full_attention_interval=3)
    config = TrainConfig(num_layers=-1, grad_checkpoint=True)
    prepare(model, config)
    shape, layout = BatchShape(1, 128), ArrayLayout.measured()
    whole, by_layers = (
        forecast_step(model, dataclasses.replace(config, memory=memory), shape, layout) for memory in (None, 1)
    )
    assert by_layers.sizes == whole.sizes
    assert by_layers.products == whole.products
    assert by_layers.bytes.amount < 0.8 * whole.bytes.amount
    assert re.match("the (forward|backward) pass, near ", by_layers.bytes.where)
