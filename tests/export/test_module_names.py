"""PEFT's names of modules, as recorded with the parity runs, and its factors of experts."""

import json

import mlx.core as mx
import numpy as np
import pytest

from deltatune.errors import UserError
from deltatune.export.module_names import AdaptedPlace, TransformersNames, check_layout
from deltatune.export.peft_adapter import from_peft, fused, split, to_peft
from deltatune.models.transformers_configs import with_known_type
from deltatune.selftest.parity import recording, vision
from deltatune.selftest.parity.cases import CASES


def recorded(name):
    return json.loads((recording.FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_every_linear_of_a_text_family(name):
    content, family = recorded(name), CASES[name].family
    names = TransformersNames(with_known_type(content["config"]))
    assert len(content["targets"]) >= 4
    for target in content["targets"]:
        place = names.place(family.mlx_path(target))
        redirected = name == "qwen3_next" and target.endswith(("gate_proj", "up_proj", "down_proj"))
        assert place == AdaptedPlace(target, "weight" if redirected else None)


@pytest.mark.parametrize("name", vision.CASES)
def test_every_linear_of_a_family_with_images(name):
    content = recorded(f"vision/{name}")
    names, targets = TransformersNames(content["config"]), content["targets"]
    assert any(".visual." in target for target in targets)
    assert all(names.place(vision.mlx_path(target)) == AdaptedPlace(target) for target in targets)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "kimi_linear", "bailing_hybrid"])
def test_experts_router_embedding_and_head(name):
    root = "language_model." if name == "qwen3_5_moe" else ""
    names = TransformersNames({"model_type": name})
    mlp = "model.layers.1.mlp"
    for matrix in ("gate", "up"):
        place = names.place(f"{root}{mlp}.switch_mlp.{matrix}_proj")
        assert place == AdaptedPlace(f"{mlp}.experts", "gate_up_proj", matrix)
    assert names.place(f"{root}{mlp}.switch_mlp.down_proj") == AdaptedPlace(f"{mlp}.experts", "down_proj")
    assert names.place(f"{root}{mlp}.gate") == AdaptedPlace(f"{mlp}.gate", "weight")
    assert names.place(f"{root}lm_head") == AdaptedPlace("lm_head")
    embedding = "word_embeddings" if name == "bailing_hybrid" else "embed_tokens"
    assert names.place(f"{root}model.{embedding}") == AdaptedPlace("model.embed_tokens")


def test_experts_without_a_gate_and_modules_that_peft_refuses():
    names = TransformersNames({"model_type": "nemotron_h"})
    assert names.place("backbone.layers.3.mixer.switch_mlp.fc1") == AdaptedPlace(
        "model.layers.3.mixer.experts", "up_proj"
    )
    assert names.place("backbone.layers.3.mixer.switch_mlp.fc2") == AdaptedPlace(
        "model.layers.3.mixer.experts", "down_proj"
    )
    assert names.place("backbone.embeddings") == AdaptedPlace("model.embeddings")
    granite = TransformersNames({"model_type": "granitemoehybrid"}).place(
        "model.layers.0.block_sparse_moe.router.layer"
    )
    assert granite == AdaptedPlace("model.layers.0.block_sparse_moe.router", "weight")
    mixer = ["layers.0.mixer.in_proj", "layers.0.mixer.out_proj"]
    assert names.refused(mixer) == mixer[1:]
    assert TransformersNames({"model_type": "qwen3_5"}).refused(mixer) == []


def test_matrices_that_hold_multipliers_are_refused():
    config = {"model_type": "falcon_h1", "ssm_out_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0]}
    path = "model.layers.0.mamba.in_proj"
    assert TransformersNames(config).place(path) == AdaptedPlace(path)
    with pytest.raises(UserError, match=r"multiplies the matrices of a falcon_h1 model by \{'mlp_multipliers': \[0.9"):
        TransformersNames(config | {"mlp_multipliers": [0.9, 1.0]}).place(path)


def test_a_family_without_a_record_keeps_plain_names_and_refuses_others():
    names = TransformersNames({"model_type": "llama"})
    assert names.place("model.layers.2.self_attn.q_proj") == AdaptedPlace("model.layers.2.self_attn.q_proj")
    for path in ("model.layers.2.mlp.switch_mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"):
        with pytest.raises(UserError, match="does not know how transformers names this module of a llama model"):
            names.place(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "a name that MLX gave it"),
        ("model.layers.0.mlp.switch_mlp.up_proj.weight", "a name that MLX gave it"),
        ("model.layers.0.mlp.up_proj.scales", "MLX's quantisation"),
    ],
)
def test_a_conversion_to_mlx_is_told_from_a_checkpoint_of_hugging_face(name, said, tmp_path):
    check_layout(["model.layers.0.mlp.up_proj.weight", "lm_head.weight"], tmp_path, "it is read")
    with pytest.raises(UserError, match=said):
        check_layout([name], tmp_path, "it is read")


EXPERTS, INPUTS, ROWS = 5, 7, 4


def factors(rank):
    return mx.random.normal((EXPERTS, rank, INPUTS)), mx.random.normal((EXPERTS, ROWS, rank))


def test_pefts_layout_is_that_of_its_definition():
    """PEFT: reshape A to (experts, r, in) and B to (out, r, experts), then "o r e, e r i -> e o i"."""
    a, b = factors(3)
    theirs_a, theirs_b = to_peft(a, b)
    assert theirs_a.shape == (EXPERTS * 3, INPUTS)
    assert theirs_b.shape == (ROWS, 3 * EXPERTS)
    shaped = np.array(theirs_b).reshape(ROWS, -1, EXPERTS), np.array(theirs_a).reshape(EXPERTS, -1, INPUTS)
    np.testing.assert_allclose(np.einsum("ore,eri->eoi", *shaped), np.array(b @ a), atol=1e-5)
    for ours, back in zip((a, b), from_peft(theirs_a, theirs_b, EXPERTS), strict=True):
        assert mx.array_equal(ours, back)


@pytest.mark.parametrize("names", [("gate", "up"), ("gate",), ("up",)])
def test_gate_and_up_become_one_matrix_and_come_back(names):
    parts = {name: factors(2 + index) for index, name in enumerate(names)}
    a, b = fused(parts, ("gate", "up"))
    zero = mx.zeros((EXPERTS, ROWS, INPUTS))
    rows = [parts[name][1] @ parts[name][0] if name in parts else zero for name in ("gate", "up")]
    assert mx.allclose(b @ a, mx.concatenate(rows, axis=1), atol=1e-5)
    back = split(a, b, ("gate", "up"))
    assert set(back) == set(names)
    for name, (part_a, part_b) in back.items():
        assert mx.allclose(part_b @ part_a, parts[name][1] @ parts[name][0], atol=1e-5)


def test_equal_ranks_come_back_as_they_were_and_a_full_matrix_keeps_its_rank():
    parts = {"gate": factors(3), "up": factors(3)}
    back = split(*fused(parts, ("gate", "up")), ("gate", "up"))
    for name, given in parts.items():
        assert all(mx.array_equal(one, other) for one, other in zip(given, back[name], strict=True))
    a, b = mx.random.normal((EXPERTS, 4, INPUTS)), mx.random.normal((EXPERTS, 2 * ROWS, 4))
    assert {name: part[1].shape[2] for name, part in split(a, b, ("gate", "up")).items()} == {"gate": 4, "up": 4}
    assert set(split(a, mx.zeros_like(b), ("gate", "up"))) == {"gate", "up"}
