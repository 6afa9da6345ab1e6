"""Known faults of mlx-lm's models are named by the doctor, and by runs with rows that reach them."""

import json

import pytest

from conftest import write_checkpoint
from console import called
from deltatune.models.known_faults import known_faults
from deltatune.models.transformers_configs import completed

WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
SENTENCE = (
    "mlx-lm's qwen3 has no sliding window: beyond 16 tokens its logits are not those of transformers, where a token "
    "sees the last 16 alone."
)
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
}
# Of four layers the last two take the keys of the first two.
SHARED_KEYS = {
    "model_type": "gemma3n_text",
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    "num_kv_shared_layers": 2,
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


def test_the_doctor_names_a_known_fault(model):
    assert f"! {SENTENCE}" in words(called("doctor", "--model", model))


def test_a_run_names_it_where_a_row_is_longer_than_the_window(model, data, tmp_path):
    options = ["--model", model, "--iters", 1, "--batch-size", 1, "--adapter-path", tmp_path / "out"]
    text = words(called("train", *options, "--data", data(LONG)))
    assert text.count(f"Note: {SENTENCE} Of ") == 1
    assert "sliding window" not in words(called("train", *options, "--data", data(SHORT)))


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--batch-size", 1],
        ["eval", "--memory", "1GB"],
        pytest.param(["eval"], marks=pytest.mark.weekly),
        pytest.param(["plan", "--memory", "1GB"], marks=pytest.mark.weekly),
    ],
)
def test_other_commands_name_it_too(command, model, data):
    text = words(called(*command, "--model", model, "--data", data(LONG)))
    assert text.count(f"Note: {SENTENCE} Of ") == 1


def test_the_rows_of_a_stream_may_be_as_long_as_the_options_allow(model, data, tmp_path):
    options = ["--model", model, "--iters", 1, "--batch-size", 1, "--adapter-path", tmp_path / "out", "--streaming"]
    text = words(called("train", *options, "--data", data(SHORT), "--max-seq-length", 64))
    assert f"Note: {SENTENCE} Of 9 rows it reaches 1." in text


@pytest.mark.bad_input("Gemma 3n, whose layers with shared keys mlx-lm computes with other keys unless it generates")
def test_losses_of_no_model_are_refused(data, tmp_path):
    """Without a cache mlx-lm's last layers have keys of their own; a model that shares none is trained."""
    config = {"model_type": "gemma3n", "transformers_version": "5.23.0", "text_config": SHARED_KEYS}
    folder = write_checkpoint(tmp_path / "shared", completed(config))
    for command in (["eval"], ["train", "--iters", 1, "--adapter-path", tmp_path / "out"]):
        done = called(*command, "--model", folder, "--data", data(SHORT))
        assert done.returncode == 2
        assert "takes those of an earlier layer" in " ".join(done.stderr.split())
    assert called("generate", "--model", folder, "--prompt", "a", "--max-tokens", 2).returncode == 0
    alone = completed(config | {"text_config": SHARED_KEYS | {"num_kv_shared_layers": 0}})
    assert called("eval", "--model", write_checkpoint(tmp_path / "alone", alone), "--data", data(SHORT)).returncode == 0


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
        {"model_type": "llama"},
        {"model_type": "unknown"},
        {},
    ],
)
def test_models_without_a_known_fault(config):
    assert known_faults(config) == []
