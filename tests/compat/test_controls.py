"""Faults without the patches are seen, and gone with them: the loop over tokens, and experts that refuse grad."""

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cases import DELTA, MOE, TEXT, experts_cut_off, gradients, logits, tokens
from packaging.version import Version

from deltatune.patches import patched
from deltatune.patches.recurrence import PROMPT_TOKENS
from deltatune.selftest.controls import growth

pytestmark = pytest.mark.compat
REFUSED = "Cannot calculate VJP with respect to indices|GatherAxis"


def compare_growth(model: nn.Module, loops: bool, record_property: Any) -> None:
    model.train()
    with experts_cut_off():
        before = growth(model)
    with patched(model):
        after = growth(model)
    record_property("nodes a token and layer", f"{before:.1f}, patched {after:.1f}")
    assert before > 20 or not loops
    assert after < 5


@pytest.mark.parametrize("family", TEXT)
def test_the_loop_over_tokens_in_text(tiny_model, record_property, family):
    compare_growth(tiny_model(family), True, record_property)


@pytest.mark.parametrize("family", DELTA)
def test_the_loop_over_tokens_in_vision_models(tiny_vision_model, record_property, family):
    compare_growth(tiny_vision_model(family), False, record_property)


def check_experts(model: nn.Module, training: bool, refused: bool, record_property: Any) -> None:
    model.train(training)
    record_property("unpatched", "refused" if refused else "accepted")
    with pytest.raises(ValueError, match=REFUSED) if refused else nullcontext():
        gradients(model, tokens(20))
    # Fewer tokens than a prompt has: off Metal the patches serve prompts, bit for bit or not.
    few = tokens(PROMPT_TOKENS - 1)
    expected = logits(model, few)
    mx.eval(expected)
    with patched():
        gradients(model, tokens(20))
        if not training:
            assert mx.array_equal(logits(model, few), expected)


@pytest.mark.parametrize("training", [True, False], ids=["train", "forgotten train()"])
def test_experts_in_text(tiny_model, record_property, training):
    check_experts(tiny_model("qwen3_5_moe"), training, False, record_property)


@pytest.mark.parametrize("training", [True, False], ids=["train", "forgotten train()"])
@pytest.mark.parametrize("family", MOE)
def test_experts_in_vision_models(tiny_vision_model, record_property, family, training):
    import mlx_vlm

    model = tiny_vision_model(family)
    in_graph = Version(mlx_vlm.__version__) < Version("0.7.5") and family in (
        "qwen3_5_moe",
        "qwen3_vl_moe",
        "qwen3_next",
    )
    check_experts(model, training, in_graph, record_property)
