"""Whole programs "on Metal" (stand_in.py) train as on the CPU, with the fused kernels, and resume to the same bits.

All commands of a test run in one process, which takes seconds to start. `make on-metal` runs real head sizes.
"""

import json
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import deltatune
from beside import load
from console import cache_of
from deltatune.machine import backend

HERE = Path(__file__).parent
PACKAGE = Path(deltatune.__file__).parent
statements, marks = load(HERE / "mac_lines.py").statements, load(HERE / "marks.py")
running = load(HERE / "running.py")
GATED_DELTA = {f"gated_delta_{name}" for name in ("prepare", "scan", "reverse", "gradients")}
PER_CHANNEL = {f"gated_delta_channel_{name}" for name in ("prepare", "scan", "reverse", "gradients")}
ATTENTION = {f"attention_{name}" for name in ("forward", "delta", "queries", "keys")}
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or backend.device() != "cpu", reason="stands in for a Mac on Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which MLX itself needs for mx.compile"),
]


@pytest.fixture(scope="module")
def of_mac(tmp_path_factory):
    """A Mac's own statements, and the file beside which each process of the stand-in leaves which of them it ran."""
    found, lines = statements(PACKAGE), defaultdict(list)
    for each in found:
        lines[each.file].append(each.line)
    file = tmp_path_factory.mktemp("lines") / "marks"
    marks.write(file, lines)
    return found, file


@pytest.fixture(scope="module")
def on_metal(request, host_folder, of_mac, tmp_path_factory):
    """on_metal(*commands, **variables) -> what each command did: code, wired, kernels; and `said`, its output."""
    cache, here = cache_of(tmp_path_factory.mktemp("verdicts")), tmp_path_factory.mktemp("current_folder")
    sizes = [] if request.config.getoption("--real-sizes") else ["--smaller"]

    def run(*commands: list, **variables: str) -> list[dict]:
        environment = os.environ | {"DELTATUNE_CACHE": cache, "COLUMNS": "200"} | variables
        flags = [*sizes, "--marks", str(of_mac[1])]
        # Real head sizes take hours.
        return running.ran(commands, host_folder, *flags, cwd=here, env=environment, timeout=900 if sizes else None)

    return run


def check_ended_well(found: list[dict]) -> None:
    assert [each["code"] for each in found] == [0] * len(found), [each["said"][-1500:] for each in found]


def written(folder: Path, row: Callable[[int], dict]) -> Path:
    for name, numbers in (("train", range(8)), ("valid", range(8, 10))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in numbers))
    return folder


def question(number: int) -> str:
    return f"question {number}" + " dog" * (number % 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    answer = lambda n: {"prompt": question(n), "completion": f" {n * 7} fox"}  # noqa: E731
    return written(tmp_path_factory.mktemp("data"), answer)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    pair = lambda n: {"prompt": question(n), "chosen": f" {n * 7} fox", "rejected": " cat"}  # noqa: E731
    return written(tmp_path_factory.mktemp("pairs"), pair)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")

    def row(number: int) -> dict:
        Image.new("RGB", (32, 32), (25 * number, 0, 200)).save(folder / f"{number}.png")
        turns = [{"role": "user", "content": "<image>which?"}, {"role": "assistant", "content": f"{number}"}]
        return {"messages": turns, "images": [f"{number}.png"]}

    return written(folder, row)


def train(model: Path, data: Path, target: Path, *more: object) -> list:
    flags = ["--iters", 2, "--batch-size", 2, "--max-seq-length", 32, "--steps-per-report", 1, "--warmup", 0]
    flags += ["--val-batches", 1, "--learning-rate", "1e-3", "--lr-schedule", "constant"]
    return ["train", "--model", model, "--data", data, "--adapter-path", target, *flags, *more]


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train_loss"] for record in records if "train_loss" in record]


def adapters(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "adapters.safetensors"))


def check_same_as_on_the_cpu(here: Path, there: Path) -> None:
    """Losses to 1e-5; Adam's first steps have the size of the learning rate, so weights are compared as a whole."""
    np.testing.assert_allclose(losses(here), losses(there), rtol=1e-5)
    ours, theirs = (np.concatenate([np.array(x).ravel() for x in adapters(f).values()]) for f in (here, there))
    assert np.linalg.norm(ours - theirs) <= 1e-3 * np.linalg.norm(theirs)


@pytest.fixture(scope="module")
def text(on_metal, checkpoint, data, tmp_path_factory):
    """The folder of four runs on text, and what they did: in one go, in two parts, and on the CPU."""
    folder = tmp_path_factory.mktemp("text")
    packed = ("--pack", "--grad-checkpoint")
    found = on_metal(
        train(checkpoint, data, folder / "whole", *packed),
        train(checkpoint, data, folder / "halves", *packed, "--iters", 1),
        train(checkpoint, data, folder / "halves", *packed, "--resume"),
        ["on the CPU", *train(checkpoint, data, folder / "cpu", *packed)],
    )
    return folder, found


def test_text_trains_as_on_the_cpu_and_resumes_to_the_same_bits(text):
    folder, found = text
    check_ended_well(found)
    on_gpu, on_cpu = found[:3], found[3]
    for each in on_gpu:
        assert set(each["kernels"]) == GATED_DELTA | ATTENTION
        assert each["wired"] == [2**34, 0]
        assert "Device: metal" in each["said"]
        assert "Step: compiled, once" in each["said"]
        assert "499,000 live buffers" in each["said"]
        assert "\nThe first iteration takes 20 to 60 seconds longer than others" in each["said"]
    # Chosen by time, in a clock that stands still; the continuation takes what its run has chosen.
    first, _, resumed = (each["said"] for each in on_gpu)
    for line in ("gated_delta, float32, ", "attention, float32, "):
        assert f"\n{line}" in first
        assert re.search(rf"\n{line}.*: fused \(as in the run that is continued\)\.", resumed)
    assert re.search(r"\ngated_delta, .*: fused \(automatic on metal; .*fused 0\.0 ms, chunk 0\.0 ms\)\.", first)
    assert re.search(r"\nattention, .*: fused \(automatic on metal; .*fused 0\.0 ms, blocked 0\.0 ms\)\.", first)
    assert not on_cpu["kernels"]
    assert not on_cpu["wired"]
    assert "Device: cpu" in on_cpu["said"]
    assert "The first iteration takes" not in on_cpu["said"]
    one, other = adapters(folder / "whole"), adapters(folder / "halves")
    assert all(mx.array_equal(one[name], other[name]) for name in one)
    assert losses(folder / "whole") == losses(folder / "halves")
    check_same_as_on_the_cpu(folder / "whole", folder / "cpu")


@pytest.fixture(scope="module")
def others(on_metal, checkpoint, tiny_checkpoint, tiny_vision_checkpoint, data, pairs, pictures, tmp_path_factory):
    """The folder of runs on a mixture, preferences and images, their names, and what they did, then on the CPU."""
    folder = tmp_path_factory.mktemp("others")
    mixture = tiny_checkpoint("qwen3_5_moe", num_hidden_layers=2, full_attention_interval=2)
    runs = {
        "mixture": train(mixture, data, folder / "mixture"),
        "pairs": train(checkpoint, pairs, folder / "pairs", "--loss", "dpo", "--max-seq-length", 64),
        "images": train(tiny_vision_checkpoint("qwen3_5"), pictures, folder / "images", "--max-seq-length", 64),
    }
    on_cpu = [["on the CPU", *command] for command in runs.values()]
    for command, name in zip(on_cpu, runs, strict=True):
        command[command.index("--adapter-path") + 1] = folder / f"{name}_cpu"
    return folder, list(runs), on_metal(*runs.values(), *on_cpu, MLX_DISABLE_COMPILE="1")


def test_a_mixture_preferences_and_images_train_as_on_the_cpu(others):
    """Step by step: with mx.compile off."""
    folder, names, found = others
    check_ended_well(found)
    for name, each in zip(names, found, strict=False):
        assert set(each["kernels"]) == GATED_DELTA | ATTENTION, name
        assert "not compiled" in each["said"]
        check_same_as_on_the_cpu(folder / name, folder / f"{name}_cpu")


def statements_left(of_mac) -> list[str]:
    """The statements of a Mac that no program of this session has run, as not_run.txt names them."""
    run = marks.read(of_mac[1])
    return sorted(str(each) for each in of_mac[0] if each.line not in run[each.file])


def statements_listed() -> tuple[list[str], list[str]]:
    """The statements that no program runs, and those that the self-test and the demo alone run."""
    never, weekly = (HERE / "not_run.txt").read_text().split("# Weekly.\n")
    return tuple([line for line in part.splitlines() if line and not line.startswith("#")] for part in (never, weekly))


def test_branches_of_a_mac_are_run(text, others, of_mac):
    """not_run.txt names the rest; a new branch of a Mac that nothing runs here is missing there."""
    left, (never, weekly) = statements_left(of_mac), statements_listed()
    assert left == sorted(never + weekly), "tests/on_metal/not_run.txt should be:\n" + "\n".join(left)


@pytest.fixture(scope="module")
def selftest(on_metal, tmp_path_factory):
    """What the self-test and a short demo did. The demo's iterations are too few to learn anything."""
    folder = tmp_path_factory.mktemp("demo")
    return tuple(on_metal(["selftest", "--quick"], ["short demo", folder, 2, 3]))


# Upstream's own kernels are computed by array operations here (upstreams_kernels.py), a loop whose operations this
# check counts. On a Mac that is one kernel.
OF_THE_STAND_IN = "control: train() forgotten"


@pytest.mark.weekly
def test_the_selftest_passes(selftest):
    found, _ = selftest
    assert set(found["kernels"]) == GATED_DELTA | PER_CHANNEL | ATTENTION
    assert "metal: Apple M3" in found["said"]
    wrong = re.findall(r"^✗ (.*?)  ", found["said"], re.MULTILINE)
    assert wrong == [OF_THE_STAND_IN], found["said"]


@pytest.mark.weekly
def test_the_demo_runs_to_its_end(selftest):
    _, found = selftest
    # Its questions are answered many at once.
    assert set(found["kernels"]) == GATED_DELTA | ATTENTION | {"delta_token", "attention_token"}
    assert "mlx_lm.load reads the adapter; 3 of 3 answers are the same." in found["said"]


@pytest.mark.weekly
def test_the_selftest_and_the_demo_run_the_rest(text, others, selftest, of_mac):
    assert statements_left(of_mac) == sorted(statements_listed()[0])
