"""A run that is killed, or continued elsewhere, ends with the bits of one never stopped; another run is refused."""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest

from deltatune.errors import UserError
from deltatune.machine import backend, blas, compiling, environment, threads
from deltatune.machine.threads import Threads
from deltatune.ops.gated_delta import choice, gated_delta_chunk
from deltatune.ops.operator import timing, verdicts
from deltatune.ops.operator.operator import Candidate
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
    """The first state comes after iteration 3, which is inside an accumulation of 2."""
    straight = straight_run()
    # Here the old state is moved aside, and the new one is not in its place yet.
    killed_run("to:previous.safetensors", 1)
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


@pytest.fixture
def unmeasured(monkeypatch, tmp_path):
    """A machine without a measured order of preference, with `other`, which differs from chunk in last bits.

    `seconds[name]` is how long either takes, and `traced[name]` how often it was put into a graph.
    """
    seconds, traced, last = {"other": 1.0, "chunk": 2.0}, {"other": 0, "chunk": 0}, [""]
    now = [0.0]

    def clock():
        now[0] += seconds.get(last[0], 0.0)
        return now[0]

    def named(name):
        def function(q, k, v, *arrays, **options):
            last[0] = name
            traced[name] += 1
            factor = 1 + 2e-7 * (name == "other")
            return gated_delta_chunk(q, k, v * factor, *arrays, **options)

        return lambda call: Candidate(function, call.shape_class(), function, trusted=name == "chunk")

    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(choice.OPERATOR.orders, "cpu", ("other", "chunk"))
    monkeypatch.setattr(backend, "_UNMEASURED", ("cpu",))
    monkeypatch.setattr(timing, "clock", clock)
    for name in seconds:
        monkeypatch.setitem(choice.OPERATOR.candidates, name, named(name))
    verdicts.forget()
    # Times are those of this clock, so that g++ need not build MLX's kernels for each.
    with compiling.without_kernels():
        yield SimpleNamespace(seconds=seconds, traced=traced)
    verdicts.forget()


def kept(folder) -> dict[str, list[str]]:
    found = state.peek(state.state_path(folder)).implementations
    return {key: names for key, names in found.items() if key.startswith("gated_delta, float32, ")}


def test_a_continuation_takes_the_choices_of_its_run(unmeasured, make_trainer, screen_text, tmp_path):
    # Adam's first updates would hide last bits.
    short = {"val_batches": 0, "grad_accumulation_steps": 1, "optimizer": "sgd"}
    make_trainer(adapter_path=str(tmp_path / "straight"), iters=2, **short).run()
    make_trainer(iters=1, **short).run()
    ((key, names),) = kept(tmp_path / "out").items()
    assert names == ["other", "chunk"]
    # At the next start chunk is faster, and nothing is remembered.
    unmeasured.seconds["other"] = 9.0
    (tmp_path / "cache").rename(tmp_path / "gone")
    verdicts.forget()
    traced = unmeasured.traced["chunk"]
    make_trainer(iters=2, resume=True, **short).run()
    assert unmeasured.traced["chunk"] == traced
    assert f"{key}: other (as in the run that is continued).\n" in screen_text.text()
    assert adapters(tmp_path / "out") == adapters(tmp_path / "straight")
    # A new run takes the faster one, whose bits are others.
    make_trainer(adapter_path=str(tmp_path / "new"), iters=2, **short).run()
    assert kept(tmp_path / "new") == {key: ["chunk", "other"]}
    assert adapters(tmp_path / "new") != adapters(tmp_path / "straight")


@pytest.fixture
def moved(checkpoint, tmp_path):
    """A copy of the checkpoint in another folder."""
    return shutil.copytree(checkpoint, tmp_path / "moved")


def test_a_finished_run_can_be_made_longer_and_model_and_data_may_move(
    make_trainer, moved, tmp_path, straight_run, begun, read_metrics
):
    straight = straight_run()
    begun()
    make_trainer(resume=True, model=str(moved), data="elsewhere").run()
    assert adapters(tmp_path / "out") == adapters(straight)
    # The shorter run did not evaluate, and reported at its end, so that only the last reports can be equal.
    assert read_metrics(tmp_path / "out")[-1] == read_metrics(straight)[-1]


@pytest.mark.bad_input("--resume after one number of the base weights changed ({kind})")
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_one_other_number_in_the_weights_is_refused(make_trainer, begun, moved, kind):
    """Size and time of the file stay as they were."""
    begun(fine_tune_type=kind)
    weights = moved / "model.safetensors"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    message = rf"another run.*:\n  model: was .*, now {re.escape(str(moved))}, with other numbers in its weights\nGive"
    with pytest.raises(UserError, match=message):
        make_trainer(resume=True, model=str(moved), fine_tune_type=kind).run()


@pytest.mark.bad_input("--resume after config.json changed")
def test_a_model_that_computes_otherwise_is_refused(make_trainer, begun, moved):
    begun()
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}))
    make_trainer(resume=True, iters=4, model=str(moved)).run()
    config["text_config"]["rms_norm_eps"] = 1e-3
    (moved / "config.json").write_text(json.dumps(config))
    message = rf":\n  model: {re.escape(str(moved))} as before, but with another config.json\nGive the same model"
    with pytest.raises(UserError, match=message):
        make_trainer(resume=True, model=str(moved)).run()


@pytest.mark.bad_input("--resume with other options, which make other tensors train")
def test_other_options_are_not_called_another_model(make_trainer, begun, options):
    begun()
    with pytest.raises(UserError, match="lora_parameters: rank: was 2, now 3") as caught:
        make_trainer(resume=True, lora_parameters=options["lora_parameters"] | {"rank": 3}).run()
    with pytest.raises(UserError, match=r"lora_parameters: rank_pattern: was {}, now {'q_proj': 1}"):
        make_trainer(resume=True, lora_parameters=options["lora_parameters"] | {"rank_pattern": {"q_proj": 1}}).run()
    assert "model:" not in str(caught.value)


def test_adapters_to_start_from_may_move_but_not_change(make_trainer, straight_run, tmp_path):
    names = [straight_run() / f"000000{number}_adapters.safetensors" for number in (3, 6)]
    copy = shutil.copy(names[0], tmp_path / "copy.safetensors")
    make_trainer(iters=1, resume_adapter_file=str(names[0])).run()
    make_trainer(iters=2, resume_adapter_file=str(copy), resume=True).run()
    with pytest.raises(UserError, match="resume_adapter_file: other weights than those"):
        make_trainer(iters=3, resume_adapter_file=str(names[1]), resume=True).run()


def test_checkpointing_may_be_added_after_memory_ran_out(make_trainer, tmp_path, read_metrics, run_with, straight_run):
    straight = straight_run()
    trainer = make_trainer(save_every=100)

    def out_of_memory(iterations, _):
        if iterations.progress.iteration == 4:
            raise RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")

    with pytest.raises(RuntimeError, match="Resource limit"):
        run_with(trainer, out_of_memory)
    make_trainer(resume=True, grad_checkpoint=True).run()
    for ours, theirs in zip(read_metrics(tmp_path / "out"), read_metrics(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.bad_input("--resume of a state in another format")
def test_a_state_of_another_format_is_refused(make_trainer, begun):
    """Formats before 3 had no checksum."""
    path = state.state_path(begun())
    arrays, metadata = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    for number in (1, 4):
        content = json.loads(metadata["deltatune"]) | {"format": number}
        mx.save_safetensors(str(path), arrays, {"deltatune": json.dumps(content)})
        said = f"state format {number}, and this deltatune reads format 3: continue the run"
        with pytest.raises(UserError, match=said):
            make_trainer(resume=True).run()
