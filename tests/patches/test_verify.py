"""The implementation of each layer of a model is found: gated delta, attention and experts."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from mlx_lm.models import qwen3_next

from deltatune.ops.operator.foresight import look_ahead
from deltatune.options.config import TrainConfig
from deltatune.patches import patch_report as verify
from deltatune.patches import patched
from deltatune.patches.patch_report import Serving, serving
from deltatune.patches.tables import experts
from deltatune.train.reports import announce
from deltatune.train.setup import training


@pytest.fixture
def mixture(tiny_model):
    return tiny_model("qwen3_5_moe")


def names(layers):
    return set(layers.values())


def test_every_operator_of_every_layer(mixture):
    mixture.eval()
    with patched():
        told = serving(mixture)
    assert (len(told.delta), len(told.attention), len(told.experts)) == (3, 1, 4)
    assert names(told.delta) == {"chunk"}
    # Rows of so few scores are MLX's own, called by deltatune's attention.
    assert names(told.attention) == {"native"}
    assert names(told.experts) == {"grouped"}
    assert all(path.endswith("linear_attn") for path in told.delta)
    # Asking changes neither the mode nor whose code answers.
    assert not mixture.training


def test_without_patches_no_layer_is_deltatunes(mixture):
    told = serving(mixture)
    assert names(told.delta) == names(told.attention) == names(told.experts) == {""}


def test_a_layer_that_computes_its_attention_itself_is_upstreams(mixture, monkeypatch):
    monkeypatch.setattr(qwen3_next, "scaled_dot_product_attention", lambda q, *others, **options: q)
    with patched():
        told = serving(mixture)
    assert (names(told.delta), names(told.attention), names(told.experts)) == ({"chunk"}, {""}, {"grouped"})


def test_a_model_without_gated_delta_is_not_asked(tiny_model):
    """Its forward on two tokens may need pictures, or a kernel that this machine does not have."""
    with patched():
        assert serving(tiny_model("qwen3")) == Serving()


def test_experts_of_an_unknown_kind_are_upstreams(mixture, monkeypatch):
    unknown = mixture.layers[2].mlp.switch_mlp.up_proj
    known = experts.projection
    monkeypatch.setattr(experts, "projection", lambda each: None if each is unknown else known(each))
    with patched():
        told = serving(mixture)
    assert [name for _, name in sorted(told.experts.items())] == ["grouped", "grouped", "", "grouped"]


def test_a_run_says_it_in_a_line_an_operator():
    told = Serving({"a": "chunk", "b": "chunk"}, {"c": "blocked", "d": ""})
    assert announce.served(told) == {
        "gated delta": "chunk (automatic on cpu) in 2 of 2 layers",
        "attention": "blocked (automatic on cpu) in 1 of 2 layers, and upstream's own code in 1 of 2 layers",
    }


@pytest.mark.parametrize(("options", "rows"), [({}, 3), ({"loss": "grpo", "num_generations": 4}, 12)])
def test_a_run_asks_with_the_rows_of_its_batches(options, rows, mixture, monkeypatch):
    """On NVIDIA GPUs kernels are chosen by rows: others would be tried, and built, for this question alone."""
    shapes, asked = [], verify.logits_of

    def logits_of(model, tokens):
        shapes.append(tokens.shape)
        return asked(model, tokens)

    monkeypatch.setattr(verify, "logits_of", logits_of)
    with training(mixture, TrainConfig(batch_size=3, grad_checkpoint=False, **options), compare=False):
        assert shapes == [(rows, 2)]


def test_trials_of_the_trace_are_foreseen(mixture, monkeypatch):
    looked: list[str] = []

    @contextmanager
    def watched(trace_calls):
        with ThreadPoolExecutor() as builders:
            look_ahead(lambda: looked.extend({call.operator for call in trace_calls()}), builders)
        yield

    monkeypatch.setattr(verify, "foreseen", watched)
    with patched():
        told = serving(mixture)
    assert set(looked) == {"gated delta", "attention", "experts"}
    assert names(told.delta) == {"chunk"}
