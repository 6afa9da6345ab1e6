"""Models that keep packed documents separate pass the check; all others are refused with the reason."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import base

from deltatune.errors import UserError
from deltatune.models.document_isolation import check_packing
from deltatune.patches import patched
from families import weekly_but

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "olmo_hybrid", "bailing", "kimi_k3", "qwen3")
# Of Mamba-2.
OTHERS = ("mamba2", "granitemoehybrid", "nemotron_h")


# A window, a mixer of Mamba-2, and families of which test_mlx_lm.py trains no documents.
@pytest.mark.parametrize(
    "family", weekly_but([*FAMILIES, "gemma3_text", *OTHERS], "qwen3_next", "bailing", "gemma3_text", "mamba2")
)
def test_families_pass_with_the_patches_and_fail_without(tiny_model, other_model, family):
    model = (other_model if family in OTHERS else tiny_model)(family)
    with patched(model):
        check_packing(model, 64)
    with pytest.raises(UserError, match="sees across documents"):
        check_packing(model, 64)


@pytest.mark.parametrize("family", weekly_but(["qwen3_5", "olmo_hybrid", "qwen3"], "olmo_hybrid"))
def test_sixteen_bits_pass(tiny_model, family):
    model = tiny_model(family)
    model.set_dtype(mx.bfloat16)
    with patched(model):
        check_packing(model, 64)


def test_mamba_of_the_first_kind_is_refused_by_layer(other_model):
    model = other_model("jamba")
    with patched(model), pytest.raises(UserError, match="layers 0 are Mamba layers of the first kind"):
        check_packing(model, 64)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("rwkv7", mx.float32),
        ("recurrent_gemma", mx.bfloat16),
        ("hunyuan_v1_dense", mx.bfloat16),
        # Learned positions.
        ("gpt2", mx.float32),
    ],
)
def test_leaking_model_is_refused_in_every_dtype(other_model, family, dtype):
    # Their own weights leak 0.3 to 1.4 %. Hunyuan scales channels behind the rotary embedding, which makes positions
    # absolute.
    model = other_model(family)
    model.set_dtype(dtype)
    with patched(model), pytest.raises(UserError, match="sees across documents or counts positions"):
        check_packing(model, 64)


@pytest.mark.parametrize("zero", ["all", "lm_head", "o_proj"])
def test_weights_of_zero_hide_no_leak(tiny_model, zero):
    model = tiny_model("qwen3")
    model.load_weights(
        [
            (path, mx.zeros_like(array))
            for path, array in tree_flatten(model.parameters())
            if zero in ("all", path.split(".")[-2])
        ],
        strict=False,
    )
    with pytest.raises(UserError, match="sees across documents"):
        check_packing(model, 64)
    with patched(model):
        check_packing(model, 64)


@pytest.mark.parametrize("mode", weekly_but(["affine", "mxfp4", "mxfp8", "nvfp4"], "affine", "nvfp4"))
def test_the_model_holds_the_same_arrays_afterwards(tiny_model, mode):
    model = tiny_model("qwen3_5_moe", num_hidden_layers=2, full_attention_interval=2)
    model.set_dtype(mx.float16)
    settings = {"affine": (32, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
    quantizable = lambda _, module: hasattr(module, "to_quantized") and module["weight"].shape[-1] % 32 == 0  # noqa: E731
    nn.quantize(model, *settings[mode], mode=mode, class_predicate=quantizable)
    before = dict(tree_flatten(model.parameters()))
    bits = {path: np.array(array.view(mx.uint8)) for path, array in before.items()}
    classes = [type(module) for module in model.modules()]
    with patched(model):
        check_packing(model, 64)
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys()
    assert all(after[path] is array for path, array in before.items())
    assert all(np.array_equal(np.array(after[path].view(mx.uint8)), array) for path, array in bits.items())
    assert [type(module) for module in model.modules()] == classes


class _LeaksBeyondItsWindow(nn.Module):
    """Sees the whole row where it is longer than a window."""

    def __init__(self):
        super().__init__()
        self.window_size = 100

    def __call__(self, x):
        return x.mean(axis=1, keepdims=True) + x if x.shape[1] > self.window_size else x


def test_rows_are_longer_than_every_window_that_training_exceeds(tiny_model):
    model = tiny_model("qwen3")
    model.model.layers[1].mlp = _LeaksBeyondItsWindow()
    with patched(model):
        check_packing(model, 100)
        with pytest.raises(UserError, match="on rows longer than window_size, here 20 in place of 100"):
            check_packing(model, 101)


ROPE = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 256}
YARN = ROPE | {"rope_type": "yarn", "factor": 16.0}
NEAR = {
    "ministral3": ({"rope_parameters": YARN}, "original_max_position_embeddings", 256),
    "llama": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "max_position_embeddings", 128),
    "minimax_m3_vl": ({}, "index_block_size and index_topk_blocks", 96),
}


@pytest.mark.parametrize("family", NEAR)
def test_model_that_leaks_beyond_a_length_is_refused_on_longer_rows_alone(other_model, family):
    options, names, length = NEAR[family]
    model = other_model(family, num_hidden_layers=2, **options)
    with patched(model):
        check_packing(model, length)
        with pytest.raises(UserError, match=f"longer than {names}, here 20 in place of {length}.* at most {length}"):
            check_packing(model, length + 1)
        check_packing(model, length)


def test_a_scale_that_changes_little_is_found(other_model):
    model = other_model("ministral3", num_hidden_layers=8, rope_parameters=YARN | {"llama_4_scaling_beta": 0.01})
    with patched(model), pytest.raises(UserError, match="original_max_position_embeddings"):
        check_packing(model, 4096)


class _LeaksALittle(nn.Module):
    """Adds a small part of the row's mean, as layers pass on whose inputs are so large that a tanh hides them."""

    def __call__(self, x):
        return x + 1e-3 * x.mean(axis=1, keepdims=True)


def test_a_small_leak_into_every_token_is_refused(tiny_model):
    model = tiny_model("qwen3")
    model.model.layers[-1].mlp = _LeaksALittle()
    with patched(model), pytest.raises(UserError, match="sees across documents"):
        check_packing(model, 64)


def test_models_of_mlx_vlm_keep_documents_separate(tiny_vision_model):
    model = tiny_vision_model("qwen3_vl")
    with patched(model):
        check_packing(model, 64)


class _MaskOfItsOwnShape(nn.Module):
    """Adds its mask to scores of five axes, as mlx-lm's phi3small does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @property
    def layers(self):
        return self.model.layers

    def __call__(self, tokens):
        hidden = self.model.model.embed_tokens(tokens)
        mask = base.create_attention_mask(hidden, None, return_array=True)
        return self.model(tokens) + (mx.zeros((2, 2, 2, 48, 48)) + mask).sum()


def test_a_mask_that_does_not_fit_is_one_message(tiny_model):
    model = _MaskOfItsOwnShape(tiny_model("qwen3"))
    with patched(model), pytest.raises(UserError, match="reads its mask in another shape"):
        check_packing(model, 64)
