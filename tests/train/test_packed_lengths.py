"""Tests that packed rows longer than a length of a model's config give the loss of their documents, or are refused."""

import json
import re

import pytest

from conftest import write_checkpoint
from console import called
from families import PLAIN

BASE = PLAIN | {"head_dim": 16, "rope_theta": 10000.0, "tie_word_embeddings": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
WINDOWS = ["sliding_attention", "full_attention"] * 2
CONFIGS = {
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "ministral3 windows": {
        "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4096},
        "sliding_window": 48,
        "layer_types": WINDOWS,
    },
    "qwen3 yarn": {"rope_scaling": YARN},
    "qwen3 dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
    "gemma3_text": {"sliding_window": 48, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gpt_oss": {"sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": WINDOWS},
    "olmo3": {"sliding_window": 48, "layer_types": WINDOWS, "attention_bias": False, "rope_scaling": YARN},
    "phi3": {
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0 + at for at in range(8)]},
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twelve documents of at most 64 tokens."""
    folder = tmp_path_factory.mktemp("documents")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "does", "not", "mind", "it"]
    texts = [" ".join(words[(3 * at + 5 * step) % len(words)] for step in range(6 + at)) for at in range(12)]
    (folder / "test.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(case) -> the folder of a model with random weights."""
    made = {}

    def factory(case):
        if case not in made:
            config = {"model_type": case.split()[0]} | BASE | CONFIGS[case]
            made[case] = write_checkpoint(tmp_path_factory.mktemp("model") / "model", config)
        return made[case]

    return factory


def loss(done):
    assert done.returncode == 0, done.stderr
    return float(re.search(r"loss ([\d.]+)", done.stdout)[1])


def words(model, data, length, *more):
    return ["eval", "--model", model, "--data", data, "--batch-size", "2", "--max-seq-length", length, *more]


@pytest.mark.bad_input("packed rows beyond a length from which on a model scales its positions")
def test_ministral_3_is_packed_up_to_its_original_length_and_refused_beyond(saved, data):
    model = saved("ministral3")
    expected = loss(called(*words(model, data, 128)))
    assert loss(called(*words(model, data, 64, "--pack"))) == expected
    refused = called(*words(model, data, 128, "--pack"))
    assert refused.returncode == 2
    assert "longer than original_max_position_embeddings, here 20 in place of 64" in refused.stderr
    assert "rows of at most 64 tokens (--max-seq-length" in refused.stderr


def test_positions_that_depend_on_the_row_s_length_are_refused_beyond_the_model_s(saved, data):
    model = saved("qwen3 dynamic")
    expected = loss(called(*words(model, data, 64)))
    assert loss(called(*words(model, data, 64, "--pack"))) == expected
    refused = called(*words(model, data, 128, "--pack"))
    assert refused.returncode == 2
    assert "max_position_embeddings, here 20 in place of 64" in refused.stderr


@pytest.mark.parametrize(
    "case",
    ["gemma3_text", "olmo3", "phi3"]
    + [pytest.param(case, marks=pytest.mark.weekly) for case in ("ministral3 windows", "qwen3 yarn", "gpt_oss")],
)
def test_rows_beyond_windows_and_original_lengths_give_the_loss_of_their_documents(saved, data, case):
    model = saved(case)
    expected = loss(called(*words(model, data, 128)))
    assert loss(called(*words(model, data, 128, "--pack"))) == expected
