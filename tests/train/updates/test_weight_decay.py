"""Weight decay leaves norms, biases and A_log out in full fine-tuning, as transformers does."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from deltatune.options.config import TrainConfig
from deltatune.train.batch_loss import full_loss
from deltatune.train.distributed import World
from deltatune.train.setup import build_step
from deltatune.train.updates.optimizer import OPTIMIZERS, build_optimizer, undecayed

RATE, DECAY = 0.25, 0.5
#: The ends of the names that decay leaves out in a hybrid model of Qwen3.5.
LEFT_OUT = ("layernorm.weight", "norm.weight", "A_log", "dt_bias")


@pytest.fixture
def trained(run, tmp_path, checkpoint, data_folder):
    """trained(decay, *flags) -> the code, the output, and the tensors after one update of full fine-tuning."""

    def call(decay, *flags, optimizer="adamw", out="out"):
        settings = {"optimizer_config": {optimizer: {"weight_decay": decay}}}
        (tmp_path / "run.yaml").write_text(json.dumps(settings))
        words = ["--model", checkpoint, "--data", data_folder, "--iters", 1, "--batch-size", 2, "--val-batches", 0]
        words += ["--fine-tune-type", "full", "--optimizer", optimizer, "--learning-rate", RATE]
        words += ["-c", tmp_path / "run.yaml", "--adapter-path", tmp_path / out, "--overwrite", *flags]
        code, said, err = run("train", *words)
        saved = tmp_path / out / "model.safetensors"
        return code, said + err, mx.load(str(saved)) if saved.is_file() else {}

    return call


@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.weekly) for name in ("adamw8bit", "lion"))]
)
def test_one_update_decays_all_but_norms_biases_and_a_log(trained, checkpoint, optimizer):
    """Two runs with one gradient differ by rate * decay * w, in float64, where w decays, and in no bit elsewhere."""
    before = {name: np.array(w, np.float64) for name, w in mx.load(str(checkpoint / "model.safetensors")).items()}
    code, said, decayed = trained(DECAY, optimizer=optimizer)
    assert code == 0, said
    _, silent, plain = trained(0, optimizer=optimizer)
    assert "Weight decay" not in silent
    moved = [name for name in before if not np.array_equal(np.array(plain[name], np.float64), before[name])]
    left_out = [name for name in moved if name.endswith(LEFT_OUT)]
    assert {name.rpartition(".")[2] for name in left_out} == {"weight", "A_log", "dt_bias"}
    count = f"{len(left_out)} norms, biases and A_log"
    assert f"Weight decay: 0.5, but of {count} none" in said
    assert len(moved) > 2 * len(left_out)
    for name in moved:
        gone = np.array(plain[name], np.float64) - np.array(decayed[name], np.float64)
        stays = name in left_out
        expected = 0 * before[name] if stays else RATE * DECAY * before[name]
        # Either run rounds 1 - rate * decay, its product and the step to fp32, at numbers of up to RATE and w.
        most = 0 if stays else 8 * 2**-24 * (np.abs(before[name]).max() + 10 * RATE)
        np.testing.assert_allclose(gone, expected, rtol=0, atol=most, err_msg=name)


def test_adapters_decay_as_they_did(trained):
    code, said, _ = trained(DECAY, "--fine-tune-type", "dora")
    assert code == 0, said
    assert "Weight decay" not in said


class Named(nn.Module):
    """Norms that their names alone, and their classes alone, tell; and names that only sound like one."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(4)
        self.norm_f = nn.RMSNorm(4)
        self.q_norm = nn.Linear(4, 4, bias=False)
        self.normal = nn.Linear(4, 4)
        self.A_log = mx.zeros(4)
        self.dt_bias = mx.zeros(4)
        self.D = mx.zeros(4)
        self.conv1d = nn.Conv1d(4, 4, 2)


def test_norms_are_found_by_class_and_by_name():
    decays = {path for path, _ in tree_flatten(Named().parameters())} - set(undecayed(Named()))
    assert decays == {"normal.weight", "D", "conv1d.weight"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_leaves_them_out(name):
    """One update of a model with a weight decay, and of one without: norms and biases are the same to the bit."""

    def after(decay):
        mx.random.seed(3)
        model = nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 7))
        settings = {name: {"weight_decay": decay} if decays else {}}
        given = {"optimizer": name, "optimizer_config": settings}
        config = TrainConfig(**given, learning_rate=1e-2, warmup=0.0, fine_tune_type="full")
        step = build_step(model, build_optimizer(config), full_loss(model), config, World())
        gradients = step.bundles.join(model.parameters())
        step.update(gradients, mx.array(1.0), mx.array(1.0))
        mx.eval(model.parameters())
        return dict(tree_flatten(model.parameters()))

    decays = hasattr(build_optimizer(TrainConfig(optimizer=name)), "weight_decay")
    without, with_decay = after(0.0), after(0.5)
    for path in ("layers.1.weight", "layers.1.bias", "layers.2.bias"):
        assert mx.array_equal(without[path], with_decay[path]), path
    if decays:
        assert not mx.array_equal(without["layers.2.weight"], with_decay["layers.2.weight"])
