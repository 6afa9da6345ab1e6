"""Faults without the patches are seen, and gone with them: the loop over tokens, and experts that refuse grad."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cases import DELTA, MOE, TEXT, gradients, logits, loss, tokens

from deltatune.patches import patched
from deltatune.patches.recurrence import PROMPT_TOKENS
from deltatune.patches.versions import contains

pytestmark = pytest.mark.compat
REFUSED = "Cannot calculate VJP with respect to indices|GatherAxis"


def nodes(model: nn.Module, length: int, folder: Any) -> int:
    """Operations in the graph of a loss and its gradients, before anything is computed."""
    rows = tokens(length)
    value, tree = nn.value_and_grad(model, lambda rows: loss(model, rows))(rows)
    file = folder / "graph.dot"
    mx.export_to_dot(str(file), loss=value, **{f"g{n}": each for n, (_, each) in enumerate(_flat(tree))})
    return sum("label =" in line and "rectangle" in line for line in file.read_text().split(";"))


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return tree_flatten(tree)


def growth(model: nn.Module, folder: Any) -> float:
    """Operations that one more token costs."""
    return (nodes(model, 192, folder) - nodes(model, 64, folder)) / 128


def compare_growth(model: nn.Module, layers: int, loops: bool, folder: Any, record_property: Any) -> None:
    model.train()
    before = growth(model, folder)
    with patched(model):
        after = growth(model, folder)
    record_property("nodes a token", f"{before:.1f}, patched {after:.1f}")
    if loops:
        assert before > 20 * layers
    assert after < 5 * layers


@pytest.mark.parametrize("family", TEXT)
def test_the_loop_over_tokens_in_text(tiny_model, tmp_path, record_property, family):
    compare_growth(tiny_model(family), 3, True, tmp_path, record_property)


@pytest.mark.parametrize("family", DELTA)
def test_the_loop_over_tokens_in_vision_models(tiny_vision_model, tmp_path, record_property, experts_cut_off, family):
    experts_cut_off()
    model = tiny_vision_model(family)
    compare_growth(model, 3, False, tmp_path, record_property)


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
    in_graph = contains("<0.7.5", mlx_vlm.__version__) and family in ("qwen3_5_moe", "qwen3_vl_moe", "qwen3_next")
    check_experts(model, training, in_graph, record_property)
