"""Known faults of mlx-lm's models are named by the doctor, and by runs with rows that reach them."""

import json

import pytest

from console import called, deltatune
from deltatune.models.known_faults import known_faults

WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
SENTENCE = (
    "mlx-lm's qwen3 has no sliding window: beyond 16 tokens its logits are not those of transformers, where a token "
    "sees the last 16 alone."
)
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


def test_the_doctor_names_a_known_fault(model, tiny_checkpoint):
    assert f"! {SENTENCE}" in words(called("doctor", "--model", model))
    assert "sliding window" not in words(called("doctor", "--model", tiny_checkpoint("qwen3")))


def test_a_run_names_it_where_a_row_is_longer_than_the_window(model, data, tmp_path):
    options = ["--model", model, "--iters", 1, "--batch-size", 1, "--adapter-path", tmp_path / "out"]
    text = words(deltatune("train", *options, "--data", data(LONG)))
    assert text.count(f"Note: {SENTENCE} The longest row has ") == 1
    assert "sliding window" not in words(deltatune("train", *options, "--data", data(SHORT)))


@pytest.mark.parametrize(
    "command", [["eval"], ["plan", "--batch-size", 1], ["eval", "--memory", "1GB"], ["plan", "--memory", "1GB"]]
)
def test_other_commands_name_it_too(command, model, data):
    text = words(called(*command, "--model", model, "--data", data(LONG)))
    assert text.count(f"Note: {SENTENCE} The longest row has ") == 1


def test_the_rows_of_a_stream_may_be_as_long_as_the_options_allow(model, data, tmp_path):
    options = ["--model", model, "--iters", 1, "--batch-size", 1, "--adapter-path", tmp_path / "out", "--streaming"]
    text = words(called("train", *options, "--data", data(SHORT), "--max-seq-length", 64))
    assert f"Note: {SENTENCE} The longest row has 64." in text


@pytest.mark.parametrize(
    ("config", "beyond"),
    [
        # Transformers' default is a window; released configs without one say null.
        ({"model_type": "mistral"}, [4096]),
        ({"model_type": "mistral", "sliding_window": None}, []),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral", "sliding_window": 8}}, [8]),
        ({"model_type": "gemma2"}, [4096]),
        ({"model_type": "qwen3", "sliding_window": 8}, []),
        ({"model_type": "qwen2_moe"}, []),
        ({"model_type": "qwen2_moe", "norm_topk_prob": True}, [0]),
        ({"model_type": "glm"}, [0]),
        ({"model_type": "jamba"}, [0]),
        ({"model_type": "llama"}, []),
        ({"model_type": "unknown"}, []),
    ],
)
def test_from_which_length_on_a_model_is_wrong(config, beyond):
    assert [fault.beyond for fault in known_faults(config)] == beyond
