"""Tests lazy updates of experts: which experts change, by how much, at what cost, and what stays as with dense."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.switch_layers import SwitchGLU

from deltatune.errors import UserError
from deltatune.lora.experts import LoRASwitchLinear
from deltatune.machine.compiling import without_kernels
from deltatune.options.config import TrainConfig
from deltatune.patches import patched
from deltatune.train.distributed import World
from deltatune.train.step import Step
from deltatune.train.updates import bundles
from deltatune.train.updates.expert_updates import ActiveExperts
from deltatune.train.updates.optimizer import UpdateOptions, build_optimizer, restore

ADAMW = {"adamw": {"weight_decay": 0.1, "bias_correction": True}}


class Layer(nn.Module):
    """Experts and a linear layer. The input is [rows, 1 + width], and its first column names the expert."""

    def __init__(self, experts: int, width: int = 16):
        super().__init__()
        self.mlp = SwitchGLU(width, 8, experts)
        self.out = nn.Linear(width, width)
        self.freeze()
        for name in ("gate_proj", "up_proj", "down_proj"):
            adapter = LoRASwitchLinear.from_base(self.mlp[name], rank=2)
            adapter.lora_b = 0.1 * mx.random.normal(adapter.lora_b.shape)
            adapter.unfreeze_adapter()
            self.mlp[name] = adapter
        self.out.unfreeze()

    def __call__(self, rows: mx.array) -> mx.array:
        chosen = rows[:, :1].astype(mx.uint32)
        return self.out(self.mlp(rows[:, 1:], chosen)[:, 0])


class Rows:
    """Stands in for a batch, with the fields that Step reads."""

    segments = images = preferences = None

    def __init__(self, experts: list[int], seed: int, width: int = 16):
        values = mx.random.normal((len(experts), width), key=mx.random.key(seed))
        self.inputs = mx.concatenate([mx.array(experts, mx.float32)[:, None], values], axis=1)
        self.targets, self.weights = values[:, ::-1], mx.ones(len(experts))


def loss_of(model: nn.Module):
    def loss(inputs, targets, weights):
        errors = ((model(inputs) - targets) ** 2).mean(axis=-1)
        return (errors * weights).sum(), weights.sum()

    return loss


def make(mode: str, experts: int = 6, accumulate: int = 1, optimizer: str = "adamw", **options):
    mx.random.seed(0)
    model = Layer(experts)
    mx.eval(model.parameters())
    config = TrainConfig(optimizer=optimizer, learning_rate=0.05, optimizer_config=ADAMW)
    made = build_optimizer(config)
    update = UpdateOptions(accumulate, expert_updates=mode, **options)
    step = Step(model, made, loss_of(model), World(), update=update)
    return model, made, step


def run(step: Step, model: nn.Module, *windows: list[Rows]) -> list[float]:
    norms = []
    with patched(), without_kernels():
        for window in windows:
            sums = [step.zeros(), mx.array(0.0), mx.array(0.0)]
            for rows in window:
                loss, weight, gradients = step.micro_batch(rows, sums[0])
                sums = [gradients, sums[1] + loss, sums[2] + weight]
            norms.append(step.update(*sums).item())
            mx.eval(model.parameters())
    return norms


def everything(model: nn.Module, optimizer: mlx.optimizers.Optimizer, step: Step) -> dict[str, mx.array]:
    """Return copies of parameters and optimizer state, by path."""
    state = step.bundles.part_state(optimizer.state)
    flat = tree_flatten({"model": model.trainable_parameters(), "state": state})
    copies = {path: mx.array(leaf) for path, leaf in flat}
    mx.eval(copies)
    return copies


# The norm sums eight leaves' squares in another order, with two more roots and squares: 10 roundings. The clip's factor
# and its product bring 6, squares twice as many, and AdamW itself 8.
UNITS = 40 * 2.0**-24


def allowed(path: str, before: dict[str, mx.array], after: dict[str, mx.array], rates: dict) -> mx.array:
    """How far two updates may differ, from the same numbers `before`, whose gradients' factor is rounded differently.

    A moment is a sum of what it was and of what comes, each with its roundings. AdamW's step is at most 1.2 times the
    rate in the first four updates, from two moments of which one may be a small difference of large numbers.
    """
    kind, _, name = path.partition(".")
    if kind == "state":
        return UNITS * (mx.abs(before[path]) + mx.abs(after[path]))
    return UNITS * (mx.abs(before[path]) + 3 * 0.05 * rates.get(name, 1.0))


@pytest.mark.parametrize("rates", [{}, {"mlp.up_proj.lora_b": 2.0}])
def test_with_every_expert_routed_it_is_the_dense_update(monkeypatch, rates):
    # Active experts are never joined, and so dense ones are not, either: each leaf's squares are summed in one order.
    monkeypatch.setattr(bundles, "MOST_NUMBERS_ON_CPU", 0)
    dense, active = (make(mode, clip=0.05, rates=rates) for mode in ("dense", "active"))
    for seed in range(4):
        # Both begin with the same bits: a model turns a last place of one update into many of the next gradient.
        active[0].update(tree_map(mx.array, dense[0].trainable_parameters()))
        restore(active[1], tree_map(mx.array, dense[1].state))
        before = everything(*dense)
        norms = [run(step, model, [Rows([0, 1, 2, 3, 4, 5, 5], seed)])[0] for model, _, step in (dense, active)]
        assert norms[1] == pytest.approx(norms[0], rel=10 * 2.0**-24)
        expected, found = everything(*dense), everything(*active)
        assert expected.keys() == found.keys()
        for path, value in expected.items():
            assert mx.all(mx.abs(found[path] - value) <= allowed(path, before, expected, rates)), (seed, path)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_experts_without_tokens_stay_bitwise(accumulate):
    """E = 256, 8 routed; all have moments from before, and weight decay waits for each of them."""
    experts, routed = 256, [3, 17, 40, 41, 99, 128, 200, 255]
    model, optimizer, step = make("active", experts, accumulate)
    first = [Rows(list(range(256)), seed) for seed in range(accumulate)]
    run(step, model, first)
    before = everything(model, optimizer, step)
    halves = [Rows(routed[i::accumulate] * 2, 10 + i) for i in range(accumulate)]
    run(step, model, halves)
    after = everything(model, optimizer, step)
    rest = mx.array([e for e in range(experts) if e not in routed])
    moved, others = [p for p in after if "mlp" in p], [p for p in after if "mlp" not in p]
    assert len(moved) == 18
    for path in moved:
        assert mx.array_equal(after[path][rest], before[path][rest]), path
        changed = (after[path] != before[path]).reshape(experts, -1).any(axis=1)
        assert mx.all(changed[mx.array(routed)]), path
    assert all(not mx.array_equal(after[path], before[path]) for path in others if "learning_rate" not in path)


def test_an_expert_that_returns_is_corrected_by_the_global_step():
    """After two updates of other experts, AdamW makes its third step from moments of zero."""
    model, _, step = make("active")
    run(step, model, [Rows([0, 1], 0)], [Rows([1, 2], 1)])
    name = "up_proj"
    before = mx.array(model.mlp[name].lora_b[5])
    with patched(), without_kernels():
        loss, weight, gradients = step.micro_batch(Rows([5, 5], 2), None)
        mx.eval(gradients)
        gradient = gradients["mlp"][name]["lora_b"][5]
        step.update(gradients, loss, weight)
    mean, square = 0.1 * gradient / (1 - 0.9**3), 0.001 * gradient**2 / (1 - 0.999**3)
    expected = before * (1 - 0.05 * 0.1) - 0.05 * mean / (mx.sqrt(square) + 1e-8)
    assert mx.allclose(model.mlp[name].lora_b[5], expected, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_moves_nobody():
    model, optimizer, step = make("active")
    run(step, model, [Rows([0, 1, 2], 0)])
    before = everything(model, optimizer, step)
    poisoned = Rows([1, 2], 1)
    poisoned.weights = mx.array([1.0, float("inf")])
    norms = run(step, model, [poisoned])
    assert not norms[0] < float("inf")
    after = everything(model, optimizer, step)
    assert all(mx.array_equal(after[path], before[path]) for path in before)


def test_the_cost_follows_the_experts_that_had_tokens(monkeypatch):
    model, optimizer, step = make("active", 64)
    sizes = []
    kind = type(optimizer)
    plain = kind.apply_single

    def counting(self, gradient, parameter, state):
        if gradient.ndim == 3:
            sizes.append(gradient.shape[0])
        return plain(self, gradient, parameter, state)

    monkeypatch.setattr(kind, "apply_single", counting)
    run(step, model, [Rows([1, 2, 2], 0)], [Rows([7], 1)])
    assert sizes == [2] * 6 + [1] * 6


def test_refused_where_it_cannot_be():
    model = Layer(4)
    with pytest.raises(UserError, match="adafactor does not"):
        ActiveExperts(model, mlx.optimizers.Adafactor())
    with pytest.raises(UserError, match="needs a trainable expert layer"):
        ActiveExperts(nn.Linear(3, 3), mlx.optimizers.AdamW(1e-3))


@pytest.mark.any_blas
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_stops_goes_on_with_the_same_bits(tiny_checkpoint, options, splits, tmp_path, accumulate):
    from deltatune.models.load import load
    from deltatune.options.config import LoraConfig
    from deltatune.train import Trainer
    from deltatune.train.setup import prepare

    checkpoint = tiny_checkpoint("qwen3_5_moe", num_hidden_layers=2, full_attention_interval=2)
    changes = {"expert_updates": "active", "val_batches": 0, "grad_accumulation_steps": accumulate}

    def run(folder: str, iters: int, **more) -> bytes:
        values = options | changes | {"iters": iters, "adapter_path": str(tmp_path / folder)} | more
        config = TrainConfig(**values | {"lora_parameters": LoraConfig(rank=2, keys=["*.switch_mlp.*", "*q_proj"])})
        loaded = load(checkpoint)
        prepare(loaded.model, config)
        Trainer(loaded.model, loaded.tokenizer, config, splits, model_config=loaded.config).run()
        return (tmp_path / folder / "adapters.safetensors").read_bytes()

    straight = run("straight", 6)
    run("stopped", 3)
    assert run("stopped", 6, resume=True) == straight
    assert run("dense", 6, expert_updates="dense") != straight
