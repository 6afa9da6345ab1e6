"""Tests whole runs: their files, their stops, and the same bits after a resumed run."""

import ctypes
import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from deltatune.data import Example, Splits
from deltatune.errors import NoResultError, UserError
from deltatune.train import StoppedError, engine
from deltatune.train.evaluation.evaluate import Evaluation
from deltatune.train.reports import log
from deltatune.train.step import Step
from killed_runs import adapters, same

ONLY = {"val_batches": 0}


@pytest.fixture(autouse=True)
def in_turns(monkeypatch):
    """No iteration starts early, on a GPU either: test_early_engine.py has those."""
    monkeypatch.setattr(engine, "may_start_early", lambda *_: False)


def test_a_run_learns_reports_saves_and_says_what_it_does(make_trainer, screen_text, tmp_path, read_metrics):
    result = make_trainer(grad_accumulation_steps=1, iters=8).run()
    out = tmp_path / "out"
    records = read_metrics(out)
    assert [r["iteration"] for r in records if "val_loss" in r] == [0, 4, 8]
    assert [r["iteration"] for r in records if "train_loss" in r] == [3, 6, 8]
    validation = [r["val_loss"] for r in records if "val_loss" in r]
    assert validation[-1] < validation[0] - 0.5
    assert result.val_loss == result.best_val_loss == validation[-1]
    names = {file.name for file in out.iterdir()}
    saved = {f"000000{n}_adapters.safetensors" for n in (3, 6, 8)}
    others = {"adapters.safetensors", "adapter_config.json", "metrics.jsonl", "report.html", "best", "state"}
    assert names == saved | others
    assert adapters(out) == (out / "0000008_adapters.safetensors").read_bytes()
    text = screen_text.text()
    for said in ("1 delta, 1 attention", "Gated delta: ", "Patches: ", "completions only", "32 and 64 tokens"):
        assert said in text
    assert "Iter 8/8: train loss" in text
    assert re.search(r"peak [\d.]+ [MG]B, 0:00 left", text)


def test_a_signal_saves_and_the_resumed_run_gives_the_same_bits(
    make_trainer, tmp_path, read_metrics, run_with, straight_run
):
    """Iteration 5 is inside an accumulation of 2 and inside a report window of 3."""
    straight = straight_run()

    def interrupt(iterations, _):
        if iterations.progress.iteration == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedError, match=r"stopped after iteration 5 of 8; the state is saved .*--resume"):
        run_with(make_trainer(), interrupt)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    resumed = make_trainer(resume=True).run()
    same(tmp_path / "out", straight)
    assert resumed.best_val_loss == min(record["val_loss"] for record in read_metrics(straight) if "val_loss" in record)


def test_resuming_with_other_options_or_data_names_them(make_trainer, begun, splits):
    begun()
    with pytest.raises(UserError, match=r"grad_clip: was 1\.0, now 2\.0"):
        make_trainer(resume=True, grad_clip=2.0).run()
    fewer = dataclasses.replace(splits, train=splits.train[:-1])
    with pytest.raises(UserError, match=r"examples was 44 .* is 43 now"):
        make_trainer(splits=fewer, resume=True).run()


def test_resume_without_a_state_starts_and_says_so(make_trainer, screen_text, tmp_path):
    make_trainer(iters=1, resume=True, val_batches=0, adapter_path=str(tmp_path / "first")).run()
    out = tmp_path / "out"
    first = f"Note: there is nothing to resume in {tmp_path / 'first'}: training starts from the beginning.\n"
    assert first in screen_text.text()
    for name in "abcd":
        shutil.copytree(tmp_path / "first", tmp_path / name)
    make_trainer(iters=1, resume=True, val_batches=0).run()
    others = ", ".join(str(tmp_path / name) for name in "abcd")
    said = " ".join(screen_text.text().split())
    assert (
        f"in {out}: training starts from the beginning. If you meant another run, stop this one: --adapter-path may be "
        f"{others} and 1 more."
    ) in said


def test_a_run_with_nothing_left_says_so(make_trainer, begun, screen_text, tmp_path):
    before = adapters(begun())
    make_trainer(iters=2, resume=True).run()
    said = "has done 3 iterations, and --iters is 2. To train further, give --iters a larger number.\n"
    assert f"Nothing is left to train: the run in {tmp_path / 'out'} {said}" in screen_text.text()
    # An epoch has 11 batches of 4.
    make_trainer(epochs=0.2, resume=True).run()
    said = screen_text.text()
    assert "and --epochs is 0.2 (3 iterations). To train further, give --epochs a larger number.\n" in said
    assert "Resuming" not in said
    assert adapters(tmp_path / "out") == before


def test_starting_over_an_unfinished_run_says_so(make_trainer, screen_text, run_with, tmp_path):
    with pytest.raises(StoppedError):
        run_with(make_trainer(val_batches=0), lambda *_: os.kill(os.getpid(), signal.SIGINT))
    make_trainer(iters=1, val_batches=0).run()
    out = tmp_path / "out"
    assert f"The earlier run in {out}, stopped after iteration 1, is moved to {out}-1." in screen_text.text()


def test_early_stopping_counts_evaluations_without_gain(make_trainer, screen_text, read_metrics, tmp_path):
    options = {"early_stopping": 2, "steps_per_eval": 1, "optimizer": "sgd", "optimizer_config": {}}
    options |= {"lr_schedule": "constant", "learning_rate": 1e-30}
    result = make_trainer(**options).run()
    assert result.stopped_early
    assert result.iterations == 2
    assert "2 evaluations without a loss below" in screen_text.text()
    assert make_trainer(**options, resume=True).run().iterations == 2


def test_the_model_trains_from_any_mode_and_evaluation_restores_it(make_trainer, run_with):
    trainer = make_trainer(iters=2, steps_per_eval=1)
    trainer.model.eval()
    seen = []
    run_with(trainer, lambda *_: seen.append(all_training(trainer.model)))
    assert seen == [True, True]
    assert all_training(trainer.model)


def all_training(model):
    return all(module.training for module in model.modules())


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.weekly), 2])
def test_nan_names_step_batch_and_layer_and_keeps_the_last_good_state(make_trainer, run_with, accumulate):
    """A weight becomes infinite before iteration 4. The run must stop as if that iteration had not begun."""
    trainer = make_trainer(grad_accumulation_steps=accumulate, val_batches=0, save_every=100, lr_schedule="constant")
    broken, before = trainer.model.layers[1].mlp.down_proj.linear, []

    def damage(iterations, _):
        if iterations.progress.iteration == 3:
            before.extend(np.array(leaf) for _, leaf in tree_flatten(trainer.model.trainable_parameters()))
            broken.weight = broken.weight * 1e38 * 1e38
            mx.eval(broken.weight)

    with pytest.raises(UserError) as error:
        run_with(trainer, damage)
    message = str(error.value)
    assert "iteration 4: the loss is nan" in message
    assert (
        "hold NaN or infinity, the first language_model.model.layers.1.mlp.down_proj.weight: its checkpoint" in message
    )
    good = 3 if accumulate == 1 else 2
    assert f"What was trained is in {trainer.outputs.state.parent}." in message
    after = [np.array(leaf) for _, leaf in tree_flatten(trainer.model.trainable_parameters())]
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left, right)
    saved = trainer.outputs.state
    assert json.loads(mx.load(str(saved), return_metadata=True)[1]["deltatune"])["progress"]["iteration"] == good


def test_an_error_of_mlx_saves_the_state_that_is_whole(make_trainer, loses_nothing, straight_run):
    """Iteration 4 runs out of memory in the second half of an accumulation; iteration 3 is already reported."""
    straight, trainer, plain = straight_run(), make_trainer(save_every=100), Step.micro_batch

    def out_of_memory(*arguments):
        if trainer.progress.iteration == 3:
            raise RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")
        return plain(*arguments)

    said = "Resource limit.*The state after iteration 2 is saved in"
    loses_nothing(trainer, straight, (Step, "micro_batch", out_of_memory), RuntimeError, said)


def test_an_evaluation_that_fails_inside_a_window_names_the_update_before_it(make_trainer, loses_nothing, straight_run):
    """Iteration 3 is the first half of an update, so the state after iteration 2 is saved."""
    options = {"steps_per_eval": 3, "save_every": 100}
    straight, trainer, plain = straight_run(**options), make_trainer(**options), Evaluation.__call__

    def not_finite(self, *arguments):
        if trainer.progress.iteration == 3:
            raise NoResultError("the loss is nan.")
        return plain(self, *arguments)

    said = "after iteration 3: the loss is nan. The state after iteration 2 is saved in"
    loses_nothing(trainer, straight, (Evaluation, "__call__", not_finite), UserError, said, **options)


def test_an_error_right_after_resuming_inside_a_window(make_trainer, begun, loses_nothing, straight_run):
    def out_of_memory(*_):
        raise RuntimeError("no memory")

    straight = straight_run(**ONLY)
    begun()
    change, said = (Step, "micro_batch", out_of_memory), "no memory.*The state after iteration 3 is saved in"
    loses_nothing(make_trainer(resume=True, **ONLY), straight, change, RuntimeError, said, **ONLY)


def test_an_error_of_a_reporting_service_loses_nothing(make_trainer, loses_nothing, straight_run):
    """The service fails at the report of iteration 6, after an update."""

    class Service:
        def log(self, record, iteration):
            if iteration == 6:
                raise ConnectionError("the service is gone")

        def close(self):
            pass

    change, said = (log, "open_services", lambda *_: [Service()]), "The state after iteration 6 is saved in"
    loses_nothing(make_trainer(save_every=100), straight_run(), change, ConnectionError, said)


def test_a_disk_that_fills_up_leaves_the_last_save_and_the_model(make_trainer, loses_nothing, straight_run):
    trainer = make_trainer(val_batches=0)
    plain = os.fsync

    def full(descriptor):
        if trainer.progress.iteration == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(descriptor)

    straight = straight_run(val_batches=0)
    loses_nothing(trainer, straight, (os, "fsync", full), UserError, "No space left on device", val_batches=0)
    trained = [np.array(leaf) for _, leaf in tree_flatten(trainer.model.trainable_parameters())]
    assert all(np.isfinite(leaf).all() for leaf in trained)


def test_an_unwritable_folder_is_one_message_before_any_step(make_trainer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*choose another --adapter-path"):
        make_trainer(adapter_path=str(tmp_path / "file" / "out")).run()


def test_leftovers_of_a_killed_save_are_removed(make_trainer, tmp_path):
    folder = tmp_path / "out" / "state"
    folder.mkdir(parents=True)
    (folder / ".state.safetensors.1.partial").write_text("half")
    (tmp_path / "out" / ".adapters.safetensors.1.tmp").write_text("half")
    make_trainer(iters=1, val_batches=0).run()
    assert [file.name for file in folder.iterdir()] == ["state.safetensors"]
    assert not list((tmp_path / "out").glob(".*"))


def test_nothing_to_train_is_an_error(make_trainer):
    trainer = make_trainer()
    trainer.model.freeze()
    with pytest.raises(UserError, match="nothing in the model is trainable"):
        type(trainer)(trainer.model, None, trainer.config, trainer.splits)


def test_a_custom_rule_of_loss_without_targets_in_a_batch(make_trainer):
    """A batch in which no token counts reports no loss and changes no parameter by more than its decay."""
    blank = [Example(np.arange(3, 9, dtype=np.int32), np.zeros(6, bool), f"row {n}") for n in range(4)]
    trainer = make_trainer(splits=Splits(train=blank), iters=1, grad_accumulation_steps=1, lr_schedule="constant")
    before = [np.array(leaf) for _, leaf in tree_flatten(trainer.model.trainable_parameters())]
    result = trainer.run()
    assert np.isnan(result.train_loss)
    for (_, leaf), old in zip(tree_flatten(trainer.model.trainable_parameters()), before, strict=True):
        np.testing.assert_allclose(np.array(leaf), old, rtol=1e-5)


def test_a_mac_that_computes_on_the_cpu_wires_no_memory(make_trainer, monkeypatch):
    """There, mx.device_info() has the name and the architecture alone."""
    wired = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "arm64", "device_name": "Apple M3"})
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    with mx.stream(mx.cpu):
        make_trainer(iters=1).run()
    assert not wired


# Where CPython keeps the functions that fill buffers in a type: behind 20 pointers.
AS_BUFFER = 20 * ctypes.sizeof(ctypes.c_void_p)
GET_BUFFER = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)


@pytest.fixture
def readers():
    """The names of the functions that ask an array of MLX for a buffer, as NumPy does for them."""
    names: set[str] = set()
    functions = ctypes.c_void_p.from_address(id(mx.array) + AS_BUFFER).value
    assert functions is not None
    slot = ctypes.c_void_p.from_address(functions)
    address = slot.value
    assert address is not None
    plain = GET_BUFFER(address)

    def noting(array: mx.array, view: int, flags: int) -> int:
        names.add(sys._getframe(1).f_code.co_name)
        return plain(array, view, flags)

    in_its_place = GET_BUFFER(noting)
    slot.value = ctypes.cast(in_its_place, ctypes.c_void_p).value
    try:
        yield names
    finally:
        slot.value = address


def test_reading_is_noticed(readers):
    assert np.array(mx.arange(3)).tolist() == [0, 1, 2]
    assert readers == {"test_reading_is_noticed"}


@pytest.mark.parametrize("early", [True, False])
def test_a_run_reads_by_one_function(early, make_trainer, request, readers):
    """That is as_numpy(): an error of a GPU in any other way ends the process."""
    if early:
        request.getfixturevalue("early_starts")
    make_trainer().run()
    assert not readers
