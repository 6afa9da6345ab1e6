"""Tests the plan of a step by layers beside MLX's counts of small runs."""

import contextlib
import dataclasses
import gc
import json
import re

import mlx.core as mx
import pytest

from counted_programs import PLANNED_WITHIN
from deltatune import finetune
from deltatune.answering.session import store_of
from deltatune.machine import backend
from deltatune.models import generate
from deltatune.models.load import load
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.options.generation import AnswerOptions
from deltatune.plan import forward_placement, placement, simulate
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step, products
from deltatune.plan.traced_step import BatchShape, blank_batch, trace_step
from deltatune.train.evaluation.inference import Prompt
from deltatune.train.setup import prepare, ready
from layer_runs import by_layers, loaded, options

TOKENS = 128
SHAPES = {
    "dense": ("qwen3_5", {"intermediate_size": 512}, None),
    "a mixture": ("qwen3_5_moe", {}, None),
    "4 bits": ("qwen3_5", {"intermediate_size": 512}, {"bits": 4}),
}


def test_queued_results_end_with_a_layer(tiny_model, monkeypatch):
    """A queue as long as an NVIDIA GPU's holds the results of several layers of a whole step."""
    monkeypatch.setitem(simulate.PACES, "cpu", simulate.PACES["cuda"])
    model = tiny_model("qwen3_5", num_hidden_layers=12, full_attention_interval=3)
    config = TrainConfig(grad_checkpoint=True, lora_parameters=LoraConfig(rank=4))
    prepare(model, config)
    shape, layout = BatchShape(1, 128), ArrayLayout.measured()
    whole, by_layers = (forecast_step(model, config, shape, layout, layer_inputs=inputs) for inputs in (None, "memory"))
    assert by_layers.sizes == whole.sizes
    built = trace_step(model, config, shape, layout)
    assert by_layers.products == products([node for phase in built.phases for node in phase.order])
    assert by_layers.bytes.amount < 0.8 * whole.bytes.amount
    assert re.match("the (forward|backward) pass, near ", by_layers.bytes.where)


@pytest.mark.parametrize("asked", ["a prompt", pytest.param("tasks", marks=pytest.mark.weekly)])
def test_passes_that_answer_are_planned_by_layers(tiny_checkpoint, monkeypatch, asked):
    """Where all fits, they are planned as they are computed, as a whole, and hold the queue's arrays."""
    monkeypatch.setitem(simulate.PACES, "cpu", simulate.PACES["cuda"])
    folder = tiny_checkpoint("qwen3_5", num_hidden_layers=12, full_attention_interval=3)

    def planned(memory):
        loaded = load(folder, lazy=True)
        weights = loaded.model, store_of(loaded, AnswerOptions(str(loaded.path))), memory
        if asked == "tasks":
            return forward_placement.placed_tasks(*weights, 2, 64)
        return forward_placement.placed_answer(*weights, Prompt([0] * 64), 8)

    active = mx.get_active_memory()
    whole = planned(1 << 40)
    by_layers = planned(whole.peak - 1)
    assert (len(whole.streamed), len(by_layers.streamed)) == (0, 1)
    assert by_layers.peak < 0.8 * whole.peak
    monkeypatch.setattr(forward_placement, "brake", lambda size: int(0.95 * size))
    waiting = planned(whole.peak - 1)
    assert (len(waiting.streamed), waiting.memory) == (0, whole.peak - 1)
    assert waiting.peak <= whole.peak - 1, "it waits for what is queued before it holds more"
    # Nothing was read.
    assert mx.get_active_memory() - active < 1 << 16


@pytest.mark.skipif(backend.device() != "cpu", reason="a GPU's queue does not wait for each operation")
@pytest.mark.usefixtures("waiting_queue", "all_on_disk")
@pytest.mark.weekly
@pytest.mark.parametrize(("tokens", "most"), [(8193, 4), (7000, 4), (4097, 2000)])
def test_a_long_prompt_takes_its_planned_memory(tiny_checkpoint, tokens, most):
    """Its later pieces attend to all keys before them. Measured on two cores: 0.98 to 1.00; planned for one: 1.9 up."""
    shape = {"num_hidden_layers": 4, "full_attention_interval": 2, "intermediate_size": 512}
    loaded = load(tiny_checkpoint("qwen3_5", **shape), lazy=True)
    prompt = Prompt([5] * tokens)
    weights = store_of(loaded, AnswerOptions(str(loaded.path)))
    placed = forward_placement.placed_answer(loaded.model, weights, 1000, prompt, most)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    with contextlib.closing(placed.of(loaded.model)) as read, read.calls().watched():
        mx.reset_peak_memory()
        # The end of an answer has its largest caches: all of it is planned, and little of it need be computed.
        for _ in generate.stream(loaded, list(prompt.tokens), min(most, 4), generate.Sampling()):
            pass
        counted = mx.get_peak_memory() - before
    assert 0.94 * placed.bytes < counted < 1.03 * placed.bytes


def test_a_long_prompt_is_planned_without_the_pieces_between(tiny_checkpoint, monkeypatch):
    """With all of them it takes as much, and longer."""
    model = load(tiny_checkpoint("qwen3_5"), lazy=True).model

    def found():
        evaluations = list(generate.begun(model, 20 * 64 + 9, piece=64, most=300))
        return len(evaluations), [array.shape for array in evaluations[-1]]

    blank = found()
    monkeypatch.setattr(generate, "_MOVED", ())
    every = found()
    # The first piece, a move, the last two, the last token, and a move and a token for the answer's end.
    assert (blank[0], every[0]) == (7, 24)
    assert blank[1] == every[1]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A folder with two rows of more than TOKENS tokens."""
    folder = tmp_path_factory.mktemp("rows")
    row = json.dumps({"text": "a fox and a dog " * TOKENS})
    (folder / "train.jsonl").write_text(f"{row}\n{row}\n")
    return folder


@pytest.fixture
def all_on_disk(monkeypatch):
    """Leaves all layers on the disk, whatever is planned."""
    monkeypatch.setattr(placement, "left_on_disk", lambda _, sizes, *__, **___: tuple(range(len(sizes))))


@pytest.mark.skipif(backend.device() != "cpu", reason="a GPU's queue does not wait for each operation")
@pytest.mark.usefixtures("waiting_queue", "all_on_disk")
@pytest.mark.parametrize(
    "name", ["dense", *(pytest.param(name, marks=pytest.mark.weekly) for name in ("a mixture", "4 bits"))]
)
def test_a_run_takes_its_planned_memory(tiny_checkpoint, rows, tmp_path, monkeypatch, name):
    """Measured on two cores: 0.98 to 1.03. MLX frees the inputs of an operation late, which are 5 % at most here.

    On a busy machine its thread may free those of several operations late, so the lowest of up to three runs counts.
    """
    family, shape, quantize = SHAPES[name]
    model = tiny_checkpoint(family, quantize=quantize, num_hidden_layers=3, full_attention_interval=2, **shape)
    config = TrainConfig(
        model=str(model), data=str(rows), adapter_path=str(tmp_path / "out"), iters=2, batch_size=1,
        max_seq_length=TOKENS, val_batches=0, grad_checkpoint=True, memory=1000,
        lora_parameters=LoraConfig(rank=4),
    )  # fmt: skip
    planned = placement.placed(ready(config, lazy=True))[0].bytes
    peaks = []
    with monkeypatch.context() as patches:
        # A run would let MLX hold what is planned before it waits.
        patches.setattr(mx, "set_memory_limit", lambda limit: limit)
        while len(peaks) < 3 and not any(peak < PLANNED_WITHIN * planned for peak in peaks):
            gc.collect()
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            finetune(dataclasses.replace(config, memory=planned, overwrite=True))
            peaks.append(mx.get_peak_memory() - before)
    assert 0.9 * planned < min(peaks) < PLANNED_WITHIN * planned


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
