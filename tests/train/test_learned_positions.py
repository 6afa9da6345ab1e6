"""Tests that rows longer than a table of learned positions are refused, beyond whose end MLX reads."""

import json
import shutil
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gpt2

from console import called
from deltatune.errors import UserError
from deltatune.train.learned_positions import check_positions, learned_positions, unscaled_positions
from families import OTHERS

CONFIG = OTHERS["gpt2"] | {"model_type": "gpt2", "vocab_size": 320}


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


@pytest.mark.bad_input("a row that is longer than rotary positions of dynamic scaling stay the same")
def test_rows_with_positions_that_depend_on_their_length_are_refused(tiny_checkpoint, tmp_path):
    scaling = {"type": "dynamic", "factor": 4.0}
    folder = tiny_checkpoint("qwen3", rope_scaling=scaling, max_position_embeddings=64)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": "the quick brown fox " * 40}) + "\n")
    flags = ("--model", folder, "--data", tmp_path, "--batch-size", 1)
    run = ("--iters", 1, "--adapter-path", tmp_path / "out")
    for command, *more in (("plan", *run), ("train", *run), ("eval",)):
        refused = called(command, *flags, *more)
        assert refused.returncode == 2, refused.stdout
        assert "beyond 64 the model's rotary positions depend on the length of the row" in refused.stderr
        assert "give --max-seq-length 64." in refused.stderr
    trained = called("train", *flags, *run, "--max-seq-length", 64)
    assert trained.returncode == 0, trained.stderr


@pytest.mark.bad_input("a row that is longer than a model's table of learned positions")
def test_train_and_plan_refuse_such_a_row(model, tiny_checkpoint, tmp_path):
    folder, data = shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "gpt2"), tmp_path / "data"
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    data.mkdir()
    (data / "train.jsonl").write_text(json.dumps({"text": "the quick brown fox " * 40}) + "\n")
    flags = ("--model", folder, "--data", data, "--batch-size", 1, "--iters", 1, "--adapter-path", tmp_path / "out")
    for command in ("plan", "train"):
        refused = called(command, *flags)
        assert refused.returncode == 2, refused.stdout
        assert "train.jsonl:1: its row has" in refused.stderr
        assert "give --max-seq-length 64." in refused.stderr
    trained = called("train", *flags, "--max-seq-length", 64)
    assert trained.returncode == 0, trained.stderr
