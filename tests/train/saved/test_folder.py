"""Tests the output folder of a run: refused before anything is loaded, locked, and cleared without losing a run."""

import sys

import pytest

from console import started
from deltatune import cli
from deltatune.errors import UserError
from deltatune.plan import planned_run
from deltatune.train.by_layer.layer_inputs import INPUTS
from deltatune.train.saved import state

HOLDER = """
import sys, time
from pathlib import Path
from deltatune.machine.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire()
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, which holds the lock of the folder `out`."""
    command = [sys.executable, "-c", HOLDER, tmp_path / "out" / "state" / "lock"]
    with started(command, stderr=None) as process:
        process.stdout.readline()
        yield process


@pytest.fixture
def train(checkpoint, data_folder, tmp_path, capsys, monkeypatch):
    """train(*flags, loads=False) returns exit code and messages; unless `loads`, loading a model fails the test."""
    plain = planned_run.ready
    monkeypatch.chdir(tmp_path)

    def run(*flags, loads=False):
        def ready(*arguments, **options):
            assert loads, "the model was loaded"
            return plain(*arguments, **options)

        monkeypatch.setattr(planned_run, "ready", ready)
        few = ("--iters", "2", "--batch-size", "4", "--val-batches", "0", "--save-every", "1")
        code = cli.main(["train", "--model", str(checkpoint), "--data", str(data_folder), *few, *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.bad_input("an adapter_path that is {how}")
@pytest.mark.parametrize("how", ["the model's folder", "a link to the model's folder", "empty", "a file"])
def test_a_folder_that_cannot_be_the_runs_is_refused_before_loading(train, checkpoint, tmp_path, how):
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "file").write_text("")
    path, expected = {
        "the model's folder": (str(checkpoint), "is the folder of the model"),
        "a link to the model's folder": ("link", "is the folder of the model"),
        "empty": (" ", "--adapter-path: expected text"),
        "a file": ("file", "part of that path is a file"),
    }[how]
    before, model = contents(tmp_path), contents(checkpoint)
    code, _, err = train("--adapter-path", path)
    assert code == 2
    assert expected in err
    assert err.count("\n") == 1
    assert (contents(tmp_path), contents(checkpoint)) == (before, model)


@pytest.mark.bad_input("full fine-tuning into a folder with another model")
def test_full_fine_tuning_does_not_write_into_a_folder_with_another_model(train, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    for flags in (("--fine-tune-type", "full"), ("--from-scratch",)):
        code, _, err = train("--adapter-path", "other", *flags)
        assert code == 2
        assert "--adapter-path other holds a model, which the run would overwrite; choose another folder." in err
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["config.json"]


@pytest.mark.bad_input("--resume with --overwrite")
def test_resume_and_overwrite_exclude_each_other(train):
    code, _, err = train("--resume", "--overwrite")
    assert code == 2
    assert "give one of them" in err


def test_an_earlier_run_is_moved_beside_and_it_is_said(train, tmp_path):
    runs = []
    for number in range(3):
        code, out, err = train("--adapter-path", "out", "--seed", str(number), loads=True)
        assert (code, err) == (0, "")
        assert ("is moved to" in out) == (number > 0)
        assert number == 0 or f"The earlier run in out is moved to out-{number}." in out
        assert [contents(tmp_path / f"out-{n + 1}") for n in range(number)] == runs
        runs.append(contents(tmp_path / "out"))
    assert len({run["adapters.safetensors"] for run in runs}) == 3
    assert not list(tmp_path.rglob("lock"))


def test_a_link_stays_and_the_folder_behind_it_moves(train, tmp_path):
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "runs")
    train("--adapter-path", "out", loads=True)
    first = contents(tmp_path / "disk" / "runs")
    _, out, _ = train("--adapter-path", "out", "--seed", "1", loads=True)
    assert f"is moved to {tmp_path}/disk/runs-1." in out
    assert contents(tmp_path / "disk" / "runs-1") == first
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "out" / "adapters.safetensors").is_file()


def test_adapters_of_mlx_lm_count_as_an_earlier_run(train, tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapters.safetensors").write_bytes(b"theirs")
    # Without a state, --resume starts anew.
    code, out, _ = train("--resume", loads=True)
    assert code == 0
    assert "The earlier run in adapters is moved to adapters-1." in out
    assert (tmp_path / "adapters-1" / "adapters.safetensors").read_bytes() == b"theirs"


def test_resume_moves_nothing_and_removes_the_files_of_a_killed_run(train, tmp_path):
    train("--adapter-path", "out", loads=True)
    inputs = tmp_path / "out" / f"{INPUTS}_0"
    inputs.mkdir()
    (inputs / "3.safetensors").write_bytes(b"3")
    code, out, _ = train("--adapter-path", "out", "--resume", "--iters", "3", loads=True)
    assert code == 0
    assert "is moved" not in out
    assert not (tmp_path / "out-1").exists()
    assert not inputs.exists()
    assert state.peek(state.state_path(tmp_path / "out")).iteration == 3


def test_overwrite_deletes_the_earlier_run_and_nothing_else(train, tmp_path):
    train("--adapter-path", "out", "--iters", "3", loads=True)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "best").mkdir(exist_ok=True)
    for name in ("adapters.safetensors", "adapter_config.json"):
        (tmp_path / "out" / "best" / name).write_text("of the earlier run")
    code, out, _ = train("--adapter-path", "out", "--overwrite", loads=True)
    assert code == 0
    assert "--overwrite: the earlier run in out is deleted." in out
    assert not (tmp_path / "out" / "0000003_adapters.safetensors").exists()
    assert not list((tmp_path / "out" / "best").iterdir())
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "out-1").exists()
    assert state.peek(state.state_path(tmp_path / "out")).iteration == 2


@pytest.mark.bad_input("a used adapter_path with the data or the current folder in it")
def test_folder_with_the_runs_inputs_is_not_moved(train, checkpoint, data_folder, tmp_path, monkeypatch):
    """The data, the model or the current folder lie in the output folder."""
    (tmp_path / "out" / "data").mkdir(parents=True)
    for file in data_folder.iterdir():
        (tmp_path / "out" / "data" / file.name).write_bytes(file.read_bytes())
    assert train("--adapter-path", "out", "--data", "out/data", loads=True)[0] == 0
    before = contents(tmp_path)
    code, _, err = train("--adapter-path", "out", "--data", "out/data")
    assert code == 2
    assert "cannot be moved away, because that folder is or contains the data" in err
    monkeypatch.chdir(tmp_path / "out")
    code, _, err = train("--adapter-path", ".")
    assert code == 2
    assert "the current folder" in err
    assert contents(tmp_path) == before


@pytest.mark.bad_input("an adapter_path into which another run trains")
def test_a_second_run_in_one_folder_is_refused_with_the_process_of_the_first(train, holder, tmp_path):
    for flags in ((), ("--resume",), ("--overwrite",)):
        code, _, err = train("--adapter-path", "out", *flags)
        assert code == 2
        assert f"--adapter-path out is in use by another run (process {holder.pid} on " in err
        assert err.count("\n") == 1
    holder.kill()
    holder.wait()
    assert train("--adapter-path", "out", loads=True)[0] == 0
    assert not (tmp_path / "out" / "state" / "lock").exists()


def test_a_trainer_in_python_takes_the_folder_too(make_trainer, tmp_path, monkeypatch):
    inner = []

    def second(*_):
        if not inner:
            inner.append(make_trainer(iters=1))
            with pytest.raises(UserError, match=r"is in use by another run \(this process\)"):
                inner[0].run()
        return False

    with monkeypatch.context() as patch:
        patch.setattr("deltatune.train.iterations.Iterations._evaluation_is_due", second)
        make_trainer(iters=1).run()
    assert inner
    make_trainer(iters=1).run()
    assert (tmp_path / "out-1" / "adapters.safetensors").is_file()


@pytest.mark.bad_input("a --report-to whose package is missing")
def test_loggers_are_checked_before_loading(train, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = train("--report-to", "wandb")
    assert code == 2
    assert "pip install wandb" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.weekly
def test_two_ranks_are_refused_together(launch, options, holder, tmp_path):
    done = launch(options | {"adapter_path": str(tmp_path / "out")})
    assert f"in use by another run (process {holder.pid}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Loading" not in done.stdout
