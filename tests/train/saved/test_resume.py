"""Tests that a run that is killed at any instant and resumed ends with the bits of a run that was never killed."""

import ctypes
import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from deltatune.lora import pissa
from deltatune.machine import blas, environment, threads
from deltatune.machine.threads import Threads
from deltatune.train.saved import state
from killed_runs import KILLED_AT_A_POINT, adapters


@pytest.fixture
def killed_run(options, tmp_path):
    """killed_run(where, count, *flags) runs in `out` until SIGKILL at the count-th such point; returns its output."""
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(options | {"adapter_path": str(tmp_path / "out")}))

    def run(where, count, *flags):
        command = [sys.executable, "-c", KILLED_AT_A_POINT, where, str(count), str(file), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == -signal.SIGKILL, done.stderr
        return done.stdout

    return run


def test_killed_again_and_again_the_run_ends_with_the_same_bits(
    make_trainer, killed_run, tmp_path, read_metrics, straight_run
):
    """The kills come after the first state's rename, inside an accumulation and in later saves."""
    straight = straight_run()
    # The first state comes after iteration 3, which is inside an accumulation of 2.
    killed_run("to:state.safetensors", 1)
    # Here the old state is moved aside, and the new one is not in its place yet.
    assert "Resuming after iteration 3 of 8" in killed_run("to:previous.safetensors", 1, "--resume")
    assert "state.safetensors is missing: resuming from the state before it" in killed_run("write", 1, "--resume")
    make_trainer(resume=True).run()
    for name in ("adapters.safetensors", "0000006_adapters.safetensors", "best/adapters.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (straight / name).read_bytes()
    assert read_metrics(tmp_path / "out") == read_metrics(straight)
    assert not list((tmp_path / "out").glob("**/.*"))


@pytest.mark.skipif(blas.status().name != "openblas", reason="threads of OpenBLAS")
def test_a_run_goes_on_with_the_blas_threads_that_it_had(make_trainer, monkeypatch, tmp_path, screen_text):
    """The last bits of a product depend on the number of threads, which another load of the machine could change."""
    monkeypatch.setattr(blas, "_status", replace(blas.status(), threads=Threads(2, "here")))
    make_trainer(iters=2).run()
    assert state.peek(state.state_path(tmp_path / "out")).blas_threads == 2
    monkeypatch.setattr(blas, "_status", replace(blas.status(), threads=Threads(1, "busy")))
    monkeypatch.delenv(environment.THREADS, raising=False)
    monkeypatch.setattr(environment, "cores", lambda: 2)
    monkeypatch.setattr(threads, "quota", lambda: None)
    library = ctypes.CDLL(str(blas.status().path))
    try:
        make_trainer(resume=True, iters=4).run()
        assert library.openblas_get_num_threads() == 2
        assert "BLAS: 2 threads (as in the run that is continued)." in screen_text.text()
        # The number must not exceed this machine's cores, nor replace the one that the user forces.
        assert not blas.use_threads(3, "more than cores")
        monkeypatch.setenv(environment.THREADS, "1")
        assert not blas.use_threads(1, "not the user's number")
    finally:
        library.openblas_set_num_threads(1)


def test_a_resumed_run_draws_the_same_noise(make_trainer, tmp_path, read_metrics):
    runs = {}
    for name, alpha in (("plain", None), ("noisy", 5.0)):
        trainer = make_trainer(adapter_path=str(tmp_path / name), neftune_noise_alpha=alpha, iters=4)
        trainer.run()
        runs[name] = read_metrics(tmp_path / name)
    make_trainer(neftune_noise_alpha=5.0, iters=3).run()
    make_trainer(neftune_noise_alpha=5.0, iters=4, resume=True).run()
    assert adapters(tmp_path / "noisy") == adapters(tmp_path / "out") != adapters(tmp_path / "plain")
    assert runs["noisy"][0]["val_loss"] == runs["plain"][0]["val_loss"]
    assert runs["noisy"][1]["train_loss"] != runs["plain"][1]["train_loss"]


def test_a_run_resumes_with_the_start_that_it_had(make_trainer, tmp_path, monkeypatch):
    options = {"lora_parameters": {"rank": 2, "scale": 10.0, "dropout": 0.1, "init": "pissa"}, "val_batches": 0}
    make_trainer(adapter_path=str(tmp_path / "straight"), iters=4, **options).run()
    make_trainer(iters=3, **options).run()
    found = pissa.principal_factors
    # Another number of threads, or another machine, would find other last bits; here they differ far more.
    monkeypatch.setattr(pissa, "principal_factors", lambda *given: [1.1 * each for each in found(*given)])
    make_trainer(iters=4, resume=True, **options).run()
    assert adapters(tmp_path / "straight") == adapters(tmp_path / "out")
