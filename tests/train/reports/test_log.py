"""Tests metrics.jsonl and the services that receive metrics."""

import errno
import json
import os
import sys
import tempfile
from types import ModuleType, SimpleNamespace

import pytest

from deltatune.errors import UserError
from deltatune.train.reports import log


def test_metrics_are_lines_of_json_cut_where_a_state_stood(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    first = log.Metrics(path)
    kept = first.write({"iteration": 1, "loss": 1.5})
    first.sync()
    first.write({"iteration": 9, "loss": 9.5})
    first.cut(kept)
    first.write({"iteration": 2, "loss": float("nan")})
    first.close()
    assert [json.loads(line) for line in path.read_text().splitlines()][1] == {"iteration": 2, "loss": None}
    second = log.Metrics(path, kept)
    second.write({"iteration": 2, "loss": 0.5})
    second.close()
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1.5, 0.5]


def test_metrics_that_were_deleted_meanwhile_can_be_cut(tmp_path):
    metrics = log.Metrics(tmp_path / "metrics.jsonl")
    kept = metrics.write({"iteration": 1})
    metrics.write({"iteration": 2})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "moved")
    metrics.cut(kept)
    metrics.close()
    assert (tmp_path / "moved").read_text() == '{"iteration": 1}\n'


def test_a_service_that_was_opened_is_closed_where_the_next_one_is_not(tmp_path, monkeypatch):
    closed = []

    class Opened:
        def __init__(self, *_):
            pass

        def close(self):
            closed.append(self)

    class Refused:
        def __init__(self, *_):
            raise UserError("no login")

    monkeypatch.setattr(log, "SERVICES", {"tensorboard": Opened, "wandb": Refused})
    with pytest.raises(UserError, match="no login"):
        log.open_services("tensorboard,wandb", tmp_path, None, {})
    assert len(closed) == 1


def test_unwritable_metrics_are_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be written"):
        log.Metrics(tmp_path / "file" / "metrics.jsonl")


def recorder(calls, name):
    return lambda *arguments, **options: calls.append((name, arguments, options))


SAMPLE = {"prompt": "one\n*two*", "expected": "four", "answer": "three"}


def test_services_get_metrics_and_samples_through_their_own_libraries(tmp_path, monkeypatch):
    calls: list = []
    wandb, swanlab = ModuleType("wandb"), ModuleType("swanlab")
    wandb.Error = RuntimeError
    wandb.Table = lambda columns, data: (columns, data)
    swanlab.Text = lambda data, caption: (caption, data)
    names = ("add_scalar", "add_event", "flush", "close")
    writer = SimpleNamespace(**{name: recorder(calls, name) for name in names})
    stubs = {
        "summary": {"Writer": lambda folder: calls.append(("tensorboard", (folder,), {})) or writer},
        "summary.writer.event_file_writer": {"EventFileWriter": lambda folder: writer},
        "compat.proto.event_pb2": {"Event": lambda wall_time, step, summary: (step, summary)},
        "plugins.text.summary_v2": {"text_pb": lambda name, text: (name, text)},
    }
    for module in (wandb, swanlab):
        for function in ("login", "init", "log", "finish"):
            setattr(module, function, recorder(calls, f"{module.__name__}.{function}"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    for name, content in stubs.items():
        monkeypatch.setitem(sys.modules, f"tensorboard.{name}", SimpleNamespace(**content))
    services = log.open_services("tensorboard,wandb,swanlab", tmp_path / "run", "mine", {"iters": 3})
    log.send({"iteration": 7, "train_loss": 1.5, "grad_norm": None, "samples": [SAMPLE]}, services)
    for service in services:
        service.close()
    table = (["iteration", "prompt", "expected", "answer", "reward"], [[7, "one\n*two*", "four", "three", None]])
    text = (7, ("samples/1", "    one\n    *two*\n\n---\n\n    four\n\n---\n\n    three"))
    for call in (
        ("add_scalar", ("train_loss", 1.5, 7), {}),
        ("add_event", (text,), {}),
        ("tensorboard", (str(tmp_path / "run" / "tensorboard"),), {}),
        ("wandb.log", ({"train_loss": 1.5},), {"step": 7}),
        ("wandb.log", ({"samples": table},), {"step": 7}),
        ("swanlab.log", ({"train_loss": 1.5},), {"step": 7}),
        ("swanlab.log", ({"samples": [("one\n*two*", "three")]},), {"step": 7}),
    ):
        assert call in calls
    # A record of answers alone has no figures, and one of figures no answers.
    counted = len(calls)
    log.send({"iteration": 8, "samples": []}, services)
    assert not any(call[1][:1] == ({},) for call in calls[counted:])
    opened = {name: options for name, _, options in calls if name.endswith("init")}
    assert opened["wandb.init"]["project"] == opened["swanlab.init"]["project"] == "mine"
    assert opened["wandb.init"]["config"] == {"iters": 3}
    ends = [name for name, *_ in calls if name in ("close", "wandb.finish", "swanlab.finish")]
    # TensorBoard has a writer of its own for texts.
    assert sorted(ends) == ["close", "close", "swanlab.finish", "wandb.finish"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "swanlab"])
def test_a_missing_library_is_named_with_its_remedy(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    expected = f"--report-to {name}: its library is missing .*; pip install {name}"
    with pytest.raises(UserError, match=expected):
        log.check_services(name, tmp_path)
    with pytest.raises(UserError, match=expected):
        log.open_services(name, tmp_path, None, {})


def test_without_a_service_none_is_opened(tmp_path):
    log.check_services(None, tmp_path)
    assert log.open_services(None, tmp_path, None, {}) == []


def failing_wandb(monkeypatch, function, message):
    """Install a wandb whose `function` raises its own kind of error, as without a login or a network."""
    module = ModuleType("wandb")
    module.Error = type("Error", (Exception,), {})

    def fail(*_, **__):
        raise module.Error(message)

    for name in ("login", "init"):
        setattr(module, name, fail if name == function else lambda **_: True)
    monkeypatch.setitem(sys.modules, "wandb", module)


@pytest.mark.bad_input("W&B without a login or network")
@pytest.mark.parametrize("message", ["No API key configured. Use `wandb login` to log in.", "lookup failed:\nno host"])
def test_wandb_that_cannot_be_used_is_noticed_before_loading(tmp_path, monkeypatch, message):
    failing_wandb(monkeypatch, "login", message)
    with pytest.raises(UserError) as error:
        log.check_services("wandb", tmp_path)
    text = str(error.value)
    assert " ".join(message.split()) in text
    assert "\n" not in text
    assert "WANDB_MODE=offline" in text
    failing_wandb(monkeypatch, "init", message)
    log.check_services("wandb", tmp_path)
    with pytest.raises(UserError, match="WANDB_MODE=offline"):
        log.open_services("wandb", tmp_path, None, {})


def with_tensorboard(monkeypatch):
    """Install a tensorboard whose writer makes its folder, as the real one does."""
    module = ModuleType("tensorboard.summary")
    module.Writer = os.makedirs
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", module)


@pytest.mark.bad_input("a TensorBoard folder that is a file or cannot be written")
def test_a_blocked_tensorboard_folder_is_noticed_before_loading(tmp_path, monkeypatch):
    with_tensorboard(monkeypatch)
    log.check_services("tensorboard", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "tensorboard").write_text("")
    for call in (
        lambda: log.check_services("tensorboard", tmp_path),
        lambda: log.open_services("tensorboard", tmp_path, None, {}),
    ):
        with pytest.raises(UserError, match=r"--report-to tensorboard: .*tensorboard cannot be written \("):
            call()
    (tmp_path / "tensorboard").unlink()
    (tmp_path / "tensorboard").mkdir()
    log.check_services("tensorboard", tmp_path)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(UserError, match="the file system is read-only: choose another --adapter-path"):
        log.check_services("tensorboard", tmp_path)
    assert list((tmp_path / "tensorboard").iterdir()) == []


def test_metrics_cut_short_do_not_spoil_the_next_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n{"iterat')
    metrics = log.Metrics(path, 1000)
    length = metrics.write({"iteration": 3})
    metrics.close()
    assert path.read_bytes() == b'{"iteration": 1}\n{"iterat\n{"iteration": 3}\n'
    assert length == path.stat().st_size
