"""Every command does as its help states: a table of sentences, on a few shared runs."""

import ast
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import mlx.core as mx
import pytest
import yaml
from pages import ROOT

import docs_pages
from console import called

ROW = {"prompt": "the quick brown fox", "completion": "jumps over"}
# Two reports and evaluations in four iterations, a test, samples, and more layers than the model has.
FULL = """--iters 4 --batch-size 2 --max-seq-length 64 --num-layers 17 --steps-per-report 2 --steps-per-eval 2
--save-every 2 --val-batches -1 --test --test-batches 1 --keep 1 --sample-prompts why prompts.jsonl
--grad-accumulation-steps 2"""

# All weights, columns of other names, a row that is too long, and no evaluation.
WHOLE = """--fine-tune-type full --optimizer sgd --batch-size 2 --epochs 1.2 --val-batches 0 --no-mask-prompt
--prompt-column question --completion-column answer --max-seq-length 24 --overlong skip"""
# One step of plain gradient descent, so that what changes the gradient or its rate shows in the B matrices' norm.
CLIPPED = """--iters 1 --optimizer sgd --learning-rate 1 --grad-clip 0.01 --val-batches 0
--rank 4 --alpha 8"""
# A learning rate with which no evaluation is lower than the first.
CONTINUED = """--iters 6 --learning-rate 1e-30 --steps-per-eval 1 --early-stopping 2 --save-every 1 --rank 4 --alpha 8
--resume-adapter-file clipped/adapters.safetensors"""


@dataclasses.dataclass
class Shop:
    """The folder in which the commands ran, the output of each, and the records and files that they left."""

    folder: Path
    said: dict[str, subprocess.CompletedProcess[str]] = dataclasses.field(default_factory=dict)
    records: dict[str, list[dict]] = dataclasses.field(default_factory=dict)
    files: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def run(
        self, name: str, line: str, *more: object, code: int = 0, records: str = "full", input: str | None = None
    ) -> None:
        stdin = io.TextIOWrapper(io.BytesIO((input or "").encode()))
        with mock.patch.object(sys, "stdin", stdin):
            done = called(*line.split(), *more, cwd=self.folder)
        assert done.returncode == code, f"{line}: {done.stdout[-500:]}{done.stderr}"
        self.said[name] = done
        metrics = self.folder / records / "metrics.jsonl"
        if metrics.exists():
            self.records[name] = [json.loads(each) for each in metrics.read_text().splitlines()]
        self.files[name] = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def out(self, name: str) -> str:
        return " ".join(self.said[name].stdout.split())


@pytest.fixture(scope="module")
def shop(tiny_checkpoint, tmp_path_factory):
    made = Shop(tmp_path_factory.mktemp("help"))
    (made.folder / "data").mkdir()
    for name in ("train", "valid", "test"):
        (made.folder / "data" / f"{name}.jsonl").write_text((json.dumps(ROW) + "\n") * 4)
    (made.folder / "prompts.jsonl").write_text(json.dumps(ROW) + "\n")
    (made.folder / "run.yaml").write_text("iters: 9\nbatch_size: 2\ndata: data\n")
    shutil.copytree(tiny_checkpoint("qwen3"), made.folder / "model")
    made.run("defaults", "train --model model --data data --iters 1")
    made.run("full", "train --model model --data data --adapter-path full", *FULL.split())
    flags = FULL.replace("--iters 4", "--iters 6").split()
    made.run("resumed", "train --model model --data data --adapter-path full --resume", *flags)
    made.run("moved", "train --model model -c run.yaml --adapter-path full --iters 1")
    made.run("overwritten", "train --model model -c run.yaml --adapter-path full --iters 1 --overwrite")
    made.run("merged", "merge --model model")
    made.run("shown", "train --model model --data data --show-batch --adapter-path none --batch-size 1")
    made.run("no data", "train --model model", code=2)
    (made.folder / "other").mkdir()
    other = [{"question": "the quick", "answer": "brown fox"}] * 4 + [{"question": "the " * 20, "answer": "dog " * 20}]
    (made.folder / "other" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    made.run("whole", "train --model model --data other --adapter-path whole", *WHOLE.split(), records="whole")
    made.run("clipped", "train --model model --data data --adapter-path clipped", *CLIPPED.split())
    made.run("continued", "train --model model --data data --adapter-path on", *CONTINUED.split(), records="on")
    made.run("evaluated", "eval --model model --data data --adapter-path clipped --test-batches 1 --batch-size 2")
    made.run("asked", "generate --model model --max-tokens 3 --prompt -", input="why\n")
    made.run("quiet", "generate --model model --max-tokens 3 --verbose false --temp 9 --top-k 1 --prompt why")
    made.run("plain", "generate --model model -m 3 --ignore-chat-template --prompt why")
    return made


def update(shop: Shop) -> float:
    """The norm of the B matrices after the one step of "clipped"."""
    weights = mx.load(str(shop.folder / "clipped" / "adapters.safetensors"))
    return sum(float(mx.square(value).sum()) for name, value in weights.items() if name.endswith("lora_b")) ** 0.5


def prompt_tokens(shop: Shop, name: str) -> int:
    return int(re.search(r"\[(\d+) prompt tokens", shop.out(name) + shop.said[name].stderr)[1])


def reports(shop: Shop, key: str, name: str = "full") -> list[int]:
    """The iterations with a key in their records."""
    return [record["iteration"] for record in shop.records[name] if key in record]


def adapters(shop: Shop, name: str) -> list[str]:
    """The numbered copies of the adapters after a command."""
    return [file for file in shop.files[name] if re.search(r"full/\d+_adapters", file)]


def layers(shop: Shop) -> set[str]:
    weights = mx.load(str(shop.folder / "full-1" / "adapters.safetensors"))
    return {name.partition(".layers.")[2].partition(".")[0] for name in weights}


def samples(shop: Shop) -> dict[int, list[str]]:
    asked = [record for record in shop.records["full"] if "samples" in record]
    return {record["iteration"]: [each["prompt"] for each in record["samples"]] for record in asked}


def options(shop: Shop, folder: str) -> dict:
    return json.loads((shop.folder / folder / "adapter_config.json").read_text())


# A sentence of a command's help, and what shows it. A sentence is found by its words, so it cannot be changed alone.
SENTENCES: dict[str, dict[str, Callable[[Shop], object]]] = {
    "train": {
        "number of iterations to train for": lambda s: reports(s, "train_loss")[-1] == 4,
        "number of iterations between reports of the training loss": lambda s: reports(s, "train_loss") == [2, 4],
        "number of iterations between evaluations": lambda s: reports(s, "val_loss") == [0, 2, 4],
        "evaluate the model on the test set after training": lambda s: "Test loss" in s.out("full"),
        "-1, or a number above the model's, trains all": lambda s: len(layers(s)) == 4,
        "number of numbered copies of the adapters to keep, the newest": lambda s: (
            adapters(s, "full") == ["full/0000004_adapters.safetensors"]
        ),
        "folder to which a run writes all its files (default: adapters)": lambda s: (
            "adapters/adapters.safetensors" in s.files["defaults"]
        ),
        "prompts that the model answers before, during and after training": lambda s: list(samples(s)) == [0, 2, 4],
        "a name that ends with .jsonl stands for the prompts, chats or texts in the rows of that file": lambda s: (
            samples(s)[0] == ["why", ROW["prompt"]]
        ),
        "continue the run that is saved in adapter_path": lambda s: reports(s, "train_loss", "resumed") == [2, 4, 6],
        "by default it is moved to a numbered folder beside it": lambda s: (
            "full-1/adapters.safetensors" in s.files["moved"]
        ),
        "delete an earlier run in adapter_path": lambda s: (
            not any(file.startswith("full-2") for file in s.files["overwritten"])
        ),
        "YAML file with options; flags override it": lambda s: (
            (options(s, "full")["iters"], options(s, "full")["batch_size"]) == (1, 2)
        ),
        "count only completions in the loss, which is the default for prompts and chats": lambda s: (
            "Loss on completions only" in s.out("defaults")
        ),
        "print the first batch, with the tokens that count in the loss marked, and stop": lambda s: (
            "jumps over" in s.out("shown") and not (s.folder / "none").exists()
        ),
        "required without hf_dataset": lambda s: "--data is missing" in s.said["no data"].stderr,
        "or the layers' own weights (full)": lambda s: "whole/model.safetensors" in s.files["whole"],
        "an optimizer of MLX": lambda s: "sgd" in (s.folder / "whole" / "run_options.json").read_text(),
        # Four rows are left, so 1.2 passes are 2.4 batches.
        "a fraction of one is rounded up": lambda s: reports(s, "train_loss", "whole") == [3],
        "longer than max_seq_length is cut (truncate) or left out (skip)": lambda s: "1 of 5" in s.out("whole"),
        "0 turns evaluation off": lambda s: not reports(s, "val_loss", "whole"),
        "--no-mask-prompt counts every token": lambda s: "on completions only" not in s.out("whole"),
        "key, or column, that holds the prompt of a row": lambda s: reports(s, "train_loss", "whole"),
        "key, or column, that holds the completion of a row": lambda s: reports(s, "train_loss", "whole"),
        "a larger gradient is scaled down to it": lambda s: update(s) == pytest.approx(0.01, rel=1e-4),
        "inner size of each adapter's update": lambda s: options(s, "clipped")["lora_parameters"]["rank"] == 4,
        "scale is alpha / rank": lambda s: options(s, "clipped")["lora_parameters"]["scale"] == 2,
        "stop training after this many evaluations": lambda s: reports(s, "val_loss", "continued") == [0, 1, 2],
        "file of adapter weights to start from": lambda s: (
            s.records["continued"][0]["val_loss"] != s.records["full"][0]["val_loss"]
        ),
    },
    "merge": {
        "folder of the adapter (default: adapters)": lambda s: "Merged into fused_model" in s.out("merged"),
        "new folder for the result (default: fused_model)": lambda s: (
            "fused_model/model.safetensors" in s.files["merged"]
        ),
    },
    "eval": {
        "number of batches in the test": lambda s: "Test loss" in s.out("evaluated"),
    },
    "generate": {
        "- reads it from standard input": lambda s: s.out("asked").startswith(s.out("quiet")),
        "largest number of tokens in the answer": lambda s: "3 generated" in str(s.said["asked"]),
        "sample from this number of the likeliest": lambda s: s.out("asked").startswith(s.out("quiet")),
        "sampling temperature": lambda s: s.out("asked").startswith(s.out("quiet")),
        "whether to print speeds": lambda s: "prompt tokens" not in str(s.said["quiet"]),
        "without a chat template": lambda s: prompt_tokens(s, "plain") < prompt_tokens(s, "asked"),
    },
}
TABLE = [(command, *sentence) for command, sentences in SENTENCES.items() for sentence in sentences.items()]


@pytest.mark.parametrize(("command", "sentence", "holds"), TABLE, ids=[f"{each[0]}: {each[1]}" for each in TABLE])
def test_a_sentence_of_the_help_holds(shop, command, sentence, holds):
    assert sentence in " ".join(docs_pages.commands()[command].format_help().split())
    assert holds(shop), shop.records["full"]


def test_the_defaults_that_the_help_names_are_those_of_a_run_without_flags(shop):
    written = options(shop, "adapters")
    written |= written["lora_parameters"]
    stated = {}
    for action in docs_pages.commands()["train"]._actions:
        named = re.search(r"\(default: (\S+)\)$", action.help or "")
        stated |= {action.dest: named[1]} if named else {}
    assert len(stated) > 25
    differing = {name for name, value in stated.items() if str(written[name]) != value}
    # The run was given a number of iterations.
    assert differing == {"iters"}
    assert stated["iters"] == "1000"


# The test that executes what the help says of an option whose sentence does not stand in TABLE.
_TESTS = yaml.safe_load((ROOT / "tests/docs/option_tests.yaml").read_text(encoding="utf-8"))
ELSEWHERE = {option: test for test, options in _TESTS.items() for option in options}


def shown_by(name: str) -> str:
    """The text of a test or of the fixture through which a file's tests run a command."""
    file, _, function = name.partition("::")
    path = ROOT / "tests" / f"{file}.py"
    text = path.read_text()
    nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    node = nodes[function]
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def test_every_option_does_as_its_help_states():
    """An option whose help is a sentence of TABLE, or that is named with a test in ELSEWHERE; none is in neither."""
    left = []
    for command, parser in docs_pages.commands().items():
        for action in parser._actions:
            if not action.option_strings or action.dest == "help":
                continue
            said = any(sentence in (action.help or "") for _, sentence, _ in TABLE)
            if not said and not ELSEWHERE.keys() & set(action.option_strings):
                left.append(f"{command} {action.option_strings[0]}: {action.help}")
    assert not left


@pytest.mark.parametrize("option", ELSEWHERE)
def test_the_test_that_an_option_names_uses_it(option):
    name = option.removeprefix("--").replace("-", "_")
    assert re.search(rf"{option}(?![\w-])|\b{name}\b", shown_by(ELSEWHERE[option])), f"{option}: {ELSEWHERE[option]}"
