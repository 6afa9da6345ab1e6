"""Tests the state file: exact contents, atomic writes, refusals of the disk and of foreign states."""

import errno
import os
import stat
from pathlib import Path

import mlx.core as mx
import pytest

from deltatune.errors import UserError
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.train.saved import state

IDENTITY = {"seed": 0}


def arrays(value):
    return {"optimizer/m": mx.full((3, 2), value, mx.bfloat16), "optimizer/step": mx.array(int(value), mx.uint64)}


def test_arrays_keep_their_types_and_progress_its_numbers(tmp_path):
    progress = state.Progress(iteration=3, best_loss=0.1 + 0.2, window_loss=1 / 3, order={"epoch": 1, "step": 2})
    state.save(tmp_path / "state.safetensors", arrays(5), progress, IDENTITY)
    found, again = state.load(tmp_path / "state.safetensors", IDENTITY)
    assert again == progress
    for name, array in arrays(5).items():
        assert found[name].dtype == array.dtype
        assert mx.array_equal(found[name], array)


@pytest.mark.parametrize("point", ["write", "fsync", "replace"])
def test_a_refusing_disk_leaves_the_last_state_and_no_litter(tmp_path, monkeypatch, point):
    path = tmp_path / "state.safetensors"
    state.save(path, arrays(1), state.Progress(iteration=1), IDENTITY)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if point == "write":
        monkeypatch.setattr(mx, "save_safetensors", full)
    else:
        monkeypatch.setattr(os, point, full)
    with pytest.raises(UserError, match=r"state.safetensors cannot be written \(No space left.*make room"):
        state.save(path, arrays(2), state.Progress(iteration=2), IDENTITY)
    monkeypatch.undo()
    assert state.load(path, IDENTITY)[1].iteration == 1
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("sound", [True, False])
def test_on_a_full_disk_one_good_state_makes_room_for_the_next(tmp_path, monkeypatch, sound):
    """The disk holds two states. The good one of them must stay until the third is complete."""
    path = tmp_path / "state.safetensors"
    for number in (1, 2):
        state.save(path, arrays(number), state.Progress(iteration=number), IDENTITY)
    good = path if sound else state.previous_path(path)
    plain, seen = mx.save_safetensors, []

    def limited(file, *arguments):
        seen.append([state.peek(path).iteration, good.exists()])
        if len([*tmp_path.glob("[!.]*")]) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(file, *arguments)

    monkeypatch.setattr(mx, "save_safetensors", limited)
    state.save(path, arrays(3), state.Progress(iteration=3), IDENTITY, sound=sound)
    assert seen == [[2, True], [2 if sound else 1, True]]
    assert state.load(path, IDENTITY)[1].iteration == 3
    assert state.load(state.previous_path(path), IDENTITY)[1].iteration == (2 if sound else 1)


def test_a_real_full_disk_is_noticed(full_disk):
    with open(full_disk, "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        mx.save_safetensors(file, {"a": mx.zeros((1000, 1000))})


def test_a_file_system_that_cannot_flush_a_folder_takes_states(tmp_path, monkeypatch):
    """Some network file systems answer so."""
    plain = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    state.save(tmp_path / "state.safetensors", arrays(1), state.Progress(iteration=1), IDENTITY)
    assert state.load(tmp_path / "state.safetensors", IDENTITY)[1].iteration == 1


def test_a_write_cut_short_is_never_seen(tmp_path):
    path = tmp_path / "state.safetensors"
    state.save(path, arrays(1), state.Progress(iteration=1), IDENTITY)

    class KilledError(BaseException):
        pass

    def half(file):
        file.write(b"half of it")
        raise KilledError

    with pytest.raises(KilledError):
        state.write_atomically(path, half)
    assert state.load(path, IDENTITY)[1].iteration == 1


def test_read_only_and_misplaced_folders_are_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="part of that path is a file"):
        state.write_atomically(tmp_path / "file" / "state" / "x", lambda file: None)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(UserError, match="the file system is read-only: choose another --adapter-path"):
        state.write_atomically(tmp_path / "x", lambda file: None)


def test_file_that_is_no_state_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"not a state")
    with pytest.raises(UserError, match=r"is damaged \(.*\): it is no state to resume from"):
        state.load(path, IDENTITY)
    assert state.peek(path) is None
    mx.save_safetensors(str(path), {"a": mx.zeros(1)})
    with pytest.raises(UserError, match="it is no state to resume from; start anew without --resume"):
        state.load(path, IDENTITY)


def test_options_that_matter_are_named_and_free_ones_are_not():
    config = TrainConfig(learning_rate=1e-4)
    saved = state.fingerprint(config, world=1)
    free = TrainConfig(learning_rate=1e-4, iters=5, report_to="wandb", save_every=1, steps_per_eval=7)
    state.compare(Path("x"), saved, state.fingerprint(free, world=1))
    other = TrainConfig(learning_rate=1e-3, lora_parameters=LoraConfig(rank=4))
    with pytest.raises(UserError) as error:
        state.compare(Path("x"), saved, state.fingerprint(other, world=2))
    message = str(error.value)
    assert "learning_rate: was 0.0001, now 0.001" in message
    assert "world: was 1, now 2" in message
    assert "lora_parameters: rank: was 16, now 4\n" in message
    assert message.count("lora_parameters") == 1
    assert "seed" not in message


def test_an_option_that_a_run_did_not_have_yet_had_its_default():
    now = state.fingerprint(TrainConfig())
    saved = {key: value for key, value in now.items() if key != "grad_clip"}
    saved["lora_parameters"] = {key: value for key, value in now["lora_parameters"].items() if key != "rslora"}
    state.compare(Path("x"), saved, now)
    with pytest.raises(UserError, match="lora_parameters: rslora: was False, now True"):
        state.compare(Path("x"), saved, state.fingerprint(TrainConfig(lora_parameters=LoraConfig(rslora=True))))


def test_every_option_is_either_free_or_part_of_the_identity():
    names = set(TrainConfig.__dataclass_fields__)
    assert names >= state.FREE_OPTIONS
    assert state.fingerprint(TrainConfig()).keys() == names - state.FREE_OPTIONS


def test_unpack_refuses_arrays_that_do_not_fit():
    like = {"a": mx.zeros((2, 2)), "b": [mx.zeros(1)]}
    saved = state.flatten("trainable", like)
    assert set(saved) == {"trainable/a", "trainable/b.0"}
    assert mx.array_equal(state.unflatten("trainable", like, saved, Path("x"))["a"], like["a"])
    with pytest.raises(UserError, match="1 tensors differ, the first is trainable/a"):
        state.unflatten("trainable", like | {"a": mx.zeros(3)}, saved, Path("x"))
    with pytest.raises(UserError, match="the first is trainable/c"):
        state.unflatten("trainable", like | {"c": mx.zeros(3)}, saved, Path("x"))
