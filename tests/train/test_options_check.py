"""Mistakes that the options alone show are reported before a model is loaded, and so are rows that are too long.

Rows and packed rows beyond a length of a model's config have the loss of their documents, or are refused.
"""

import json
import re
from types import SimpleNamespace

import pytest
from mlx_lm.models import gpt2

from conftest import write_checkpoint
from console import called
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.options_check import check_options, check_positions, learned_positions, unscaled_positions
from families import OTHERS, PLAIN

CONFIG = OTHERS["gpt2"] | {"model_type": "gpt2", "vocab_size": 320}
BASE = PLAIN | {"head_dim": 16, "rope_theta": 10000.0, "tie_word_embeddings": True}
DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model():
    return gpt2.Model(gpt2.ModelArgs.from_dict(CONFIG))


def test_a_table_of_positions_is_found_where_there_is_one(model, tiny_model):
    assert learned_positions(model) == 64
    assert learned_positions(tiny_model("qwen3_5")) is None


@pytest.mark.parametrize(("positions", "longest", "fits"), [(64, 512, True), (65, 512, False), (500, 64, True)])
def test_a_batch_is_no_wider_than_the_table(model, positions, longest, fits):
    """A row that is longer than max_seq_length is cut."""
    examples = [SimpleNamespace(positions=7, source="a:1"), SimpleNamespace(positions=positions, source="a:2")]
    if fits:
        check_positions(model, longest, examples)
        return
    with pytest.raises(UserError, match=r"^a:2: its row has 96 positions, .* learned 64: give --max-seq-length 64\.$"):
        check_positions(model, longest, examples)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"type": "dynamic", "factor": 4.0}, 64),
        ({"type": "linear", "factor": 4.0}, None),
        ({"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, None),
        (None, None),
    ],
)
def test_positions_that_depend_on_the_row_s_length_are_found(tiny_model, scaling, positions):
    made = tiny_model("qwen3", rope_scaling=scaling, max_position_embeddings=64)
    assert unscaled_positions(made) == positions
    assert learned_positions(made) is None


@pytest.mark.bad_input("a row that is longer than {case}")
@pytest.mark.parametrize(
    ("case", "config", "said"),
    [
        ("a model's table of learned positions", CONFIG, ":1: its row has"),
        (
            "rotary positions of dynamic scaling stay the same",
            BASE | DYNAMIC | {"model_type": "qwen3"},
            "beyond 64 the model's rotary positions depend on the length of the row",
        ),
    ],
)
def test_commands_refuse_such_a_row(case, config, said, tmp_path):
    folder = write_checkpoint(tmp_path / "model", config)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": "the quick brown fox " * 40}) + "\n")
    flags = ("--model", folder, "--data", tmp_path, "--batch-size", 1)
    run = ("--iters", 1, "--adapter-path", tmp_path / "out")
    for command, *more in (("plan", *run), ("train", *run), ("eval",)):
        refused = called(command, *flags, *more)
        assert refused.returncode == 2, refused.stdout
        assert said in refused.stderr
        assert "give --max-seq-length 64." in refused.stderr
    trained = called("train", *flags, *run, "--max-seq-length", 64)
    assert trained.returncode == 0, trained.stderr


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
    "qwen3 dynamic": DYNAMIC,
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
@pytest.mark.parametrize(
    ("name", "whole", "said"),
    [("ministral3", 128, "original_max_position_embeddings"), ("qwen3 dynamic", 64, "longer")],
)
def test_rows_are_packed_up_to_the_length_that_scales_positions_and_refused_beyond(saved, data, name, whole, said):
    model = saved(name)
    expected = loss(called(*words(model, data, whole)))
    assert loss(called(*words(model, data, 64, "--pack"))) == expected
    refused = called(*words(model, data, 128, "--pack"))
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "max_position_embeddings, here 20 in place of 64" in refused.stderr
    assert "rows of at most 64 tokens (--max-seq-length" in refused.stderr


@pytest.mark.parametrize(
    "case",
    ["gemma3_text", "olmo3", "phi3"]
    + [pytest.param(case, marks=pytest.mark.weekly) for case in ("ministral3 windows", "qwen3 yarn", "gpt_oss")],
)
def test_rows_beyond_windows_and_original_lengths_give_the_loss_of_their_documents(saved, data, case):
    model = saved(case)
    expected = loss(called(*words(model, data, 128)))
    assert loss(called(*words(model, data, 128, "--pack"))) == expected


@pytest.mark.bad_input("an accumulation longer than the run, a single update at a rate of 0, files as sample prompts")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"iters": 3, "grad_accumulation_steps": 4}, "4 iterations make one update, and the run has 3"),
        (
            {"iters": 7, "grad_accumulation_steps": 4, "lr_schedule": {
                "name": "linear_schedule", "arguments": [1e-4, 0, 10], "warmup": 2}},
            "its learning rate is 0",
        ),
        ({"sample_prompts": ["why?", "x" * 5000, "none.jsonl"]}, "sample_prompts: none.jsonl: no such file"),
        ({"sample_prompts": [__file__]}, "is a file; a file of prompts has a name that ends with .jsonl"),
    ],
)  # fmt: skip
def test_a_run_that_would_change_nothing_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        check_options(TrainConfig(**options))


def test_an_epoch_shorter_than_an_accumulation_is_refused(make_trainer):
    with pytest.raises(UserError, match="12 iterations make one update, and the run has 11"):
        make_trainer(epochs=1, grad_accumulation_steps=12)


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"learning_rate": 100.0, "optimizer": "adamw"}, True),
        ({"learning_rate": 100.0, "optimizer": "sgd"}, False),
        ({"learning_rate": 1e-3, "optimizer": "AdamW"}, False),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1.0, 10]}}, True),
    ],
)
def test_a_learning_rate_that_is_hardly_meant_is_noted(options, noted):
    assert len(check_options(TrainConfig(**options))) == noted


def test_all_this_comes_before_loading(checkpoint, data_folder, tmp_path):
    given = ["train", "--model", checkpoint, "--data", data_folder, "--adapter-path", tmp_path / "out"]
    for flag, value, said in (
        ("--optimizer", "adamww", "optimizer: unknown name 'adamww'"),
        ("--resume-adapter-file", "none.safetensors", "adapter none.safetensors: no such file"),
    ):
        wrong = called(*given, flag, value)
        assert wrong.returncode == 2
        assert said in wrong.stderr
        assert "Loading" not in wrong.stdout
    high = called(*given, "--learning-rate", 100, "--iters", 1, "--batch-size", 64)
    assert high.stdout.index("Note: the learning rate is 100") < high.stdout.index("Loading")
