"""Commands on a simulated macOS with the stand-in for its GPU: no Linux-only function or file, 256 open files."""

import os
import re
import shutil
from pathlib import Path

import pytest

from beside import load
from console import cache_of

HERE = Path(__file__).parent
programs, running = load(HERE / "test_programs.py"), load(HERE / "running.py")
pytestmark = programs.pytestmark


@pytest.fixture(scope="module")
def on_mac(host_folder, tmp_path_factory):
    """on_mac(*commands, interrupts=()) -> what each command did (running.py)."""
    environment = os.environ | {"DELTATUNE_CACHE": cache_of(tmp_path_factory.mktemp("cache")), "COLUMNS": "200"}
    here = tmp_path_factory.mktemp("current_folder")

    def run(*commands: list, interrupts: tuple[str, ...] = ()) -> list[dict]:
        flags = ("--smaller", "--macos")
        return running.ran(commands, host_folder, *flags, cwd=here, env=environment, interrupts=interrupts)

    return run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    ask = lambda n: {"role": "user", "content": programs.question(n)}  # noqa: E731
    rows = lambda n: {"messages": [ask(n), {"role": "assistant", "content": f"{n * 7} fox"}]}  # noqa: E731
    return programs.written(tmp_path_factory.mktemp("chats"), rows)


def test_a_bounded_run_is_stopped_and_continued_and_its_model_answers(on_mac, checkpoint, data, tmp_path):
    """A layer stays on the disk. Ctrl-C comes while MLX computes."""
    bounded = [*programs.train(checkpoint, data, tmp_path / "run"), "--memory", "7MB"]
    asked = ["--model", checkpoint, "--adapter-path", tmp_path / "run", "--prompt", "which?", "--max-tokens", 3]
    stopped, resumed, answered = on_mac(
        [*bounded, "--iters", 50], [*bounded, "--iters", 4, "--resume"], ["generate", *asked], interrupts=("Iter 2/50",)
    )
    assert stopped["code"] == 2, stopped["said"]
    assert "1 of 2 layers, 0.2 MB, stay on the disk" in stopped["said"]
    assert "BLAS: macOS: MLX uses Accelerate" in stopped["said"]
    assert "The first iteration takes" in stopped["said"]
    programs.check_ended_well([resumed, answered])
    assert re.search(r"Resuming after iteration [23] of 4\.", resumed["said"])
    assert resumed["kernels"].keys() == programs.GATED_DELTA | programs.ATTENTION


def test_every_command_works(on_mac, checkpoint, tiny_checkpoint, data, tmp_path):
    shape = {"num_hidden_layers": 2, "full_attention_interval": 2}
    mixture = tiny_checkpoint("qwen3_5_moe", quantize={}, **shape)
    shutil.copy(data / "valid.jsonl", data / "test.jsonl")
    adapter = ["--model", checkpoint, "--adapter-path", tmp_path / "run"]
    trained = programs.train(checkpoint, data, tmp_path / "run")
    theirs = ["--train", "--model", checkpoint, "--data", data, "--adapter-path", tmp_path / "theirs", "--iters", 2]
    theirs += ["--batch-size", 2, "--max-seq-length", 32, "--val-batches", 1, "--num-layers", 2]
    found = on_mac(
        trained,
        programs.train(mixture, data, tmp_path / "mixture"),
        ["eval", *adapter, "--data", data],
        ["plan", "--model", checkpoint, "--data", data],
        ["generate", *adapter, "--prompt", "which?", "--max-tokens", 3],
        ["chat", *adapter],
        ["merge", *adapter, "--save-path", tmp_path / "merged"],
        *(["export", *adapter, "--to", kind, "--save-path", tmp_path / kind] for kind in ("peft", "mlx")),
        ["import", "--model", checkpoint, "--peft", tmp_path / "peft", "--save-path", tmp_path / "imported"],
        ["runs", tmp_path],
        ["run", "--", "mlx_lm.lora", *theirs],
        ["doctor", "--model", checkpoint],
    )
    for each in found:
        print(each["code"], each["said"][-1500:])
    programs.check_ended_well(found)


def test_ctrl_c_twice_ends_a_run_before_its_step(on_mac, checkpoint, data, tmp_path):
    one = programs.train(checkpoint, data, tmp_path / "run")
    interrupts = ("Iter 2/50", "finishing this step")
    stopped, resumed = on_mac([*one, "--iters", 50], [*one, "--iters", 4, "--resume"], interrupts=interrupts)
    assert stopped["code"] == 2, stopped["said"]
    programs.check_ended_well([resumed])
