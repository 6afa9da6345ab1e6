"""A result that is not a number is never a result: finite weights with overflowing layers end with a layer's name."""

import io
import json
import shutil
import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest
from PIL import Image

import deltatune
from checkpoint_copies import rewritten
from deltatune.errors import NotFiniteError, UserError
from deltatune.models import batch_decoder as answer
from deltatune.models.batch_decoder import is_covered
from deltatune.models.generate import Sampling, finite
from deltatune.models.head import scored, split_head
from deltatune.models.load import load
from deltatune.patches import patched
from new_tokens import write_data

LAYER = "language_model.model.layers.1 (attention)"
FIRST = f"the output of {LAYER} is the first that is not finite, in float16"
COMMANDS = ("eval", "eval --memory", "generate", "generate --memory", "train", "samples", "batch")
REMEDY = "convert the model to bfloat16 or float32 (mlx_lm.convert --dtype bfloat16)"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("overflow") / "data", new=False)


@pytest.fixture(scope="module")
def overflowing(tiny_checkpoint, tmp_path_factory):
    """A model in float16 of finite weights, with a last layer that gives more than 65,504."""
    source = tiny_checkpoint("qwen3_5", dtype=mx.float16, num_hidden_layers=2, full_attention_interval=2)
    folder = shutil.copytree(source, tmp_path_factory.mktemp("overflow") / "model")
    with rewritten(folder / "model.safetensors") as tensors:
        for name in ("up_proj", "down_proj"):
            path = f"language_model.model.layers.1.mlp.{name}.weight"
            tensors[path] = mx.sign(tensors[path]) * 2000
        assert all(mx.isfinite(tensor).all().item() for tensor in tensors.values())
    return folder


def words(command, model, data, folder):
    """The words of a command by its name here; `train` and `samples` meet no loss before that of their own."""
    given = ["--model", model, "--data", data, "--batch-size", 2]
    train = ["train", *given, "--iters", 2, "--adapter-path", folder / "out"]
    return {
        "eval": ["eval", *given],
        "eval --memory": ["eval", *given, "--memory", "1MB"],
        "generate": ["generate", "--model", model, "--prompt", "the fox", "-m", 4],
        "generate --memory": ["generate", "--model", model, "--prompt", "the fox", "-m", 4, "--memory", "1MB"],
        "train": train,
        "samples": [*train, "--val-batches", 0, "--sample-prompts", "the fox"],
        "batch": [*train, "--val-batches", 0],
    }[command]


@pytest.mark.bad_input("`{command}` of finite weights whose activations overflow float16")
@pytest.mark.parametrize("command", COMMANDS)
def test_overflow_ends_with_the_layer_and_the_dtype(run, overflowing, data, tmp_path, command):
    code, said, err = run(*words(command, overflowing, data, tmp_path))
    assert code == 2, said
    assert FIRST in err
    assert err.count("deltatune: ") == 1
    assert "nan" not in said
    assert "!!" not in said
    assert (REMEDY in err) == (command != "batch")


def test_the_same_weights_in_float32_have_results(run, overflowing, data, tmp_path):
    """float32 is a way out, so the overflow is float16's."""
    folder = shutil.copytree(overflowing, tmp_path / "float32")
    with rewritten(folder / "model.safetensors") as tensors:
        tensors.update({name: tensor.astype(mx.float32) for name, tensor in tensors.items()})
    for command in ("eval", "generate"):
        code, said, err = run(*words(command, folder, data, tmp_path))
        assert code == 0, err
        assert "nan" not in said


@pytest.mark.bad_input("`chat` with a model whose probabilities are not finite")
def test_a_chat_ends(run, overflowing, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\na dog\n"))
    code, said, err = run("chat", "--model", overflowing, "-m", 4)
    assert code == 2
    assert FIRST in err
    assert err.count("deltatune: ") == 1
    assert "!!" not in said


@pytest.mark.parametrize("covered", [True, False], ids=["decoder", "mlx-lm"])
@pytest.mark.parametrize("temp", [None, 0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_row_of_the_head_spoils_every_probability(checkpoint, monkeypatch, covered, temp, value):
    """Though another token is chosen."""
    model = load(checkpoint).model
    head = (
        model.language_model.lm_head if "lm_head" in model.language_model else model.language_model.model.embed_tokens
    )
    head.weight[300] = value
    monkeypatch.setattr(answer, "is_covered", lambda model: covered and is_covered(model))
    sampler = None if temp is None else Sampling(temp).sampler()
    with patched(model), pytest.raises(NotFiniteError):
        answer.answer_all(model, load(checkpoint).tokenizer, [[1, 2, 3], [4, 5]], max_tokens=3, sampler=sampler)


@pytest.mark.parametrize("covered", [True, False], ids=["decoder", "mlx-lm"])
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_several_answers_at_once(overflowing, monkeypatch, covered, temp):
    monkeypatch.setattr("deltatune.train.evaluation.inference.Inference.try_token", lambda *_: None)
    monkeypatch.setattr(answer, "is_covered", lambda model: covered and is_covered(model))
    with pytest.raises(UserError, match="is the first that is not finite, in float16"):
        deltatune.generate(load(overflowing), ["the fox", "a dog"], max_tokens=3, temp=temp)


@pytest.mark.parametrize(
    ("spoiled", "first"),
    [("vision_tower.blocks.0.mlp", "the vision tower"), ("layers.0.mlp", "language_model.model.layers.0 (delta)")],
)
def test_an_answer_to_a_picture(run, tiny_vision_checkpoint, tmp_path, spoiled, first):
    folder = shutil.copytree(tiny_vision_checkpoint("qwen3_5"), tmp_path / "model")
    with rewritten(folder / "model.safetensors") as tensors:
        for name, tensor in tensors.items():
            large = mx.sign(tensor) * 3000 if spoiled in name and tensor.ndim == 2 else tensor
            tensors[name] = large.astype(mx.float16)
    Image.new("RGB", (32, 32), (200, 20, 90)).save(tmp_path / "a.png")
    words = ["generate", "--model", folder, "--prompt", "which?", "-m", 3, "--image", tmp_path / "a.png"]
    code, said, err = run(*words)
    assert code == 2, said
    assert f"the output of {first} is the first that is not finite, in float16" in err


def test_likelihoods(overflowing):
    model = load(overflowing).model
    with pytest.raises(NotFiniteError):
        scored(model, split_head(model, compare=False), [[1, 2, 3, 4]], [2])


def pieces(logprobs):
    for token, logprob in enumerate(logprobs):
        yield SimpleNamespace(logprobs=mx.full((9,), logprob), token=token)


@pytest.mark.parametrize(("at", "yielded"), [(0, 0), (1, 2), (3, 4)])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_token_in_the_middle_of_an_answer(at, yielded, value):
    """The first token is never handed on; that of a later one is, and nothing behind it."""
    seen, answers = [], [-1.0] * 4
    answers[at] = value
    handed_on = map(seen.append, finite(pieces(answers), [7, 8]))
    with pytest.raises(NotFiniteError) as error:
        list(handed_on)
    assert len(seen) == yielded
    (row,) = error.value.rows
    assert row[:2] == [7, 8]
    assert len(list(finite(pieces([-1.0] * 4), [7, 8]))) == 4


def test_training_is_saved_before_a_nonfinite_validation_loss(run, checkpoint, data, tmp_path):
    """Training in float32 goes on; a row of the validation data overflows after the first iterations."""
    folder, train = tmp_path / "data", tmp_path / "out"
    shutil.copytree(data, folder)
    words = ["train", "--model", checkpoint, "--data", folder, "--batch-size", 2, "--iters", 4, "--adapter-path", train]
    words += ["--steps-per-eval", 2, "--save-every", 100]
    from deltatune.train.evaluation.evaluate import Evaluation

    original, calls = Evaluation.__call__, []

    def spoiled(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            weight = self._model.layers[0].post_attention_layernorm.weight
            self._model.layers[0].post_attention_layernorm.weight = mx.full(weight.shape, 3e38)
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluation, "__call__", spoiled)
        code, said, err = run(*words)
    assert code == 2
    assert "after iteration 2: the loss is not finite: the output of" in err
    assert "in float32" in err
    assert f"The state after iteration 2 is saved in {train}" in err
    code, said, err = run(*words, "--resume")
    assert code == 0, err
    assert "Resuming after iteration 2 of 4" in said
    assert all(json.loads(line).get("val_loss", 0) < 100 for line in (train / "metrics.jsonl").read_text().splitlines())


def test_a_large_loss_has_no_infinite_perplexity(run, checkpoint, data, tmp_path):
    """A head of large weights is sure of wrong tokens: the loss is finite, and its perplexity no float."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    with rewritten(folder / "model.safetensors") as tensors:
        norm = next(name for name in tensors if name.endswith("model.norm.weight"))
        tensors[norm] = tensors[norm] * 1e5
    code, said, err = run("eval", "--model", folder, "--data", data, "--batch-size", 2)
    assert code == 0, err
    assert "test perplexity above 1e+304" in said
