"""The plan of a run that samples its answers holds for the sampling, too."""

from __future__ import annotations

import gc
from dataclasses import replace

import mlx.core as mx

from deltatune.lora import convert_to_lora
from deltatune.models.batch_decoder import BatchDecoder
from deltatune.models.sampled_policy import SampledPolicy
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import patched
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.sampled_answers import with_sampling
from deltatune.plan.traced_step import BatchShape

ROWS, LENGTH = 128, 1024


def test_sampling_stays_within_its_plan(tiny_model):
    gc.collect()
    before = mx.get_active_memory()
    model = tiny_model("qwen3_5").eval()
    convert_to_lora(model, LoraConfig(rank=2, scale=10.0), num_layers=-1)
    options = {"loss": "grpo", "num_generations": 8, "max_seq_length": LENGTH, "max_completion_length": 64}
    config = TrainConfig(**options, grad_accumulation_steps=128)
    # Here the caches of all rows need more than a step of one, which this model's long rows would hide.
    step = replace(forecast_step(model, config, BatchShape(1, 64), ArrayLayout.measured()), length=LENGTH)
    plan = with_sampling(step, model, config)
    assert plan.bytes.where.startswith("sampling 128 answers")
    assert plan.bytes.amount > step.bytes.amount
    prompts = [[3, 5, 8]] * ROWS
    mx.clear_cache()
    mx.reset_peak_memory()
    with patched():
        engine = BatchDecoder(model, ROWS, (), 3, room=LENGTH + 2, trains=True)
        engine.answers(prompts, SampledPolicy(0.7, top_p=0.9).sampler(mx.random.key(0)))
    assert 0.5 * plan.bytes.amount < mx.get_peak_memory() - before <= plan.bytes.amount
    # Where a step needs more than sampling, the plan is that of the step.
    assert with_sampling(step, model, TrainConfig(**options)) is step
