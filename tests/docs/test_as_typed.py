"""The commands and the YAML files of the pages run as their reader types them, on tiny models in the places they name.

Only the length of a run is shortened. Commands that cannot run here stand in NOT_RUN with the tests that run them. The
shortest line of each command that no other test starts goes through the installed console script.
"""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from pages import ROOT, blocks

from console import deltatune
from deltatune import cli
from deltatune.commands import eval as eval_
from films import write_video
from mtp_heads import with_head

WEIGHTS = Path("adapters/adapters.safetensors")

SHORTER = {
    "train": ["--iters", "2", "--val-batches", "1", "--max-seq-length", "128", "--steps-per-eval", "2"],
    "grpo": ["--iters", "2", "--val-batches", "1", "--max-seq-length", "128", "--max-completion-length", "8"],
    "plan": ["--max-seq-length", "128"],
    "generate": ["--max-tokens", "2"],
    "eval": ["--max-seq-length", "128"],
}
# What keeps a command from running here, by how the command begins.
NOT_RUN = {
    "deltatune chat": "it reads questions; tests/commands/test_chat.py",
    "deltatune doctor": "tests/doctor runs it",
    "deltatune selftest": "it takes minutes; tests/selftest",
    "deltatune export --to gguf": "it needs llama.cpp; tests/export/test_gguf_file.py",
    "deltatune export --to mlx --model Qwen/Qwen3.5-0.8B --adapter-path adapters --save-path to-share --push-to-hub": (
        "it needs the hub; tests/export/test_hub.py"
    ),
    "deltatune run -- ": "a console script, a module and a file; tests/commands/test_run.py",
    "mlx.launch -n 2 deltatune train": "tests/train/test_distributed.py starts two processes",
    "mlx.launch --hosts": "it needs two machines",
    "mlx_lm.convert": "mlx-lm's own",
    "mlx_lm.server": "a server that does not end; tests/export/test_mlx_server.py",
}
COMMAND = re.compile(r"^(?:deltatune|mlx\.launch|mlx_lm\.\w+) .*$", re.MULTILINE)


def typed() -> dict[str, Path]:
    """Every command in the blocks of the pages, without its comment, and a page that has it."""
    found = {}
    for block in blocks("", "bash"):
        for line in COMMAND.findall(block.text):
            found.setdefault(shlex.join(shlex.split(line, comments=True)), block.page)
    return found


def reason(command: str) -> str | None:
    return next((why for beginning, why in NOT_RUN.items() if command.startswith(beginning)), None)


TYPED = typed()
#: The shortest line of each command, but those of which other tests start the script.
STARTED = ("train", "plan", "generate", "eval")
FIRST = {shlex.split(line)[1]: line for line in sorted(TYPED, key=len, reverse=True) if reason(line) is None}
FIRST = {name: line for name, line in FIRST.items() if name not in STARTED}


def marks(page: Path, line: str = "") -> list[pytest.MarkDecorator]:
    """At each commit run what README and the first pages show, and the shortest line of each command."""
    shown = page.name == "README.md" or page.parent.name == "start" or line in FIRST.values()
    return [] if shown else [pytest.mark.weekly]


RUN = [
    pytest.param(line, page, id=line[:100], marks=marks(page, line))
    for line, page in TYPED.items()
    if reason(line) is None
]
YAML = [pytest.param(block, id=str(block), marks=marks(block.page)) for block in blocks("yaml")]


def pairs(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {n}" + " dog" * (n % 9), "completion": f" answer {n * 7} fox"} for n in range(count)]


def write_lines(folder: Path, rows: list[dict], *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names or ("train", "valid", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def write_rewards(folder: Path) -> dict[str, Path]:
    """Write the functions of the page on rewards, and a program that it names."""
    page = ROOT / "docs/guides/rewards.md"
    functions = "".join(block.text for block in blocks("python") if block.page == page)
    (folder / "rewards.py").write_text(functions, encoding="utf-8")
    program = folder / "score.sh"
    program.write_text("#!/bin/sh\nwhile read -r line; do echo 1; done\n", encoding="utf-8")
    program.chmod(0o755)
    return {name: folder / name for name in ("rewards.py", "score.sh")}


@pytest.fixture(scope="module")
def places(tiny_checkpoint, tiny_vision_checkpoint, tmp_path_factory):
    """The files and models that the pages name, by these names."""
    folder = tmp_path_factory.mktemp("places")
    layers = {"num_hidden_layers": 2, "full_attention_interval": 2}
    dense, packed = (tiny_checkpoint("qwen3_5", quantize=bits, **layers) for bits in (None, {}))
    rows = pairs(64)
    headed = with_head(dense, folder / "headed")
    preferences = [row | {"chosen": row["completion"], "rejected": "no"} for row in pairs(64)]
    preferences = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in preferences]
    picture = folder / "pictures"
    data = write_lines(picture, [{"images": ["a.png"], "prompt": "What is it?", "completion": "fox"}] * 8)
    from PIL import Image

    for name in ("a.png", "b.png"):
        Image.new("RGB", (32, 32), "red").save(picture / name)
    shades = [np.full((32, 48, 3), shade, np.uint8) for shade in range(0, 240, 30)]
    write_video(picture / "a.mp4", shades, codec="mpeg4", rate=2)
    return {
        "Qwen/Qwen3.5-0.8B": dense,
        "PATH": dense,
        "PATH_OR_HUB_NAME": dense,
        "experts: PATH": tiny_checkpoint("qwen3_5_moe"),
        "vision: PATH": tiny_vision_checkpoint("qwen3_5"),
        "drafts: Qwen/Qwen3.5-0.8B": headed,
        "drafts: merged": headed,
        "vision: DIR": data,
        "vision: a.png": picture / "a.png",
        "vision: b.png": picture / "b.png",
        "vision: a.mp4": picture / "a.mp4",
        "mlx-community/Qwen3.5-0.8B-4bit": packed,
        "model-4bit": packed,
        "DIR": write_lines(folder / "rows", rows),
        "my-data": folder / "rows",
        "my-pairs": write_lines(folder / "pairs", preferences),
        "my-prompts": folder / "rows",
        "Qwen/Qwen3.5-9B": dense,
        **write_rewards(folder),
    }


@pytest.fixture
def desk(places, tmp_path, monkeypatch):
    """desk(page) -> goes to a folder with the files and models that the page names."""

    def sit(page: Path) -> Path:
        # What only one page means by a name comes last, and so replaces what the others mean.
        for place, target in sorted(places.items(), key=lambda item: ": " in item[0]):
            only, _, name = place.rpartition(": ")
            if only in ("", page.stem):
                link = tmp_path / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(target)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return sit


def started(words: list[str], *, script: bool = False) -> int:
    """Run a command of deltatune, shortened, and return its exit code; `script` takes the installed console script."""
    words = words + SHORTER.get("grpo" if {"grpo", "distill"} & {*words} else words[0], [])
    if not script:
        return cli.main(words)
    done = deltatune(*words)
    sys.stderr.write(done.stderr)
    return done.returncode


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(model, data) -> the adapters of a run, once for each checkpoint."""
    made: dict[Path, Path] = {}

    def adapters(model: str, data: str) -> Path:
        checkpoint = Path(model).resolve()
        if checkpoint not in made:
            made[checkpoint] = tmp_path_factory.mktemp("trained") / "adapters"
            assert started(["train", "--model", model, "--data", data, "--adapter-path", str(made[checkpoint])]) == 0
        return made[checkpoint]

    return adapters


def make_needed(words: list[str], trained) -> None:
    """Make the files that a command reads, as the commands above it on the page do."""
    model = words[words.index("--model") + 1]
    if "--save-path" in words:
        # A command further down the page may read it, so that it stands on the desk.
        Path(words[words.index("--save-path") + 1]).unlink(missing_ok=True)
    data = "DIR" if Path("a.png").exists() else "my-data"
    if "--resume" in words:
        assert started([word for word in words if word != "--resume"]) == 0
    elif "--peft" in words:
        exported = ["--adapter-path", str(trained("Qwen/Qwen3.5-0.8B", data)), "--save-path", "adapters-peft"]
        assert cli.main(["export", "--to", "peft", "--model", "Qwen/Qwen3.5-0.8B", *exported]) == 0
    elif words[0] not in ("train", "plan"):
        shutil.copytree(trained(model, data), "adapters")


@pytest.mark.parametrize(("line", "page"), RUN)
def test_a_command_runs(line, page, desk, trained, capsys, monkeypatch):
    monkeypatch.setattr(eval_, "_DRAFTED_TOKENS", 4)
    folder = desk(page)
    words = [re.sub("^~", str(folder), word) for word in shlex.split(line)[1:]]
    make_needed(words, trained)
    assert started(words, script=line in FIRST.values()) == 0, capsys.readouterr().err


def test_each_command_of_a_page_goes_through_the_script_once():
    assert {"merge", "export", "import"} <= FIRST.keys()


def test_lines_excused_from_running_are_on_a_page():
    assert not [beginning for beginning in NOT_RUN if not any(line.startswith(beginning) for line in TYPED)]


@pytest.mark.parametrize("block", YAML)
def test_a_yaml_file_trains(block, desk, places, tiny_checkpoint, capsys):
    """The model has the layers of Qwen3.5-0.8B as far as layer 11: each fourth is attention."""
    folder = desk(block.page)
    if "model:" in block.text:
        (folder / "Qwen/Qwen3.5-0.8B").unlink()
        (folder / "Qwen/Qwen3.5-0.8B").symlink_to(tiny_checkpoint("qwen3_5", num_hidden_layers=12))
    (folder / "run.yaml").write_text(block.text, encoding="utf-8")
    words = ["train", "-c", "run.yaml"]
    words += [] if "model:" in block.text else ["--model", "PATH"]
    words += ["--loss", "grpo"] if "loss: grpo" in block.text else []
    if "hf_dataset" in block.text:
        write_lines(folder / "billsum", [{"text": row["prompt"], "summary": row["completion"]} for row in pairs(40)])
    elif "data:" not in block.text:
        words += ["--data", "DIR"]
    assert started(words) == 0, capsys.readouterr().err
    assert mx.load(str(WEIGHTS))
