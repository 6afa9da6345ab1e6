"""`--grad-checkpoint auto` checkpoints as few layers as the memory allows, and a continued run checkpoints the same."""

import dataclasses
import gc
import re

import mlx.core as mx
import pytest

from deltatune import patches
from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.ops.recomputation import Checkpoints
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.patches.tables import delta_layers, pointwise
from deltatune.plan import fit
from deltatune.plan.array_layout import ArrayLayout, LayoutError
from deltatune.plan.checkpoints import SHARE, Order, choose, order_of
from deltatune.plan.device_limits import DeviceLimits
from deltatune.plan.forecast import Forecast, Moment, forecast_step
from deltatune.plan.search import Largest
from deltatune.plan.traced_step import BatchShape, blank_batch
from deltatune.train.distributed import World
from deltatune.train.saved import state
from deltatune.train.setup import prepare, training
from deltatune.train.step import Step
from deltatune.train.tree import leaves
from deltatune.train.updates.optimizer import build_optimizer

on_cpu = pytest.mark.skipif(backend.device() != "cpu", reason="plans follow MLX's CPU code (docs/how/memory.md)")
LAYERS, HIDDEN, LENGTH = 3, 128, 192


def limits(size, buffers=None):
    return DeviceLimits(buffers, None if size is None else int(size), "a test", "a test")


def forecast(size, buffers):
    return Forecast(1, 1, 1, Moment(int(buffers), ""), Moment(int(size), ""))


CURVES = {
    "a straight line": lambda kept: 100 + 50 * kept,
    "attention, then recurrent layers": lambda kept: 100 + 10 * min(kept, 6) + 40 * max(kept - 6, 0),
    "a plateau": lambda kept: max(300, 100 + 30 * kept),
    "layers of two sizes in turn": lambda kept: 100 + 50 * kept + 20 * (kept % 2),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("by", ["bytes", "buffers"])
def test_the_fewest_layers_with_few_plans(curve, by):
    order, peak = Order([0], [*range(1, 25)]), CURVES[curve]

    def needed(kept, operators):
        size = peak(kept) + (0 if operators or not kept else 100)
        return forecast(size, 1) if by == "bytes" else forecast(1, size)

    for limit in range(50, 1500, 37):
        tried = []

        def attempt(checkpoints, tried=tried):
            assert checkpoints.layers[0] == 0
            tried.append((25 - len(checkpoints.layers), checkpoints.operators))
            return needed(*tried[-1])

        choice = choose(attempt, order, limits(limit / SHARE + 1) if by == "bytes" else limits(None, limit))
        kept, operators = choice.of - choice.again, choice.checkpoints.operators
        assert len(set(tried)) == len(tried)
        assert choice.forecast == needed(kept, operators)
        if peak(24) + 100 <= limit:
            assert (kept, operators, tried) == (24, False, [(24, False)])
            continue
        assert tried[:2] == [(24, False), (24, True)]
        assert len(tried) <= 9
        best = max((number for number in range(25) if peak(number) <= limit), default=0)
        # After all these plans the largest number that fits is taken, which may be short of the best.
        assert kept == best or (len(tried) >= 8 and best - 3 <= kept < best), (limit, tried)
        # Operators are recomputed only where as many layers do not fit without.
        assert operators == (kept > 0 and peak(kept) + 100 > limit)


def test_layers_alone_where_operators_need_more():
    order, tried = Order([], [*range(24)]), []

    def attempt(checkpoints):
        again = len(checkpoints.layers)
        tried.append((again, checkpoints.operators))
        # All layers kept need less with the operators, but a few kept need more.
        return forecast(100 + (50 * (24 - again) if not checkpoints.operators else (700 if again < 24 else 0)), 1)

    choice = choose(attempt, order, limits(500 / SHARE + 1))
    assert choice.checkpoints == Checkpoints([*range(16)], operators=False)
    assert len(tried) <= 12


def test_no_operators_where_they_do_not_pay():
    tried = []

    def attempt(checkpoints):
        tried.append(checkpoints.operators)
        return forecast(100 + 50 * (24 - len(checkpoints.layers)), 1)

    choice = choose(attempt, Order([], [*range(24)]), limits(500 / SHARE + 1), operators=False)
    assert choice.checkpoints == Checkpoints([*range(16)], operators=False)
    assert not any(tried)


def test_attention_is_checkpointed_last_and_frozen_layers_always(tiny_model):
    model = tiny_model("qwen3_5", num_hidden_layers=6, full_attention_interval=3)
    prepare(model, TrainConfig())
    assert order_of(model) == Order([], [0, 1, 3, 4, 2, 5])
    assert order_of(model).first(3, operators=True) == Checkpoints([0, 1, 3], operators=True)
    assert order_of(model).first(0, operators=False) == Checkpoints([], operators=False)
    assert order_of(model).first(6, operators=False) == Checkpoints([*range(6)], operators=False)
    model = tiny_model("qwen3_5", num_hidden_layers=6, full_attention_interval=3)
    prepare(model, TrainConfig(num_layers=3))
    assert order_of(model) == Order([0, 1, 2], [3, 4, 5])
    assert order_of(model).first(0, operators=False) == Checkpoints([0, 1, 2], operators=False)
    assert order_of(model).first(1, operators=True) == Checkpoints([0, 1, 2, 3], operators=True)
    assert order_of(model).count(Checkpoints([0, 1, 2, 3])) == 1
    # A gradient of the embedding passes all layers.
    model.language_model.model.embed_tokens.unfreeze()
    assert order_of(model) == Order([], [0, 1, 3, 4, 2, 5])


def counted(model, config, before, checkpoints):
    """The peak of the second step by MLX's own count."""
    with training(model, config, compare=False, checkpoints=checkpoints) as trained:
        model.train()
        optimizer = build_optimizer(config)
        step, batch = Step(model, optimizer, trained.loss, World()), blank_batch(1, LENGTH, False)
        for _ in range(2):
            mx.reset_peak_memory()
            loss, weight, gradients, _ = step.micro_batch(batch, step.zeros())
            mx.eval(loss, weight, gradients)
            norm = step.update(gradients, loss, weight)
            del gradients
            mx.eval(model.trainable_parameters(), optimizer.state, norm)
        return mx.get_peak_memory() - before


@on_cpu
@pytest.mark.usefixtures("waiting_queue")
def test_the_counted_peak_stays_within_the_limit_and_one_layer_fewer_would_not(tiny_model):
    gc.collect()
    before = mx.get_active_memory()
    model = tiny_model("qwen3_5", num_hidden_layers=LAYERS, full_attention_interval=3, hidden_size=HIDDEN)
    config = TrainConfig(grad_checkpoint="auto", lora_parameters=LoraConfig(rank=4))
    prepare(model, config)
    mx.eval(model.parameters())
    layout, order = ArrayLayout.measured(), order_of(model)

    made = {}

    def attempt(checkpoints):
        key = tuple(checkpoints.layers), checkpoints.operators
        if key not in made:
            made[key] = forecast_step(model, config, BatchShape(1, LENGTH), layout, checkpoints=checkpoints)
        return made[key]

    least, most = (attempt(order.first(layers, operators=True)).bytes.amount for layers in (LAYERS, 0))
    limit = (least + most) / 2
    choice = choose(attempt, order, limits(limit / SHARE))
    kept = choice.of - choice.again
    assert 0 < kept < LAYERS
    fewer = order.first(choice.again - 1, operators=choice.checkpoints.operators)
    peak, over = (counted(model, config, before, checkpoints) for checkpoints in (choice.checkpoints, fewer))
    print(kept, f"limit {limit / 1e6:.2f} MB", f"counted {peak / 1e6:.2f}, one more kept {over / 1e6:.2f}")
    # The share that is left free is for what a plan does not know.
    assert peak <= limit / SHARE
    assert over > limit
    assert choice.forecast.bytes.amount == pytest.approx(peak, rel=0.05)


# NVIDIA's but for the kernels, which are for larger arrays.
@pytest.mark.parametrize(
    "tables",
    [
        (*delta_layers.PATCHES, *pointwise.ACTIVATIONS, pointwise.NORM, pointwise.ATTENTION),
        (*pointwise.ACTIVATIONS, *pointwise.PATCHES),
    ],
    ids=["Apple's", "NVIDIA's"],
)
def test_cheap_operators_computed_again_change_no_bit(tables, tiny_model, monkeypatch):
    model = tiny_model("qwen3_5", num_hidden_layers=LAYERS, full_attention_interval=3)
    config = TrainConfig(grad_checkpoint="auto", lora_parameters=LoraConfig(rank=4))
    prepare(model, config)
    again, read = [], recomputation.Input.again

    def watched(given, primals, cotangents):
        again.append(given.compute is not None)
        return read(given, primals, cotangents)

    monkeypatch.setattr(recomputation.Input, "again", watched)
    monkeypatch.setattr(recomputation, "LEAST", 1)
    monkeypatch.setattr(patches, "_of_device", lambda: tables)

    def results(operators):
        checkpoints = order_of(model).first(1, operators=operators)
        again.clear()
        with training(model, config, compare=False, checkpoints=checkpoints) as trained:
            model.train()
            step = Step(model, build_optimizer(config), trained.loss, World())
            loss, _, gradients, _ = step.micro_batch(blank_batch(2, LENGTH, False), step.zeros())
            mx.eval(loss, gradients)
        return [loss, *(array for _, array in leaves(gradients))]

    wanted = results(False)
    assert not any(again)
    found = results(True)
    # At least the activations of the two layers that are not recomputed as a whole.
    assert sum(again) >= 2
    assert all(mx.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_state_holds_its_checkpoints():
    progress = state.Progress()
    assert progress.checkpoints is None
    progress.checkpoints = Checkpoints([1, 2], operators=True)
    assert state.Progress(**dataclasses.asdict(progress)).checkpoints == Checkpoints([1, 2], operators=True)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint("qwen3_5", num_hidden_layers=3, full_attention_interval=3)


@pytest.fixture
def options(options):
    return [*options, "--rank", 2]


@pytest.fixture
def limited(monkeypatch):
    """limited(bytes): gives the device this limit."""
    return lambda size: monkeypatch.setattr(fit, "device_limits", lambda: limits(size))


def chosen(text):
    found = re.search(r"Checkpoints \(auto\): (\d) of 3 layers are recomputed in the backward pass", text)
    assert found, text
    return int(found[1])


def need(text):
    return float(re.search(r"(?:need|Peak memory:) ([\d.]+) MB", text)[1]) * 1e6


def test_train_says_and_saves_its_choice_and_resumes_with_it(run, options, limited, tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "largest", lambda *_, **__: Largest(1, more=False))
    limited(10**12)
    code, said, err = run("plan", *options, "--grad-checkpoint", "auto")
    assert (code, chosen(said)) == (0, 0), err
    assert said.index("Tried: 0 of 3 layers recomputed") < said.index("Checkpoints (auto)")
    limited(0.9 * need(said) / SHARE)
    (tmp_path / "run.yaml").write_text("grad_checkpoint: auto\nlr_schedule: constant\nwarmup: 0\n")
    arguments = ["train", *options, "-c", tmp_path / "run.yaml", "--adapter-path"]
    parts, whole = (tmp_path / name for name in ("parts", "whole"))
    for folder, iters in ((parts, 1), (whole, 2)):
        code, said, err = run(*arguments, folder, "--iters", iters)
        assert (code, chosen(said)) == (0, 1), err
        assert state.peek(state.state_path(folder)).checkpointed_layers == [0]
    # There would now be room to keep every layer.
    limited(10**12)
    code, said, err = run(*arguments, parts, "--iters", 2, "--resume")
    assert (code, chosen(said)) == (0, 1), err
    assert state.peek(state.state_path(parts)).checkpointed_layers == [0]
    assert state.peek(state.state_path(parts)).checkpoints == state.peek(state.state_path(whole)).checkpoints
    assert (parts / "adapters.safetensors").read_bytes() == (whole / "adapters.safetensors").read_bytes()


def test_too_little_memory_checkpoints_all_and_is_refused(run, options, limited, tmp_path):
    limited(1_000_000)
    code, _, err = run("train", *options, "--adapter-path", tmp_path / "out", "--iters", 1, "--grad-checkpoint", "auto")
    assert code == 2
    assert "does not fit" in err
    assert "with --grad-checkpoint" not in err
    assert "Traceback" not in err


def test_an_mlx_that_cannot_be_planned_for_checkpoints_all(run, options, monkeypatch, tmp_path):
    def unknown():
        raise LayoutError("the inputs of an array were not found")

    monkeypatch.setattr(fit.ArrayLayout, "measured", unknown)
    out = tmp_path / "out"
    code, said, err = run("train", *options, "--adapter-path", out, "--iters", 1, "--grad-checkpoint", "auto")
    assert code == 0, err
    assert "Plan: none" in said
    assert "Checkpoints (auto): 3 of 3 layers" in said
    assert state.peek(state.state_path(out)).checkpointed_layers == [0, 1, 2]


def test_every_rank_takes_the_checkpoints_of_the_smallest_one(tiny_model, monkeypatch):
    model, config = tiny_model("qwen3_5", num_hidden_layers=4), TrainConfig(grad_checkpoint="auto")
    prepare(model, config)
    tried = []
    monkeypatch.setattr(fit, "shape", lambda run: (1, 1))
    monkeypatch.setattr(fit.Planner, "at", lambda *given: tried.append(given[3]) or forecast(1, 1))

    class Ranks:
        largest = staticmethod(lambda number: 3.0)

    class Started:
        splits, world = None, Ranks()

    Started.model, Started.config = model, config
    choice = fit._choice(fit.Planner(Started, None), limits(10**9))
    assert choice.checkpoints == Checkpoints([0, 1, 2], operators=True)
    assert tried == [Checkpoints([], operators=False), Checkpoints([0, 1, 2], operators=True)]


@pytest.mark.bad_input("`Trainer` with `grad_checkpoint: auto` and no plan")
def test_auto_without_a_plan_is_refused(tiny_model):
    model, config = tiny_model("qwen3_5"), TrainConfig(grad_checkpoint="auto")
    with (
        pytest.raises(UserError, match=r"Train with deltatune\.finetune\(config\)"),
        training(model, config, compare=False),
    ):
        pass
