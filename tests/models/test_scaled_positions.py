"""Scaled positions are those of transformers, or refused."""

import math

import mlx.core as mx
import numpy as np
import pytest

from checkpoint_copies import copied
from console import called
from deltatune import upstream
from deltatune.errors import UserError
from deltatune.models.load import new_model
from families import PLAIN

SIZES = PLAIN | {"num_hidden_layers": 1, "head_dim": 16, "max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE |= {"original_max_position_embeddings": 64}
ONE_MESSAGE = "ignores that: its logits would not be those of transformers"


def config(family, scaling, **options):
    rope = {"rope_parameters": {"rope_theta": 10000.0, **scaling}, "transformers_version": "5.23.0"}
    return {"model_type": family, **SIZES, **rope, **options}


def rope_of(model):
    return model.layers[0].self_attn.rope


@pytest.mark.bad_input("scaled positions that the family's model in mlx-lm ignores")
@pytest.mark.parametrize("family", ["cohere", "gemma", "gemma2", "helium", "mixtral", "starcoder2"])
@pytest.mark.parametrize("scaling", [LINEAR, YARN], ids=["linear", "yarn"])
def test_scaling_that_a_model_ignores_is_refused(family, scaling):
    with pytest.raises(UserError, match=f"{scaling['rope_type']}.*mlx-lm's {family} {ONE_MESSAGE}"):
        new_model(config(family, scaling))


def test_scaling_in_its_old_form_is_refused_too():
    old = {"model_type": "mixtral", **SIZES, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    with pytest.raises(UserError, match=ONE_MESSAGE):
        new_model(old)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "olmo2"])
def test_scaling_that_a_model_reads(family):
    assert rope_of(new_model(config(family, LINEAR))).scale == 1 / 4


def test_random_weights_do_not_depend_on_a_scaling():
    plain = new_model(config("llama", {"rope_type": "default"}), seed=3)
    scaled = new_model(config("llama", LINEAR), seed=3)
    assert mx.array_equal(plain.model.embed_tokens.weight, scaled.model.embed_tokens.weight)


def yarn_of(truncate):
    """YaRN's frequencies of heads of 16, a factor of 4, an original length of 256, in float64. arXiv 2309.00071."""
    dimension = [16 * math.log(256 / (turns * 2 * math.pi)) / (2 * math.log(10000.0)) for turns in (32, 1)]
    low, high = (math.floor(dimension[0]), math.ceil(dimension[1])) if truncate else dimension
    ramp = np.clip((np.arange(8) - max(low, 0)) / (min(high, 15) - max(low, 0)), 0, 1)
    frequencies = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    return frequencies * (1 - ramp) + frequencies / 4 * ramp


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_with_and_without_truncation(truncate):
    rope = rope_of(new_model(config("llama", YARN | {"truncate": truncate})))
    found = 1 / np.array(getattr(rope, upstream.ROPE_FREQUENCIES), np.float64)
    assert np.allclose(found, yarn_of(truncate), rtol=1e-5)
    assert not np.allclose(found, yarn_of(not truncate), rtol=1e-3)


def test_yarns_own_attention_factor():
    assert rope_of(new_model(config("llama", YARN))).mscale == pytest.approx(0.1 * math.log(4.0) + 1)
    assert rope_of(new_model(config("llama", YARN | {"attention_factor": 2.0}))).mscale == 2.0


def test_yarns_original_length_is_the_longest_where_none_is_given():
    """Transformers' default; mlx-lm's is 4,096."""
    given = YARN | {"original_max_position_embeddings": 512}
    left_out = {key: value for key, value in given.items() if key != "original_max_position_embeddings"}
    ropes = [rope_of(new_model(config("llama", scaling))) for scaling in (given, left_out)]
    first, second = (np.array(getattr(rope, upstream.ROPE_FREQUENCIES)) for rope in ropes)
    assert np.allclose(first, second, rtol=1e-5)


@pytest.mark.bad_input("longrope positions of a scale that mlx-lm's model does not compute")
@pytest.mark.parametrize("option", [{"attention_factor": 2.0}, {"factor": 2.0}], ids=str)
def test_longropes_own_scale_is_refused(option):
    with pytest.raises(UserError, match="its longrope positions have a scale of"):
        new_model(config("phi3", LONGROPE | option, original_max_position_embeddings=64))
    new_model(config("phi3", LONGROPE, original_max_position_embeddings=64))


def test_a_command_refuses_a_model_that_ignores_a_scaling(tiny_checkpoint, tmp_path):
    scaling = {"type": "linear", "factor": 4.0}
    folder = copied(tiny_checkpoint("qwen3"), tmp_path / "model", model_type="mixtral", rope_scaling=scaling)
    done = called("generate", "--model", folder, "--prompt", "a", "--max-tokens", 1)
    assert done.returncode == 2
    assert ONE_MESSAGE in " ".join(done.stderr.split())
