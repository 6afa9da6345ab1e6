"""Models that keep packed documents separate pass the check; all others are refused with the reason."""

import mlx.core as mx
import pytest

from deltatune.errors import UserError
from deltatune.models.document_isolation import check_packing
from deltatune.patches import patched

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "olmo_hybrid", "bailing", "kimi_k3")


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3", "gemma3_text"])
def test_families_pass_with_the_patches_and_fail_without(tiny_model, family):
    model = tiny_model(family)
    with patched(model):
        check_packing(model)
    with pytest.raises(UserError, match="sees across documents"):
        check_packing(model)


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "qwen3"])
def test_sixteen_bits_pass(tiny_model, family):
    model = tiny_model(family)
    model.set_dtype(mx.bfloat16)
    with patched(model):
        check_packing(model)


@pytest.mark.parametrize(("family", "layers"), [("mamba2", "0, 1"), ("jamba", "0"), ("granitemoehybrid", "0")])
def test_mamba_is_refused_by_layer(other_model, family, layers):
    model = other_model(family)
    with patched(model), pytest.raises(UserError, match=f"layers {layers} are Mamba"):
        check_packing(model)


def test_learned_positions_are_refused(other_model):
    model = other_model("gpt2")
    with patched(model), pytest.raises(UserError, match="counts positions"):
        check_packing(model)
