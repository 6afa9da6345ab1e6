"""Known faults of mlx-lm's models are named by doctor and runs; scaled positions are transformers' or refused."""

import contextlib
import json
import math

import mlx.core as mx
import numpy as np
import pytest

from checkpoint_copies import copied
from conftest import write_checkpoint
from console import called
from deltatune import upstream
from deltatune.doctor import examination, implementations, probes
from deltatune.errors import UserError
from deltatune.models.known_faults import known_faults
from deltatune.models.load import load_model, new_model
from deltatune.models.transformers_configs import completed
from families import OTHERS, PLAIN

WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
SENTENCE = (
    "mlx-lm's qwen3 has no sliding window: beyond 16 tokens its logits are not those of transformers, where a token "
    "sees the last 16 alone."
)
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
}
SHORT = {"text": "a dog"}
LONG = {"text": "the quick brown fox jumps over the lazy dog, " * 3}


@pytest.fixture
def model(tiny_checkpoint):
    return tiny_checkpoint("qwen3", num_hidden_layers=2, **WINDOW)


@pytest.fixture
def data(tmp_path):
    """data(row): a folder with that row in every split."""

    def write(row):
        for split in ("train", "valid", "test"):
            (tmp_path / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 4)
        return tmp_path

    return write


def words(done):
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_the_doctor_names_a_known_fault(model, monkeypatch):
    """Whatever else it says, which takes it seconds."""
    for module, name in ((implementations, "findings"), (implementations, "times"), (probes, "faults")):
        monkeypatch.setattr(module, name, list)
    for module, name in ((implementations, "build"), (examination, "sweep")):
        monkeypatch.setattr(module, name, lambda _: [])
    monkeypatch.setattr(examination, "_patched", lambda: contextlib.nullcontext(examination.Patches()))
    assert f"! {SENTENCE}" in words(called("doctor", "--model", model))


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--iters", 1],
        ["plan"],
        ["eval", "--memory", "1GB"],
        pytest.param(["eval"], marks=pytest.mark.weekly),
        pytest.param(["plan", "--memory", "1GB"], marks=pytest.mark.weekly),
    ],
)
def test_a_command_names_it_where_a_row_is_longer_than_the_window(command, model, data, tmp_path):
    out = ["--adapter-path", tmp_path / "out"] if command[0] == "train" else []
    text = words(called(*command, "--batch-size", 1, "--model", model, "--data", data(LONG), *out))
    assert text.count(f"Note: {SENTENCE} Of ") == 1
    if command[0] == "train":
        assert "sliding window" not in words(called("eval", "--model", model, "--data", data(SHORT)))


def test_the_rows_of_a_stream_may_be_as_long_as_the_options_allow(model, data, tmp_path):
    options = ["--model", model, "--iters", 1, "--batch-size", 1, "--adapter-path", tmp_path / "out", "--streaming"]
    text = words(called("train", *options, "--data", data(SHORT), "--max-seq-length", 64))
    assert f"Note: {SENTENCE} Of 9 rows it reaches 1." in text


@pytest.mark.bad_input("Gemma 3n, whose layers with shared keys mlx-lm computes with other keys unless it generates")
def test_losses_of_no_model_are_refused(data, tmp_path):
    """Without a cache mlx-lm's last layers have keys of their own."""
    config = {"model_type": "gemma3n", "transformers_version": "5.23.0", **OTHERS["gemma3n"]}
    folder = write_checkpoint(tmp_path / "shared", completed(config))
    for command in (["eval"], ["train", "--iters", 1, "--adapter-path", tmp_path / "out"]):
        done = called(*command, "--model", folder, "--data", data(SHORT))
        assert done.returncode == 2
        assert "takes those of an earlier layer" in " ".join(done.stderr.split())
    assert called("generate", "--model", folder, "--prompt", "a", "--max-tokens", 2).returncode == 0


@pytest.mark.parametrize(
    ("config", "right", "wrong"),
    [
        # Transformers' default is a window; released configs without one say null.
        ({"model_type": "mistral"}, 4096, 4097),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral", "sliding_window": 8}}, 8, 9),
        ({"model_type": "gemma2"}, 4096, 4097),
        ({"model_type": "phi3", **LONGROPE}, 65, 64),
        ({"model_type": "qwen2_moe", "norm_topk_prob": True}, 0, 1),
        ({"model_type": "ernie4_5_moe"}, 0, 1),
        ({"model_type": "falcon_h1", "key_multiplier": 0.5}, 0, 1),
        ({"model_type": "mamba2"}, 0, 1),
        ({"model_type": "falcon_h1", "mamba_rms_norm": True, "mamba_n_groups": 2}, 0, 1),
        ({"model_type": "gemma"}, 0, 1),
        ({"model_type": "glm"}, 0, 1),
        ({"model_type": "gpt_neox"}, 0, 1),
        ({"model_type": "gpt_bigcode"}, 0, 1),
        ({"model_type": "jamba"}, 0, 1),
        ({"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}, 0, 1),
    ],
)
def test_which_rows_of_a_model_are_wrong(config, right, wrong):
    (fault,) = known_faults(config)
    assert wrong in fault.lengths
    assert right not in fault.lengths


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen3", "sliding_window": 8},
        {"model_type": "qwen2_moe"},
        {"model_type": "falcon_h1", "mamba_n_groups": 2},
        {"model_type": "mamba2", "n_groups": 1},
        {"model_type": "gemma3n_text", "num_kv_shared_layers": 0},
        {"model_type": "unknown"},
        {},
    ],
)
def test_models_without_a_known_fault(config):
    assert known_faults(config) == []


SIZES = PLAIN | {"num_hidden_layers": 1, "head_dim": 16, "max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
STRETCHED = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
STRETCHED |= {"original_max_position_embeddings": 64}
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


def test_scaling_in_its_old_form_is_refused_in_a_checkpoint_too(tiny_checkpoint, tmp_path):
    old = {"model_type": "mixtral", "rope_scaling": {"type": "linear", "factor": 4.0}}
    with pytest.raises(UserError, match=ONE_MESSAGE):
        load_model(copied(tiny_checkpoint("qwen3"), tmp_path / "model", **old))


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
        new_model(config("phi3", STRETCHED | option, original_max_position_embeddings=64))
    new_model(config("phi3", STRETCHED, original_max_position_embeddings=64))
