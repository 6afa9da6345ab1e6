#!/usr/bin/env python3
"""Give the same rows in every format to every command that reads data, through the installed console script.

usage: scripts/data_formats.py (scripts/from_wheel runs it in a clean environment)

Each command must end well, and `--show-batch` must print the same batch for every format.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

ROWS = [
    {"prompt": f"{number} teas, please", "completion": f'{{"item": "tea", "count": {number}}}'}
    for number in range(1, 7)
]
SPLITS = ("train", "valid", "test")
#: The commands that read data, by what they are called here, with the options that change how data are read.
COMMANDS = {
    "show a batch": ["train", "--show-batch"],
    "show a streamed batch": ["train", "--show-batch", "--streaming"],
    "train": ["train", "--iters", "2", "--test"],
    "train packed": ["train", "--iters", "2", "--pack"],
    "train streamed": ["train", "--iters", "2", "--streaming"],
    "train on every token": ["train", "--iters", "1", "--no-mask-prompt", "--chat-turns", "each"],
    "plan": ["plan"],
    "evaluate": ["eval"],
}
_TRAINING = ["--num-layers", "1", "--rank", "2"]
_SHOWN = {"show a batch", "show a streamed batch"}


@dataclass(frozen=True)
class Case:
    """A command on a format: its arguments, and whether it must refuse (exit code 2, one message)."""

    form: str
    command: str
    arguments: list[str]
    refused: bool = False


def write(folder: Path) -> dict[str, list[str]]:
    """Write the rows in every format below a folder; return the arguments that name each."""
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(ROWS)
    for name in ("jsonl", "json", "csv", "tsv", "parquet", "single"):
        (folder / name).mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for split in SPLITS:
        (folder / "jsonl" / f"{split}.jsonl").write_text(lines)
        (folder / "json" / f"{split}.json").write_text(json.dumps(ROWS, indent=1))
        for name, separator in (("csv", ","), ("tsv", "\t")):
            with (folder / name / f"{split}.{name}").open("w", newline="") as file:
                writer = csv.DictWriter(file, ["prompt", "completion"], delimiter=separator)
                writer.writeheader()
                writer.writerows(ROWS)
        table.to_parquet(str(folder / "parquet" / f"{split}.parquet"))
    (folder / "single" / "chats.jsonl").write_text(lines)
    datasets.DatasetDict(dict.fromkeys(SPLITS, table)).save_to_disk(str(folder / "saved"))
    file = folder / "run.yaml"
    splits = "".join(f"  {split}_split: train\n" for split in SPLITS)
    file.write_text(f"hf_dataset:\n  path: {json.dumps(str(folder / 'single'))}\n{splits}")
    named = {"JSONL": "jsonl", "JSON array": "json", "CSV": "csv", "TSV": "tsv", "Parquet": "parquet"}
    named |= {"save_to_disk": "saved", "a file of another name": "single"}
    return {form: ["--data", str(folder / name)] for form, name in named.items()} | {"hf_dataset": ["-c", str(file)]}


def cases(folder: Path, model: str | Path) -> Iterator[Case]:
    """Write the data below a folder, and yield every command on every format."""
    formats = write(folder)
    for command, arguments in COMMANDS.items():
        for form, data in formats.items():
            own = [*arguments, "--model", str(model), *data, "--batch-size", "2", "--max-seq-length", "64"]
            if arguments[0] != "eval":
                own += _TRAINING
            if arguments[0] == "train" and command not in _SHOWN:
                own += ["--adapter-path", str(folder / "adapters")]
            untested = form == "a file of another name" and (command == "evaluate" or "--test" in arguments)
            yield Case(form, command, own, untested or (form == "JSON array" and "--streaming" in arguments))


def problem(case: Case, done: subprocess.CompletedProcess[str], shown: dict[str, str]) -> str | None:
    """Return what is wrong with a command's end, or None; `shown` collects the batch that each command shows."""
    said = done.stderr.strip().splitlines()
    if case.refused:
        return None if done.returncode == 2 and len(said) == 1 else f"was not refused in one message: {said[-3:]}"
    if done.returncode or "Traceback" in done.stderr:
        return f"exit code {done.returncode}: {' '.join(said[-3:])}"
    # A row is called by its file and line, or by its data set and number.
    batch = re.sub(r"(?m)^(row \d+): .*(: \d+ tokens)", r"\1\2", done.stdout)
    if case.command in _SHOWN and batch != shown.setdefault(case.command, batch):
        return "shows another batch than the first format"
    return None


def main() -> int:
    """Run every case, print a line for each, and return 1 if one failed."""
    script = Path(sys.executable).with_name("deltatune")
    failed, shown = 0, {}
    with tempfile.TemporaryDirectory() as place:
        tried = list(cases(Path(place), str(files("deltatune.demo") / "assets" / "model")))
        for case in tried:
            started = time.perf_counter()
            done = subprocess.run([str(script), *case.arguments], capture_output=True, text=True, cwd=place)
            wrong = problem(case, done, shown)
            failed += wrong is not None
            print(f"{case.form}, {case.command}: {wrong or 'ok'} ({time.perf_counter() - started:.0f} s)", flush=True)
    print(f"{len(tried) - failed} of {len(tried)} ended as they should.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
