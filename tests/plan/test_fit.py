import dataclasses
import gc
import re

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from deltatune.machine import backend
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan import device_limits as device_limits_module
from deltatune.plan import fit, primitives, screen
from deltatune.plan.array_layout import ArrayLayout, LayoutError
from deltatune.plan.device_limits import DeviceLimits, device_limits
from deltatune.plan.forecast import forecast_step
from deltatune.plan.graph import Node
from deltatune.plan.search import Largest
from deltatune.plan.traced_step import BatchShape
from deltatune.train.setup import prepare, ready


@pytest.fixture
def limited(monkeypatch):
    """limited(bytes, buffers): gives the device these limits."""
    return lambda size, buffers=None: monkeypatch.setattr(
        fit, "device_limits", lambda: DeviceLimits(buffers, size, "a test", "a test")
    )


def sizes(text):
    found = re.search(r"need ([\d.]+) MB", text)
    return float(found[1]) * 1e6


def test_a_plan_leaves_nothing_of_its_graph(tiny_model):
    model, config = tiny_model("qwen3_5"), TrainConfig()
    prepare(model, config)
    forecast_step(model, config, BatchShape(2, 32), ArrayLayout.measured())
    assert gc.isenabled()
    assert sum(type(thing) is Node for thing in gc.get_objects()) == 0


def test_plan_shows_the_peak_its_place_and_the_largest_values(run, options, limited, monkeypatch):
    limited(300_000_000)
    code, out, err = run("plan", *options)
    assert code == 0, err
    for pattern in (
        r"Step: 4 x 32 = 128 tokens, since no row of the data is longer, although max_seq_length is 64\.",
        r"Peak memory: [\d.]+ MB \(limit 300.0 MB: a test\), in the \w+",
        r"Peak live buffers: \d+ .*, in the \w+",
        r"parameters \d+, gradients \d+, moments \d+, all else \d+",
        r"^Fits: [\d.]+ MB of 300.0 MB\.\n",
        r"all else \d+\.\nLargest that fits, one at a time:\n",
        r"length: [^\n]*\d[\d,]*( or more)?\n  batch: [^\n]*\d[\d,]*( or more)?\n  rank: 64( or more)?\n",
    ):
        assert re.search(pattern, out), (pattern, out)
    assert "It fits" not in out, "the first line says it"


def test_memory_of_the_step_is_shown_before_larger_ones_are_planned(checkpoint, options, monkeypatch):
    said, known = [], []

    def searched(*_, **__):
        known.append(list(said))
        return Largest(7, more=False)

    monkeypatch.setattr(fit, "largest", searched)
    # Else arithmetic would tell the rank, with so much memory.
    monkeypatch.setattr(fit, "_bounds_of_ranks", lambda *_, **__: (0, 10**13))
    config = TrainConfig(model=str(checkpoint), data=str(options[3]), max_seq_length=32)
    limits = DeviceLimits(None, 10**12, "a test", "a test")
    found = fit.examine(config, limits, screen.PlanLines(said.append))
    assert known[0][0].startswith("Fits: ")
    assert known[0][1] == "Step: 4 x 32 = 128 tokens."
    assert "Peak memory" in known[0][2]
    before = len(known[0])
    assert known[0][-1] == "Largest that fits, one at a time:"
    first = "  length: 7"
    assert [lines[before:] for lines in known] == [[], [first], [first, first.replace("length", "batch")]]
    assert found.batch == found.length == found.rank == Largest(7, False)


def test_a_largest_value_is_said_as_it_is_known():
    said = {Largest(7, False): "7", Largest(7, True): "7 or more", Largest(0, False): "none"}
    assert {found: screen.largest("rank", found).text for found in said} == said


def test_a_plan_leaves_model_and_random_state_alone(tiny_model):
    model = tiny_model("qwen3_5_moe")
    config = TrainConfig(grad_checkpoint=True)
    prepare(model, config)
    mx.eval(model.parameters())
    before, key = dict(tree_flatten(model.parameters())), mx.random.state[0].tolist()
    next(reversed(model.modules())).eval()  # one module has another mode than the model
    kinds = [(type(module), module.training) for module in model.modules()]
    active = mx.get_active_memory()
    first, again = (forecast_step(model, config, BatchShape(2, 64), ArrayLayout.measured()) for _ in range(2))
    assert first == again
    after = dict(tree_flatten(model.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    assert mx.random.state[0].tolist() == key
    assert [(type(module), module.training) for module in model.modules()] == kinds
    assert mx.get_active_memory() - active < 1 << 16


def test_primitives_without_a_rule_are_counted_and_said(tiny_model, monkeypatch):
    layout, limits = ArrayLayout.measured(), DeviceLimits(None, None, "a test", "a test")
    model, config = tiny_model("qwen3_5_moe"), TrainConfig()
    prepare(model, config)
    known = forecast_step(model, config, BatchShape(2, 32), layout)
    assert known.unknown == {}
    assert screen.line(known, limits).endswith("it fits.")
    monkeypatch.delitem(primitives.RULES, "RandomBits", raising=True)
    monkeypatch.delitem(primitives.RULES, "Reduce")
    found = forecast_step(model, config, BatchShape(2, 32), layout)
    assert found.unknown.keys() == {"Reduce"}
    assert (found.bytes.amount, found.buffers.amount) == (known.bytes.amount, known.buffers.amount)
    said = rf"it fits\. The plan has no rule for {found.unknown['Reduce']} Reduce of this version of MLX, and"
    assert re.search(said, screen.line(found, limits))


@pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
def test_more_tokens_need_more_bytes_and_checkpoints_fewer(tiny_model):
    layout = ArrayLayout.measured()
    model, config = tiny_model("qwen3_5", num_hidden_layers=4), TrainConfig()
    prepare(model, config)
    shapes = (BatchShape(1, 64), BatchShape(1, 256), BatchShape(4, 64))
    plain, longer, wider = (forecast_step(model, config, shape, layout) for shape in shapes)
    assert plain.bytes.amount < min(longer.bytes.amount, wider.bytes.amount)
    config = dataclasses.replace(config, grad_checkpoint=True)
    checkpointed = forecast_step(model, config, BatchShape(4, 64), layout)
    assert checkpointed.bytes.amount < 0.8 * wider.bytes.amount
    assert checkpointed.beyond < wider.beyond


@pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grad_checkpoint": True},
        {"fine_tune_type": "dora", "grad_accumulation_steps": 2},
        {"optimizer": "adafactor"},
    ],
)
def test_plans_of_other_ranks_are_within_the_bounds_of_arithmetic(tiny_model, options):
    """In few tokens the update needs the most, and in many the layers do."""
    layout = ArrayLayout.measured()
    models = {rank: tiny_model("qwen3_5", num_hidden_layers=2, full_attention_interval=2) for rank in (1, 4, 64)}
    configs = {rank: TrainConfig(lora_parameters=LoraConfig(rank=rank), **options) for rank in models}
    for rank, model in models.items():
        prepare(model, configs[rank])
    for shape in (BatchShape(1, 16), BatchShape(2, 256)):
        plans = {rank: forecast_step(model, configs[rank], shape, layout) for rank, model in models.items()}
        least, most = fit._bounds_of_ranks(models[4], plans[4], 16, recomputed="grad_checkpoint" in options)
        assert least <= plans[1].bytes.amount < plans[64].bytes.amount <= most
        # They are no farther than this, so that they decide where memory is ample or much too little.
        assert most < 4 * plans[64].bytes.amount


def test_train_refuses_a_run_that_cannot_fit_and_names_one_that_does(run, options, limited, tmp_path):
    out = tmp_path / "adapters"
    arguments = ["train", *options, "--adapter-path", out, "--iters", 1]
    limited(10**12)
    code, said, err = run(*arguments)
    assert code == 0, err
    assert "it fits" in said
    need = sizes(said)
    limited(int(need * 0.7))
    code, said, err = run(*arguments)
    assert code == 2
    assert "does not fit" in err
    assert "Traceback" not in err
    mended = re.search(r"It fits with (--[\w-]+(?: and --[\w-]+)?)(?: (\d+))?\.", err)
    assert mended, err
    change = [*mended[1].replace(" and ", " ").split(), *([mended[2]] if mended[2] else [])]
    code, said, err = run(*arguments, *change)
    assert code == 0, err


@pytest.mark.skipif(backend.device() == "metal", reason="a Mac has little work queued")
def test_a_step_that_fits_with_less_queued_work_is_trained_so(run, options, limited, tmp_path, monkeypatch):
    """As on an NVIDIA GPU, where a plan without the wait for queued work would refuse the run."""
    arguments = ["train", *options, "--adapter-path", tmp_path / "adapters", "--iters", 1, "--grad-checkpoint"]
    limited(10**12)
    code, said, err = run(*arguments)
    assert code == 0, err
    need = sizes(said)
    limited(int(need * 0.93))
    assert run(*arguments)[0] == 2
    monkeypatch.setattr(device_limits_module, "brake", lambda size: int(0.9 * size))
    own, set_limits, plain = mx.set_memory_limit(2**40), [], mx.set_memory_limit
    plain(own)
    monkeypatch.setattr(mx, "set_memory_limit", lambda limit: set_limits.append(limit) or plain(limit))
    code, said, err = run(*arguments)
    assert code == 0, err
    assert re.search(r"it fits, with less work queued for the GPU, which may take a quarter longer\.", said)
    assert int(0.9 * int(need * 0.93)) in set_limits
    assert set_limits[-1] == own


def test_buffers_alone_can_be_too_many_and_force_trains_all_the_same(run, options, limited, tmp_path):
    limited(10**12, buffers=100)
    arguments = ["train", *options, "--adapter-path", tmp_path / "adapters", "--iters", 1]
    code, _, err = run(*arguments)
    assert code == 2
    assert "of 100 live buffers" in err
    assert "does not fit. No batch size or length makes it fit" in err
    # Weights on the disk have buffers when they are read.
    assert "--memory" not in err
    code, said, err = run(*arguments, "--force")
    assert code == 0, err
    assert "Training starts all the same" in said


@pytest.mark.parametrize(
    ("there", "named"), {12_369_000_000: "12.36GB", 2 * 10**12: "2000GB", 345_678_901: "345.67MB"}.items()
)
def test_a_refusal_names_no_more_memory_than_there_is(checkpoint, options, there, named):
    run = ready(TrainConfig(model=str(checkpoint), data=str(options[3]), max_seq_length=32), lazy=True)
    run.prepare()
    said = fit._from_disk(fit.Planner(run, ArrayLayout.measured()), DeviceLimits(None, there, "a test", "a test"))
    assert f"it fits with --memory {named}, which" in said
    assert 0.99 * there < float(named[:-2]) * {"GB": 1e9, "MB": 1e6}[named[-2:]] <= there


def test_an_mlx_that_cannot_be_looked_into_still_trains(run, options, monkeypatch, tmp_path):
    def unknown():
        raise LayoutError("the inputs of an array were not found")

    monkeypatch.setattr(fit.ArrayLayout, "measured", unknown)
    code, out, err = run("train", *options, "--adapter-path", tmp_path / "adapters", "--iters", 1)
    assert code == 0, err
    assert "Plan: none" in out
    assert "were not found" in out
    code, _, err = run("plan", *options)
    assert code == 2
    assert "were not found" in err


def test_this_machine_has_a_limit():
    limits = device_limits()
    assert limits.bytes
    assert limits.bytes > 1e8
