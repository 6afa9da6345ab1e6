"""Runs of which the teacher's layers stay on the disk: their bits, their lines, their memory."""

import dataclasses
import re

import mlx.core as mx
import pytest

from console import called
from deltatune import finetune
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.placement import TooLittleMemoryError
from killed_runs import same


@pytest.fixture(scope="module")
def teacher(tiny_checkpoint):
    """A checkpoint with the student's vocabulary and layers of 0.8 MB each."""
    sizes = {"num_hidden_layers": 4, "full_attention_interval": 3, "intermediate_size": 1024}
    return tiny_checkpoint("qwen3_5", seed=5, **sizes)


@pytest.fixture
def distil(checkpoint, teacher, data_folder, tmp_path):
    """distil(folder, **changes) trains a short run."""
    options = {"iters": 4, "batch_size": 2, "max_seq_length": 64, "grad_accumulation_steps": 2, "save_every": 2}
    options |= {"learning_rate": 1e-2, "steps_per_eval": 2, "val_batches": 1}
    options |= {"lr_schedule": "constant", "warmup": 0.0, "steps_per_report": 2}
    config = TrainConfig(
        model=str(checkpoint),
        data=str(data_folder),
        loss="distill",
        teacher=str(teacher),
        grad_checkpoint=True,
        lora_parameters=LoraConfig(rank=2),
        **options,
    )

    def train(folder, **changes):
        return finetune(dataclasses.replace(config, adapter_path=str(tmp_path / folder), **changes))

    return train


def least(distil, **changes):
    """Return the smallest memory that a run is given, as its refusal says."""
    with pytest.raises(TooLittleMemoryError) as refused:
        distil("refused", memory=1000, **changes)
    return round(float(re.search(r"tokens take ([\d.]+) MB", str(refused.value))[1]) * 1e6)


@pytest.mark.parametrize(
    "changes",
    [
        {"lmbda": 0.0, "pack": True},
        pytest.param({"lmbda": 1.0, "max_completion_length": 8}, marks=pytest.mark.weekly),
    ],
    ids=str,
)
def test_a_bounded_run_has_the_bits_of_one_without(changes, distil, tmp_path, capsys):
    distil("whole", **changes)
    memory = least(distil, **changes)
    capsys.readouterr()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    distil("bounded", iters=2, memory=memory, **changes)
    assert mx.get_peak_memory() - before <= memory
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 of 4 layers of the teacher" in shown
    assert "stay on the disk" in shown
    # A run may go on with another limit.
    distil("bounded", memory=memory + 1_000_000, resume=True, **changes)
    assert "3 of 4 layers of the teacher" in " ".join(capsys.readouterr().out.split())
    same(tmp_path / "whole", tmp_path / "bounded")


def test_a_teacher_that_fits_stays_in_memory(distil, checkpoint, teacher, data_folder, capsys):
    distil("out", memory=10**9, lmbda=0.0, fine_tune_type="full", iters=2)
    assert "all weights stay in memory" in " ".join(capsys.readouterr().out.split())
    plan = ["plan", "--model", checkpoint, "--data", data_folder, "--loss", "distill", "--teacher", teacher, "--memory"]
    assert "all weights stay in memory" in called(*plan, "1GB").stdout
    refused = called(*plan, "1MB")
    assert refused.returncode == 1
    assert "memory: 1.0 MB is too little. With all layers on the disk but two," in refused.stdout
