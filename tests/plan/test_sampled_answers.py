"""The plan of a run that samples its answers holds for the sampling, too."""

import gc
from dataclasses import replace

import mlx.core as mx
import numpy as np

from deltatune.data.batches.order import AnsweredOrder
from deltatune.data.example import Example
from deltatune.data.vision.media import Pictures
from deltatune.lora import convert_to_lora
from deltatune.models.batch_decoder import BatchDecoder
from deltatune.models.generate import SampledPolicy
from deltatune.models.vision.inputs import token_positions
from deltatune.models.vision.split import vision_spec
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches import patched
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.fit import with_sampling
from deltatune.plan.forecast import Forecast, Moment, forecast_step
from deltatune.plan.traced_step import BatchShape
from deltatune.train.rollouts.answer_sampler import PictureSampler

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
    # Read once, a prompt of almost the whole length is copied to every row.
    prompts = [[3, 5, 8] * (LENGTH // 3 - 1)] * ROWS
    mx.clear_cache()
    mx.reset_peak_memory()
    with patched():
        engine = BatchDecoder(model, ROWS, (), 3, room=LENGTH + 2, trains=True)
        engine.answers(prompts, SampledPolicy(0.7, top_p=0.9).sampler(mx.random.key(0)))
    assert 0.8 * plan.bytes.amount < mx.get_peak_memory() - before <= plan.bytes.amount
    # Where a step needs more than sampling, the plan is that of the step.
    assert with_sampling(step, model, TrainConfig(**options)) is step


def test_sampling_answers_to_pictures_stays_within_its_plan(tiny_vision_model):
    """Those to one prompt are sampled at a time."""
    gc.collect()
    before = mx.get_active_memory()
    model = tiny_vision_model("qwen3_5").eval()
    convert_to_lora(model, LoraConfig(rank=2, scale=10.0), num_layers=-1)
    mx.eval(model.parameters())
    rows, length = 64, 384
    config = TrainConfig(loss="grpo", num_generations=rows, max_seq_length=length, max_completion_length=64)
    sizes = {"parameters": mx.get_active_memory() - before, "moments": 0}
    plan = with_sampling(Forecast(rows, length, 2, Moment(0, ""), Moment(0, ""), sizes=sizes), model, config)
    assert plan.bytes.where.startswith("sampling 64 answers")
    tokens = np.array([3, 11, 8] * (length // 3 - 1), np.int32)
    spec = vision_spec(model)
    pictures = Pictures((), (), (), token_positions(tokens, [], spec), spec, None)
    prompt = Example(tokens, np.zeros(len(tokens), bool), "a test", pictures)
    mx.clear_cache()
    mx.reset_peak_memory()
    with patched():
        choose = SampledPolicy(0.7).sampler(mx.random.key(0))
        PictureSampler(model, (), 3).answers([prompt], rows, choose, lambda: None)
    assert mx.get_peak_memory() - before <= plan.bytes.amount


def test_distillation_plans_the_answers_of_its_share(tiny_model):
    model = tiny_model("qwen3_5").eval()
    convert_to_lora(model, LoraConfig(rank=2, scale=10.0), num_layers=-1)
    config = TrainConfig(loss="distill", teacher="t", max_completion_length=64, grad_accumulation_steps=128)
    # The teacher's memory is not looked at here.
    step = forecast_step(model, TrainConfig(), BatchShape(1, 64), ArrayLayout.measured())
    step = replace(step, length=LENGTH)
    plan = with_sampling(step, model, config)
    assert plan.bytes.where.startswith("sampling 128 answers")
    assert with_sampling(step, model, replace(config, lmbda=0.0, max_completion_length=512)) is step
    # Of packed rows, each document is answered, and none is longer than the longest prompt with its answer.
    packed = replace(config, pack=True, grad_accumulation_steps=32)
    row = Example(np.ones(33, np.int32), np.arange(33) >= 22, "row")
    order = AnsweredOrder([row] * 8, 1, LENGTH, packed=True, answer=64)
    of_packed = with_sampling(step, model, packed, order)
    assert (order.slots, order.longest) == (8, 96)
    assert of_packed.bytes.where.startswith("sampling 128 answers")
    assert of_packed.bytes.amount < plan.bytes.amount / 2
