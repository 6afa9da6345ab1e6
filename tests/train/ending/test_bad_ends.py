"""Steps that end badly: numbers that are not finite, rows that overflow on one rank, and one that macOS ends."""

import json
import re
import shutil

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest

from checkpoint_copies import rewritten
from deltatune.data import Batch
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.batch_loss import full_loss
from deltatune.train.ending import early_end
from deltatune.train.evaluation.nonfinite import cause, first_place
from deltatune.train.saved import state


class Layer(nn.Module):
    """A linear layer that can spoil its output, or only its gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.spoil = None

    def __call__(self, x):
        out = self.linear(x)
        if self.spoil == "output":
            out = out * mx.array(float("inf")) * 0
        if self.spoil == "gradient":
            # The derivative of sqrt at 0 is infinite, and infinity times the 0 of x * 0 is NaN.
            out = out + mx.sqrt(x * 0)
        return out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = [Layer() for _ in range(3)]
        self.head = nn.Linear(8, 11)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def model():
    mx.random.seed(0)
    return Model()


@pytest.fixture
def watched(model):
    return [(f"layer {index}", layer) for index, layer in enumerate(model.layers)]


def batch(source="data.jsonl:7"):
    tokens = np.arange(6, dtype=np.int32)[None]
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((1, 5), np.float32), None, ((source,),), ((5,),))


def test_a_sound_batch_has_no_cause(model, watched):
    assert first_place(model, full_loss(model), batch(), watched) is None
    assert cause(model, full_loss(model), [batch()], watched).startswith("no cause was found")


def test_a_parameter_behind_the_first_layer(model, watched):
    model.layers[0].spoil = "gradient"
    found = first_place(model, full_loss(model), batch(), watched)
    assert found == "the gradient of embed.weight is not finite"


def test_the_batch_is_named_and_the_layers_are_as_before(model, watched):
    model.layers[2].spoil = "output"
    kinds = [type(layer) for layer in model.layers]
    assert cause(model, full_loss(model), [batch("a:1")], watched).endswith("not finite, in float32; batch: a:1")
    assert [type(layer) for layer in model.layers] == kinds


def test_one_rank_overflows_and_rank_0_names_the_layer(launch, options, tiny_checkpoint, data_folder, tmp_path):
    """A token of the second row alone has an embedding from which the first layer overflows."""
    source = tiny_checkpoint("qwen3_5", dtype=mx.float16, num_hidden_layers=2, full_attention_interval=2)
    model = shutil.copytree(source, tmp_path / "model")
    data = shutil.copytree(data_folder, tmp_path / "data")
    rows = [{"text": "a dog"}, {"text": "a fox"}]
    (data / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "train.jsonl").write_text("".join(json.dumps({"text": "a dog"}) + "\n" for _ in range(4)))
    (data / "test.jsonl").unlink()
    tokenizer = mlx_lm.load(str(source))[1]
    tokens = sorted(set(tokenizer.encode("a fox")) - set(tokenizer.encode("a dog")))
    with rewritten(model / "model.safetensors") as tensors:
        # The largest number of float16, to which the first layer adds a little.
        tensors["language_model.model.embed_tokens.weight"][mx.array(tokens)] = 65504.0
        name = "language_model.model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name] * 3000
    changed = {"model": str(model), "data": str(data), "batch_size": 2, "adapter_path": str(tmp_path / "out")}
    done = launch(options | changed)
    assert (done.stdout + done.stderr).count("exited with code 2") == 2
    assert done.stderr.count("is the first that is not finite, in float16") == 1
    assert "language_model.model.layers.0 (delta)" in done.stderr


TIMEOUT = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
)
DISPLAY = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)
PIECES = r"--resume --grad-checkpoint continues it, with long rows in pieces"


def test_it_is_recognised_and_the_state_is_saved(make_trainer, run_with, tmp_path):
    trainer = make_trainer(iters=3, val_batches=0, grad_accumulation_steps=1)

    def ended(iterations, _):
        if iterations.progress.iteration == 1:
            raise RuntimeError(TIMEOUT)

    said = rf"it kept the GPU for longer .*Timeout.* saved in .*state\. {PIECES}; AGX_RELAX.*=1 in"
    with pytest.raises(UserError, match=rf"{said}.*--max-seq-length 32 \(now 64\) makes steps shorter") as raised:
        run_with(trainer, ended)
    assert "The state after iteration 1 is saved" in str(raised.value)
    assert state.peek(state.state_path(tmp_path / "out")).iteration == 1
    config = TrainConfig(grad_checkpoint=True)
    said = early_end._too_long_for_macos(RuntimeError(DISPLAY), config, "It is saved.")
    assert re.search(r"it kept the display waiting .* It is saved\. --resume continues it; AGX", said)
    assert early_end._too_long_for_macos(RuntimeError("[METAL] another"), config, "") is None


def test_a_run_that_deleted_an_earlier_one_says_how_it_goes_on(make_trainer, run_with):
    """--overwrite and --resume are refused together."""

    def ended(*_):
        raise RuntimeError("an error of MLX")

    with pytest.raises(RuntimeError) as raised:
        run_with(make_trainer(iters=3, val_batches=0, overwrite=True), ended)
    assert raised.value.__notes__[0].endswith("Run the same command with --resume in place of --overwrite to continue.")
