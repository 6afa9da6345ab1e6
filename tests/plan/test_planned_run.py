"""A run in one Python call: within a bound of memory, with automatic checkpoints, and without a model."""

import json
import re
import sys
import time

import mlx.core as mx
import pytest

from deltatune import LoraConfig, PlannedRun, TrainConfig, finetune, generate
from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.ops.recomputation import Checkpoints
from deltatune.plan import fit, planned_run
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.device_limits import DeviceLimits
from deltatune.plan.placement import TooLittleMemoryError


@pytest.fixture(scope="module")
def options(tiny_checkpoint, tmp_path_factory):
    """Six layers of 0.8 MB each, which are most of a step's memory."""
    data = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"question {at}", "completion": f"answer {at} fox"} for at in range(8)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_checkpoint("qwen3_5", num_hidden_layers=6, full_attention_interval=3, intermediate_size=1024)
    training = {"iters": 2, "batch_size": 1, "max_seq_length": 32, "num_layers": 4, "learning_rate": 1e-2}
    return {"model": str(model), "data": str(data)} | training


LORA = {"rank": 2, "dropout": 0.1}


def config_of(options, folder, **changes):
    return TrainConfig(**options | changes, adapter_path=str(folder), lora_parameters=LoraConfig(**LORA))


@pytest.fixture
def of_command(run, options):
    """of_command(folder, **changes) -> the adapters of the same run by the command, and its output."""

    def trained(folder, **changes):
        file = folder.with_suffix(".yaml")
        file.write_text(json.dumps(options | changes | {"adapter_path": str(folder), "lora_parameters": LORA}))
        code, out, err = run("train", "-c", file)
        assert code == 0, err
        return (folder / "adapters.safetensors").read_bytes(), out

    return trained


def test_a_bounded_run_in_python_is_that_of_the_command(options, of_command, tmp_path, capsys):
    with pytest.raises(TooLittleMemoryError) as refused:
        finetune(config_of(options, tmp_path / "none", memory=1000))
    memory = round(float(re.search(r"tokens take ([\d.]+) MB", str(refused.value))[1]) * 1e6)
    loaded, result = finetune(config_of(options, tmp_path / "python", memory=memory))
    said = capsys.readouterr().out
    assert "6 of 6 layers" in said
    expected, by_command = of_command(tmp_path / "command", memory=memory)
    assert (tmp_path / "python" / "adapters.safetensors").read_bytes() == expected
    assert f"train loss {result.train_loss:.4f}" in by_command
    # The trained model is whole again: its layers are read where it is used.
    trained = dict(mx.load(str(tmp_path / "python" / "adapters.safetensors")))
    of_model = dict(loaded.model.named_modules())
    assert all(mx.array_equal(of_model[name.rpartition(".")[0]][name[-6:]], trained[name]) for name in trained)
    assert isinstance(generate(loaded, "question 3", max_tokens=2), str)


def test_automatic_checkpoints_in_python_have_the_bits_of_the_command(options, of_command, tmp_path, monkeypatch):
    """The command has memory for all residuals, and the run in Python lacks a byte of that."""
    expected, said = of_command(tmp_path / "command", grad_checkpoint="auto")
    assert "0 of 4 layers are recomputed" in said
    run = PlannedRun.of(config_of(options, tmp_path / "python", grad_checkpoint="auto"))
    plan = fit.Planner(run, ArrayLayout.measured()).at(*fit.shape(run), Checkpoints())
    with monkeypatch.context() as patch:
        patch.setattr(fit, "device_limits", lambda: DeviceLimits(None, plan.bytes.amount - 1, "", "a test"))
        trainer = run.trainer()
    trainer.run()
    assert trainer.progress.checkpointed_layers
    assert (tmp_path / "python" / "adapters.safetensors").read_bytes() == expected


def test_a_plan_is_announced_where_it_takes_longer_than_a_moment(options, tmp_path, monkeypatch, capsys):
    run = PlannedRun.of(config_of(options, tmp_path / "out"))
    run.trainer()
    assert "Planning" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(planned_run, "_MOMENT", 0.0)
    run.trainer()
    assert "Planning the step's memory\n" in capsys.readouterr().out
    monkeypatch.setattr(backend, "compares_times", lambda: True)
    with planned_run._announced(run.screen):
        time.sleep(0.1)
    assert "Planning the step's memory; at the first start Metal compiles each kernel" in capsys.readouterr().out


@pytest.mark.bad_input("`finetune` without a model or data")
@pytest.mark.parametrize(("missing", "message"), [("model", "model: expected the folder"), ("data", "data: ")])
def test_a_run_without_model_or_data_is_refused(options, tmp_path, missing, message):
    with pytest.raises(UserError, match=message):
        finetune(config_of(options, tmp_path / "out", **{missing: None}))
    assert not (tmp_path / "out").exists()
