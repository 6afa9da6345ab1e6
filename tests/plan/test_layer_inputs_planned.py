"""Tests the plan of a step by layers that keeps the inputs of layers in files."""

import gc

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape, blank_batch
from layer_runs import by_layers, loaded, options

LAYERS = 10


@pytest.mark.skipif(backend.device() != "cpu", reason="other devices hold arrays for as long as their queue is")
@pytest.mark.usefixtures("waiting_queue")
def test_the_plan_offloads_as_many_bytes_as_a_step(tiny_checkpoint, tmp_path):
    """Of the inputs, two are in memory at a time."""
    folder = tiny_checkpoint("qwen3_5", num_hidden_layers=LAYERS, full_attention_interval=LAYERS, hidden_size=128)
    config, given = options(folder, memory=1000), blank_batch(2, 256, False)
    planned, counted = [], []
    for place, inputs in (("memory", None), ("disk", tmp_path / "inputs")):
        model, stored = loaded(folder, config)
        stored.close()
        plan = forecast_step(model, config, BatchShape(2, 256), ArrayLayout.measured(), layer_inputs=place)
        assert plan.layer_inputs == LAYERS * 2 * 256 * 128 * 4
        planned.append(plan.bytes.amount)
        del model, stored
        gc.collect()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        by_layers(folder, config, given, streamed=[], inputs=inputs)
        counted.append(mx.get_peak_memory() - before)
    # Files are read beside what computes: one input more or less is held when it reads, and one when it lets go.
    saved, really, one = planned[0] - planned[1], counted[0] - counted[1], plan.layer_inputs // LAYERS
    assert abs(saved - really) < 2.1 * one
    assert saved > 0.6 * plan.layer_inputs
