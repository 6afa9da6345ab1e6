"""Tests whole runs with bounded memory: their bits, their lines, and their ends."""

import dataclasses
import json
import os
import re
import shutil
import signal
import time
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import pytest

from console import called
from deltatune import finetune as train
from deltatune.cli import main
from deltatune.errors import UserError
from deltatune.machine import host_memory
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.options.generation import AnswerOptions
from deltatune.plan import placement
from deltatune.plan.device_limits import DeviceLimits
from deltatune.plan.placement import TooLittleMemoryError
from deltatune.train.by_layer import layer_step, store
from deltatune.train.by_layer.layer_inputs import INPUTS, InputsOnHost
from deltatune.train.by_layer.store import Store
from deltatune.train.ending.interrupt import StoppedError
from deltatune.train.saving import Saving
from killed_runs import adapters, result
from layer_runs import PlainRoom

pytestmark = pytest.mark.usefixtures("kept_forecasts")


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    """Layers of 0.8 MB each, which are most of a step's memory."""
    return tiny_checkpoint("qwen3_5", num_hidden_layers=4, full_attention_interval=3, intermediate_size=1024)


CONFIGURED = (
    "model", "data", "iters", "batch_size", "max_seq_length", "num_layers", "grad_checkpoint",
    "grad_accumulation_steps", "learning_rate", "steps_per_eval", "val_batches", "save_every",
)  # fmt: skip


@pytest.fixture
def config(model, data_folder, tmp_path):
    return TrainConfig(
        model=str(model),
        data=str(data_folder),
        adapter_path=str(tmp_path / "out"),
        iters=4,
        batch_size=1,
        max_seq_length=32,
        num_layers=2,
        grad_checkpoint=True,
        grad_accumulation_steps=2,
        learning_rate=1e-2,
        lr_schedule="constant",
        warmup=0.0,
        steps_per_eval=2,
        val_batches=2,
        save_every=1,
        lora_parameters=LoraConfig(rank=2, dropout=0.1),
    )


@pytest.fixture(scope="module")
def least():
    """least(config) -> the smallest memory that a run is given, as its refusal says."""
    known = {}

    def found(config):
        key = repr(dataclasses.replace(config, adapter_path="any"))
        if key not in known:
            with pytest.raises(TooLittleMemoryError) as refused:
                train(dataclasses.replace(config, memory=1000))
            known[key] = round(float(re.search(r"tokens take ([\d.]+) MB", str(refused.value))[1]) * 1e6)
        return known[key]

    return found


@pytest.fixture(scope="module")
def _whole():
    return []


# A run that answers, and measures a test set, has the bits of one that does not.
ASKED = {"test": True, "sample_prompts": ["question 3"]}


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    """Samples of a few tokens, since a token of a bounded run reads every layer."""
    monkeypatch.setattr(AnswerOptions, "max_tokens", 4)


@pytest.fixture
def no_room_for_inputs(monkeypatch):
    """No step is planned to fit in memory unless the inputs of its layers go to the disk."""
    planned = placement.Planner.at

    def too_much(*of_step, layer_inputs=None):
        plan = planned(*of_step, layer_inputs=layer_inputs)
        if layer_inputs == "disk":
            return plan
        return dataclasses.replace(plan, bytes=dataclasses.replace(plan.bytes, amount=10**12))

    monkeypatch.setattr(placement.Planner, "at", too_much)


@pytest.fixture
def whole(config, tmp_path_factory, capsys, _whole):
    """The folder of the run without a bound, and its output; all tests share it."""
    if not _whole:
        folder = tmp_path_factory.mktemp("whole") / "run"
        train(in_folder(config, folder, **ASKED))
        _whole.append((folder, capsys.readouterr().out))
    return _whole[0]


def in_folder(config, folder, **changes):
    return dataclasses.replace(config, adapter_path=str(folder), **changes)


def test_a_bounded_run_and_its_continuations_have_the_bits_of_one_without(
    config, least, whole, tmp_path, capsys, monkeypatch
):
    """Every layer on the disk, some of them, none: begun in one way and continued in another."""
    plain, grown = Saving.restore, []

    def restore(self):
        before = mx.get_active_memory()
        lines = plain(self)
        grown.append(mx.get_active_memory() - before)
        return lines

    monkeypatch.setattr(Saving, "restore", restore)
    all_of_them = least(config)
    more = all_of_them + 1_000_000
    folder, said_without = whole
    train(in_folder(config, tmp_path / "bounded", memory=all_of_them, **ASKED))
    said = capsys.readouterr().out
    assert "4 of 4 layers" in said
    assert re.search(r"Waited \d+\.\d s for the disk \(\d+%\), which gave 0\.(?!00)\d\d GB", said)
    answers = "(?m)^(?:Test loss|Iter .*sample).*"
    assert re.findall(answers, said) == re.findall(answers, said_without)
    assert len(re.findall(answers, said)) == 4
    for name, (first, then) in {"whole, then more": (None, more), "bounded, then whole": (all_of_them, None)}.items():
        train(in_folder(config, tmp_path / name, memory=first, iters=3))
        train(in_folder(config, tmp_path / name, memory=then, resume=True))
    assert re.search("[1-3] of 4 layers", capsys.readouterr().out)
    # Restoring a state reads no weight from the disk: a layer has 0.8 MB.
    assert grown[0] < 700_000
    for name in ("bounded", "whole, then more", "bounded, then whole"):
        assert adapters(tmp_path / name) == adapters(folder), name
    assert result(tmp_path / "bounded") == result(folder)


def test_a_bound_that_everything_fits_within_changes_no_result(config, whole, tmp_path, capsys, monkeypatch):
    """As on an NVIDIA GPU, where MLX waits for queued work above 95 % of the bound."""
    set_limits, plain = [], mx.set_memory_limit
    monkeypatch.setattr(mx, "set_memory_limit", lambda limit: set_limits.append(limit) or plain(limit))
    monkeypatch.setattr(placement, "brake", lambda size: int(0.95 * size))
    train(in_folder(config, tmp_path / "bounded", memory=10**9))
    assert 950_000_000 in set_limits
    said = capsys.readouterr().out
    assert "all weights stay in memory" in said
    assert "Patches: " in said
    assert "for the disk" not in said
    assert adapters(tmp_path / "bounded") == adapters(whole[0])


def test_layers_that_stay_are_not_waited_for_on_an_nvidia_gpu(config, least, whole, tmp_path, capsys, monkeypatch):
    begun, plain = [], mx.async_eval
    asked = {"launches_ahead": lambda: True, "has_own_memory": lambda: False}
    monkeypatch.setattr(store, "backend", SimpleNamespace(**asked))
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: begun.append(len(arrays)) or plain(*arrays))
    train(in_folder(config, tmp_path / "more", memory=least(config) + 1_000_000))
    streamed = int(re.search("([1-3]) of 4 layers", capsys.readouterr().out)[1])
    # A layer gives three arrays going forward, and two going backward.
    assert begun.count(3) == begun.count(2) == (4 - streamed) * config.iters
    assert adapters(tmp_path / "more") == adapters(whole[0])


def test_an_nvidia_gpu_keeps_little_that_was_freed(config, least, whole, tmp_path, monkeypatch):
    """The driver counts MLX's cache of freed memory as taken: that of planning and reading, and that of steps."""
    limits, events, plain, own = [], [], mx.set_cache_limit, mx.set_cache_limit(2**40)
    mx.set_cache_limit(own)
    give_back = partial(events.append, "cleared")
    gpu = SimpleNamespace(launches_ahead=lambda: False, has_own_memory=lambda: True, give_back=give_back)
    monkeypatch.setattr(store, "backend", gpu)
    monkeypatch.setattr(layer_step, "backend", gpu)
    monkeypatch.setattr(store.host_memory, "stay", lambda _: True)
    monkeypatch.setattr(placement, "fits_on_host", lambda _: True)
    monkeypatch.setattr(mx, "set_cache_limit", lambda limit: limits.append(limit) or plain(limit))
    placed = Store.place
    monkeypatch.setattr(Store, "place", lambda *given, **options: placed(*given, **options) or events.append("placed"))
    train(in_folder(config, tmp_path / "bounded", memory=least(config) + 1_000_000))
    assert events[:2] == ["cleared", "placed"]
    assert limits == [2**28, own]
    assert adapters(tmp_path / "bounded") == adapters(whole[0])


def test_preferences_are_learnt_from_the_disk_too(config, least, tmp_path, capsys):
    """Their reference is computed by layers as well."""
    data = tmp_path / "pairs"
    data.mkdir()
    rows = [{"prompt": f"question {at}", "chosen": f"answer {at} fox", "rejected": "no cat"} for at in range(6)]
    for name in ("train", "valid"):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = dataclasses.replace(config, data=str(data), loss="dpo", iters=2)
    train(in_folder(given, tmp_path / "whole"))
    whole = re.findall("Iter .*val loss [^,]*", capsys.readouterr().out)
    train(in_folder(given, tmp_path / "bounded", memory=least(given)))
    said = capsys.readouterr().out
    assert "4 of 4 layers" in said
    assert re.findall("Iter .*val loss [^,]*", said) == whole
    assert len(whole) == 2
    assert adapters(tmp_path / "bounded") == adapters(tmp_path / "whole")
    references = [
        [file.read_bytes() for file in (tmp_path / name / "reference").glob("*")] for name in ("whole", "bounded")
    ]
    assert references[0] == references[1]
    assert len(references[0]) == 1


@pytest.mark.weekly
def test_two_ranks_read_one_base(config, least, launch_each, tmp_path):
    whole, bounded = (["--adapter-path", str(tmp_path / name)] for name in ("whole", "bounded"))
    bounded += ["--memory", str(least(config))]
    config = dataclasses.replace(config, iters=2, batch_size=2, val_batches=1)
    values = {name: vars(config)[name] for name in CONFIGURED} | {"lora_parameters": {"rank": 2, "dropout": 0.1}}
    said = launch_each((values, *whole), (values, *bounded))
    assert said.count("4 of 4 layers") == 1
    assert adapters(tmp_path / "bounded") == adapters(tmp_path / "whole")


def test_a_file_that_changes_ends_a_run_with_its_state_saved(config, least, whole, model, tmp_path, monkeypatch):
    """The run is continued when the file is as it was."""
    copy = shutil.copytree(model, tmp_path / "model")
    memory, weights = least(config), copy / "model.safetensors"
    kept = weights.stat().st_mtime_ns
    options = {"model": str(copy), "memory": memory, "save_every": 100}
    plain, reads = Store.started, []

    def started(self, names):
        reads.append(names)
        if len(reads) == 26:
            os.utime(weights, ns=(1, 1))
        return plain(self, names)

    monkeypatch.setattr(Store, "started", started)
    with pytest.raises(UserError, match=r"has changed while .* state after iteration 2 is saved .* --resume"):
        train(in_folder(config, tmp_path / "out", **options))
    monkeypatch.undo()
    os.utime(weights, ns=(kept, kept))
    train(in_folder(config, tmp_path / "out", resume=True, **options))
    assert adapters(tmp_path / "out") == adapters(whole[0])


def test_inputs_of_layers_on_a_disk_that_fills_up_lose_nothing(
    config, least, whole, tmp_path, monkeypatch, capsys, request
):
    memory = least(config)
    request.getfixturevalue("no_room_for_inputs")
    plain, writes = mx.save_safetensors, []

    def written(file, *content):
        writes.append(f"/{INPUTS}_0/" in str(file))
        if writes[-1] and sum(writes) == 7:
            raise RuntimeError("[write] Unable to write 4096 bytes to file.")
        return plain(file, *content)

    monkeypatch.setattr(mx, "save_safetensors", written)
    with pytest.raises(UserError, match=r"kept there .* state after iteration 2 is saved .*; make room there and give"):
        train(in_folder(config, tmp_path / "out", memory=memory, save_every=100))
    assert "32 tokens; 4 of 4 layers" in (said := capsys.readouterr().out)
    assert "; layer inputs, 0.0 MB, go to the disk as well" in said
    assert not (tmp_path / "out" / f"{INPUTS}_0").exists()
    train(in_folder(config, tmp_path / "out", memory=memory, save_every=100, resume=True))
    assert adapters(tmp_path / "out") == adapters(whole[0])
    assert not (tmp_path / "out" / f"{INPUTS}_0").exists()


@pytest.mark.parametrize("both", [True, pytest.param(False, marks=pytest.mark.weekly)])
def test_inputs_of_layers_stay_beside_weights_on_the_host(
    config, least, whole, tmp_path, monkeypatch, capsys, request, both
):
    """As beside a GPU, in whose host's memory the weights fit, and with them the inputs or not."""
    memory, asked, written = least(config), [], []
    request.getfixturevalue("no_room_for_inputs")

    def fits(size):
        asked.append(size)
        return both or size == min(asked)

    plain = mx.save_safetensors
    monkeypatch.setattr(placement, "fits_on_host", fits)
    monkeypatch.setattr(placement, "InputsOnHost", partial(InputsOnHost, room=PlainRoom))
    monkeypatch.setattr(mx, "save_safetensors", lambda file, *content: written.append(file) or plain(file, *content))
    train(in_folder(config, tmp_path / "out", memory=memory))
    assert len(asked) == 2
    assert asked[1] > asked[0]
    said, where = capsys.readouterr().out, "host's memory as well" if both else "disk"
    assert f"; layer inputs, 0.0 MB, go to the {where}" in said
    assert f"s for the host's memory{'' if both else ' and the disk'} (" in said
    assert any(f"/{INPUTS}_0/" in str(file) for file in written) != both
    assert adapters(tmp_path / "out") == adapters(whole[0])


@pytest.mark.parametrize("at", [26, pytest.param(4, marks=pytest.mark.weekly)], ids=["step", "evaluation"])
def test_a_second_signal_ends_within_a_pass(config, least, whole, tmp_path, monkeypatch, at):
    """Every layer is read anew, so the reads say where in the pass the run ended."""
    memory = least(config)
    plain, reads, digest = Store.wait, [], []

    def wait(self, arrays):
        plain(self, arrays)
        if len(arrays) == 1:
            digest.append(None)
            return
        reads.append(None)
        if len(reads) == at:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)

    monkeypatch.setattr(Store, "wait", wait)
    after = 2 if at == 26 else 0
    with pytest.raises(StoppedError, match=f"stopped after iteration {after} of 4; the state is saved"):
        train(in_folder(config, tmp_path / "out", memory=memory, save_every=100))
    assert len(reads) == at
    monkeypatch.undo()
    train(in_folder(config, tmp_path / "out", memory=memory, resume=True))
    assert adapters(tmp_path / "out") == adapters(whole[0])


@pytest.mark.bad_input("`--memory` that is too small for the run")
def test_too_little_memory_is_said_by_plan_and_by_train(config, tmp_path, capsys):
    flags = ["--model", config.model, "--data", config.data, "--batch-size", "1", "--memory", "1MB"]
    assert main(["plan", *flags]) == 1
    said = r"memory: 1\.0 MB is too little\. .* take [\d.]+ MB; give that or more"
    assert re.search(rf"^{said}", capsys.readouterr().out, re.MULTILINE)
    trained = called("train", *flags, "--adapter-path", tmp_path / "none")
    assert trained.returncode == 2
    assert re.match(rf"deltatune: {said}", trained.stderr)
    assert not (tmp_path / "none" / "adapters.safetensors").exists()


@pytest.mark.bad_input("`--memory` that is more than the device has")
def test_more_memory_than_the_device_has_is_refused(config, least, capsys, monkeypatch):
    """Unless the run needs less than that anyway."""
    memory = least(config)
    flags = ["--model", config.model, "--data", config.data, "--batch-size", "1", "--max-seq-length", "32"]
    flags += ["--num-layers", "2", "--rank", "2", "--memory", str(memory)]
    for has, code in ((memory // 2, 2), (memory, 0)):
        monkeypatch.setattr(placement, "device_limits", lambda has=has: DeviceLimits(None, has, "", "a test"))
        assert main(["plan", *flags]) == code
    monkeypatch.setattr(placement, "device_limits", lambda: DeviceLimits(None, memory // 2, "", "a test"))
    assert main(["train", *flags]) == 2
    said = r"memory: [\d.]+ MB is more than the [\d.]+ MB that arrays may take here \(a test\), and [\d.]+ MB of it are"
    assert re.search(rf"^deltatune: {said} planned; give --memory less\.$", capsys.readouterr().err, re.M)


def test_plan_reports_the_bytes_that_are_read(config, least, capsys, monkeypatch):
    monkeypatch.setattr(host_memory, "free", lambda: None)
    flags = ["--model", config.model, "--data", config.data, "--batch-size", "1", "--max-seq-length", "32"]
    flags += ["--num-layers", "2", "--rank", "2", "--memory", str(least(config))]
    assert main(["plan", *flags]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^Memory: [\d.]+ MB planned of [\d.]+ MB \(--memory\); 1 x 32 tokens; 4 of 4 layers", said, re.M)
    assert re.search(r"^Disk: [45]\.[0-9] MB read for each iteration, [\d.]+ s at the [\d.,]+ .B a second", said, re.M)
    assert re.search(r"measured now; its matrix products take about [\d.]+ s, .* from about [\d,]+ tokens", said)


@pytest.mark.bad_input("`--memory` together with {what}")
@pytest.mark.parametrize(
    ("what", "options"),
    {
        "full fine-tuning": {"fine_tune_type": "full"},
        "training from scratch": {"from_scratch": True, "fine_tune_type": "full"},
    }.items(),
)
def test_option_that_does_not_run_by_layers_is_refused(what, options):
    with pytest.raises(UserError, match=r"memory leaves frozen weights on the disk, and .*; leave one of them out"):
        TrainConfig(memory=10**9, **options)
