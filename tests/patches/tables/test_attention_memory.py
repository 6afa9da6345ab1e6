"""The peak of a training step grows with the length and not with its square, wherever attention is deltatune's."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from deltatune.machine import backend
from deltatune.ops.checkpoint import checkpointed
from deltatune.ops.segments import segments
from deltatune.options.config import TrainConfig
from deltatune.patches import patched
from deltatune.plan.traced_step import blank_batch
from deltatune.train.batch_loss import full_loss
from deltatune.train.distributed import World
from deltatune.train.evaluation.evaluate import Evaluation
from deltatune.train.setup import Training, prepare
from families import weekly_but

pytestmark = [
    pytest.mark.any_blas,
    pytest.mark.skipif(backend.device() != "cpu", reason="the peaks of a CPU are counted"),
]


@pytest.fixture
def growth(monkeypatch, peak_bytes):
    """growth(of_length) -> how many times the peak grows with rows four times as long: 4 if linear, 16 if quadratic.

    The order in which MLX frees an operation's inputs moves a peak by some percent. MLX's own attention would serve the
    shorter of these rows (ops/attention/choice.py).
    """
    monkeypatch.setenv("DELTATUNE_ATTENTION", "blocked")

    def measure(of_length: Callable[[int], Callable[[], object]], lengths: tuple[int, int] = (256, 1024)) -> float:
        peaks = []
        for length in lengths:
            run = of_length(length)
            mx.eval(run())
            peaks.append(peak_bytes(run))
        return peaks[1] / peaks[0]

    return measure


def rows_of(length: int) -> mx.array:
    return mx.random.randint(0, 320, (1, length), key=mx.random.key(0))


def documents_of(length: int) -> mx.array:
    return (mx.arange(length) // 700)[None].astype(mx.int32)


def loss(model: nn.Module, rows: mx.array) -> mx.array:
    return mx.logsumexp(model(rows), axis=-1).mean()


@pytest.mark.parametrize(
    ("family", "packed"),
    [
        ("qwen3", False),
        ("gemma3_text", True),
        pytest.param("qwen3", True, marks=pytest.mark.weekly),
        pytest.param("gemma3_text", False, marks=pytest.mark.weekly),
    ],
)
def test_a_checkpointed_step(tiny_model, family, packed, growth):
    """gemma3_text has windows of 16 tokens."""
    model = tiny_model(family, num_hidden_layers=2)
    prepare(model, TrainConfig())
    model.train()

    def of_length(length: int) -> Callable[[], object]:
        rows, owner = rows_of(length), documents_of(length) if packed else None

        def run() -> object:
            with segments(owner):
                return nn.value_and_grad(model, loss)(model, rows)

        return run

    with patched(), checkpointed(model.layers):
        assert growth(of_length) < 6


@pytest.mark.parametrize(
    "family", ["kimi_linear", *(pytest.param(name, marks=pytest.mark.weekly) for name in ("bailing", "kimi_k3"))]
)
def test_latent_attention(tiny_model, family, growth):
    model = tiny_model(family)
    layers = [m for _, m in model.named_modules() if type(m).__name__.endswith(("MLA", "MLAAttention"))]

    def of_length(length: int) -> Callable[[], object]:
        x = mx.random.normal((1, length, 64), key=mx.random.key(0))

        def of_layer(x: mx.array) -> mx.array:
            from mlx_lm.models.base import create_attention_mask

            return layers[0](x, create_attention_mask(x, return_array=True)).square().sum()

        return lambda: mx.grad(of_layer)(x)

    with patched():
        assert growth(of_length) < 6


@pytest.mark.parametrize("trained", weekly_but([False, True], True))
def test_a_vision_tower(tiny_vision_model, trained, growth):
    from deltatune.models.vision.inputs import blank_vision_batch
    from deltatune.models.vision.split import FrozenTower, vision_spec

    model = tiny_vision_model("qwen3_5")
    tower = FrozenTower(model)

    def of_length(length: int) -> Callable[[], object]:
        batch = blank_vision_batch(1, 64, (1, length), vision_spec(model))

        def features(_: object = None) -> mx.array:
            return sum(each.square().sum() for each in tower.frame_features(batch, 0, length))

        return nn.value_and_grad(model.vision_tower, features) if trained else features

    with patched() if trained else nullcontext():
        assert growth(of_length) < 6


def test_a_validation(tiny_model, growth):
    model = tiny_model("qwen3")

    def of_length(length: int) -> Callable[[], object]:
        batch = blank_batch(1, length, False)
        evaluation = Evaluation(model, Training(full_loss(model)), World())
        order = SimpleNamespace(batches_per_epoch=1, epoch=lambda: [batch])
        return lambda: mx.array(evaluation(order))

    with patched():
        assert growth(of_length) < 6


def test_mlxs_own_attention_grows_with_the_square(tiny_model, growth):
    """A control: the measurement tells the two apart. Its rows are longer, for much else grows with their length."""
    model = tiny_model("qwen3", num_hidden_layers=1)
    model.train()

    def of_length(length: int) -> Callable[[], object]:
        rows = rows_of(length)
        return lambda: nn.value_and_grad(model, loss)(model, rows)

    assert growth(of_length, (384, 1536)) > 8
