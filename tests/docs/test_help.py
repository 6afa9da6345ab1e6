"""What the help of a command states is what the installed command does: a table of sentences, on a few shared runs."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from console import deltatune

sys.path.insert(0, str(Path(__file__).parent))
from pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import docs_pages

ROW = {"prompt": "the quick brown fox", "completion": "jumps over"}
# Two reports and evaluations in four iterations, a test, samples, and more layers than the model has.
FULL = """--iters 4 --batch-size 2 --max-seq-length 64 --num-layers 17 --steps-per-report 2 --steps-per-eval 2
--save-every 2 --val-batches -1 --test --test-batches 1 --keep 1 --sample-prompts why prompts.jsonl --steps-per-sample 4
--sample-max-tokens 3 --grad-accumulation-steps 2"""


@dataclasses.dataclass
class Shop:
    """The folder in which the commands ran, what each of them printed, and the records and files that they left."""

    folder: Path
    said: dict[str, subprocess.CompletedProcess[str]] = dataclasses.field(default_factory=dict)
    records: dict[str, list[dict]] = dataclasses.field(default_factory=dict)
    files: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def run(self, name: str, line: str, *more: object, code: int = 0) -> None:
        done = deltatune(*line.split(), *more, cwd=self.folder, HF_HUB_OFFLINE="1")
        assert done.returncode == code, f"{line}: {done.stdout[-500:]}{done.stderr}"
        self.said[name] = done
        metrics = self.folder / "full" / "metrics.jsonl"
        if metrics.exists():
            self.records[name] = [json.loads(each) for each in metrics.read_text().splitlines()]
        self.files[name] = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def out(self, name: str) -> str:
        return " ".join(self.said[name].stdout.split())


@pytest.fixture(scope="module")
def shop(tiny_checkpoint, tmp_path_factory) -> Shop:
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
    return made


def reports(shop: Shop, key: str, name: str = "full") -> list[int]:
    """The iterations whose records have a key."""
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
TABLE: list[tuple[str, str, Callable[[Shop], object]]] = [
    ("train", "number of iterations to train for", lambda shop: reports(shop, "train_loss")[-1] == 4),
    (
        "train",
        "number of iterations between reports of the training loss",
        lambda s: reports(s, "train_loss") == [2, 4],
    ),
    ("train", "number of iterations between evaluations", lambda shop: reports(shop, "val_loss") == [0, 2, 4]),
    ("train", "evaluate the model on the test set after training", lambda shop: "Test loss" in shop.out("full")),
    ("train", "-1, or a number above the model's, trains all", lambda shop: len(layers(shop)) == 4),
    (
        "train",
        "number of numbered copies of the adapters to keep, the newest",
        lambda shop: adapters(shop, "full") == ["full/0000004_adapters.safetensors"],
    ),
    (
        "train",
        "folder to which a run writes all its files (default: adapters)",
        lambda shop: "adapters/adapters.safetensors" in shop.files["defaults"],
    ),
    (
        "train",
        "prompts that the model answers before, during and after training",
        lambda shop: list(samples(shop)) == [0, 4],
    ),
    (
        "train",
        "a name that ends with .jsonl stands for the prompts, chats or texts in the rows of that file",
        lambda shop: samples(shop)[0] == ["why", ROW["prompt"]],
    ),
    (
        "train",
        "continue the run that is saved in adapter_path",
        lambda shop: reports(shop, "train_loss", "resumed") == [2, 4, 6],
    ),
    (
        "train",
        "by default it is moved to a numbered folder beside it",
        lambda shop: "full-1/adapters.safetensors" in shop.files["moved"],
    ),
    (
        "train",
        "delete an earlier run in adapter_path",
        lambda shop: not any(file.startswith("full-2") for file in shop.files["overwritten"]),
    ),
    (
        "train",
        "YAML file with options; flags override it",
        lambda shop: (options(shop, "full")["iters"], options(shop, "full")["batch_size"]) == (1, 2),
    ),
    (
        "train",
        "count only completions in the loss, which is the default for prompts and chats",
        lambda shop: "Loss on completions only" in shop.out("defaults"),
    ),
    (
        "train",
        "print the first batch, with the tokens that count in the loss marked, and stop",
        lambda shop: "jumps over" in shop.out("shown") and not (shop.folder / "none").exists(),
    ),
    ("train", "required without hf_dataset", lambda shop: "--data is missing" in shop.said["no data"].stderr),
    (
        "merge",
        "folder of the adapter (default: adapters)",
        lambda shop: "Merged into fused_model" in shop.out("merged"),
    ),
    (
        "merge",
        "new folder for the result (default: fused_model)",
        lambda shop: "fused_model/model.safetensors" in shop.files["merged"],
    ),
]


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
