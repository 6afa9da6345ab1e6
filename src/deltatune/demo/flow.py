"""The course of every demo: ask the base model, train, ask again, ask through upstream alone, and report."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from rich.text import Text

from ..errors import UserError
from ..models.load import Loaded
from ..options.config import LoraConfig, TrainConfig
from ..train import Result, Trainer
from ..train.reports.announce import trainable_count
from ..train.reports.columns import gigabytes, sparkline
from ..train.reports.report import ReportTable, RunDescription, write_report
from ..train.setup import ready
from ..train.tree import leaves
from .screen import DemoScreen

RELOADED = 24
ENOUGH = 0.9


@dataclass(frozen=True)
class Score:
    """The model's answers to `items`, whose attribute `answer` is the expected one, and the seconds they took."""

    items: Sequence[Any]
    answers: list[str]
    seconds: float

    @property
    def right(self) -> list[bool]:
        """For each item, whether the answer equals the expected one character by character."""
        return [item.answer == answer for item, answer in zip(self.items, self.answers, strict=True)]

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return sum(self.right) / len(self.items)

    def __str__(self) -> str:
        return f"{sum(self.right)} of {len(self.items)}"


@dataclass(frozen=True)
class Demo:
    """One demo. Its items have an `answer`, and a `group` of which one example is shown at the end.

    Args:
        title: The demo's name.
        task: What the model is to learn, in a sentence.
        what: What the items are, in the plural.
        knows: What the base model has learnt before, in a sentence.
        unseen: What training never shows, in a sentence for the screen.
        note: The same in a sentence for the report.
        upstream: The package that answers in the new process.
        loader: The function of that package which loads the adapter.
        describe: Describes the loaded base model in a line.
        ask: Lets the loaded model answer items.
        ask_upstream: Lets a new process answer items with the adapter in a folder.
        on_screen: What the screen shows of an item.
        in_report: What the report shows of an item.
    """

    title: str
    task: str
    what: str
    knows: str
    unseen: str
    note: str
    upstream: str
    loader: str
    describe: Callable[[Loaded], str]
    ask: Callable[[Loaded, Sequence[Any]], Score]
    ask_upstream: Callable[[Path, Sequence[Any]], list[str]]
    on_screen: Callable[[Any, DemoScreen], str | Text]
    in_report: Callable[[Any], Any]


def demonstrate(
    demo: Demo, items: Sequence[Any], output: Path, config: TrainConfig, screen: DemoScreen, again: str
) -> int:
    """Run the whole demo.

    Args:
        demo: The demo.
        items: The held-out items.
        output: The folder for adapter and report.
        config: The training run.
        screen: Where to show it.
        again: The last part of the suggested next command, after model and adapter.

    Returns:
        The exit code: 0 where 90 % of the answers are right after training and upstream gives the same, else 1.
    """
    started = time.perf_counter()
    screen.title(demo.title, demo.task)

    screen.part(1, "The base model")
    ready_run = ready(config)
    loaded = ready_run.loaded
    screen.line(demo.describe(loaded))
    screen.line(demo.knows)
    before = _ask_and_print(demo, loaded, items, screen, "red")

    screen.part(2, "Fine-tuning")
    ready_run.prepare()
    screen.line(f"{trainable_count(loaded.model):,} LoRA numbers train. {demo.unseen}")
    trainer = Trainer.of(ready_run, screen)
    result = trainer.run()
    _print_training(demo, screen, result, config)

    screen.part(3, f"The same {demo.what} again")
    after = _ask_and_print(demo, loaded, items, screen, "green")
    screen.answers(_side_by_side(demo, before, after, screen))

    screen.part(4, f"A new process, with {demo.upstream} alone")
    with screen.working(f"{demo.loader}(model, adapter_path=…)"):
        reloaded = demo.ask_upstream(output, items[:RELOADED])
    same = sum(a == b for a, b in zip(reloaded, after.answers, strict=False))
    screen.line(f"{demo.loader} reads the adapter; {same} of {len(reloaded):,} answers are the same.")

    _write_report(demo, trainer, config, result, before, after, f"{same} of {len(reloaded)}")
    screen.end(
        f"{before.accuracy:.1%}",
        f"{after.accuracy:.1%}",
        str(trainer.outputs.report),
        f"{quote(shorter_path(sys.executable))} -m deltatune generate --model {quote(shorter_path(loaded.path))} "
        f"--adapter-path {quote(str(output))} {again}",
        time.perf_counter() - started,
    )
    return 0 if after.accuracy >= ENOUGH and same == len(reloaded) else 1


def options(model: Path, output: Path, iterations: int, rates: tuple[float, float], **more: Any) -> TrainConfig:
    """The configuration of a demo's run: LoRA on every layer and batches of 16.

    Args:
        model: The folder of the base model.
        output: The folder for data, adapter and report.
        iterations: The number of training iterations.
        rates: The learning rates after warm-up and at the end.
        more: Further options of TrainConfig.
    """
    first, last = rates
    return TrainConfig(
        model=str(model),
        data=str(output / "data"),
        adapter_path=str(output),
        overwrite=True,
        num_layers=-1,
        lora_parameters=LoraConfig(rank=8, scale=2.0),
        optimizer="adamw",
        optimizer_config={"adamw": {"weight_decay": 0.0, "bias_correction": True}},
        lr_schedule={
            "name": "cosine_decay",
            "arguments": [first, iterations, last],
            "warmup": min(10, iterations // 2),
        },
        grad_clip=1.0,
        batch_size=16,
        iters=iterations,
        max_seq_length=128,
        steps_per_report=max(1, iterations // 24),
        steps_per_eval=max(1, iterations // 4),
        val_batches=-1,
        save_every=iterations,
        **more,
    )


def ask_in_new_process(script: Path, model: Path, adapter: Path, asked: list[Any], longest: int) -> list[str]:
    """Run a script that answers questions with the base model and the adapter, without deltatune.

    Args:
        script: The script, whose last line of output is a JSON list of answers.
        model: The folder of the base model.
        adapter: The folder of the adapter.
        asked: The questions, as JSON values.
        longest: The largest number of tokens in an answer.

    Raises:
        UserError: If the script fails.
    """
    questions = adapter / "questions.json"
    questions.write_text(json.dumps(asked), encoding="utf-8")
    # -P keeps the script's folder, whose modules belong to deltatune, out of the search path.
    command = [sys.executable, "-P", *map(str, (script, model, adapter, questions, longest))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"})
    if done.returncode:
        raise UserError(f"{script.name}: reloading the adapter in a new process failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def write_or_refuse(write: Callable[[], Any], output: Path) -> Any:
    """Call `write` and return its result; UserError where the folder `output` cannot be written."""
    try:
        return write()
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); choose another --output.") from error


def shorter_path(path: str | Path) -> str:
    """The path as given, or relative to the current folder where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def size(loaded: Loaded) -> str:
    """How many numbers the model has, in millions."""
    return f"{sum(leaf.size for _, leaf in leaves(loaded.model.parameters())) / 1e6:.1f} M numbers"


def _ask_and_print(demo: Demo, loaded: Loaded, items: Sequence[Any], screen: DemoScreen, style: str) -> Score:
    with screen.working(f"asking {len(items)} held-out {demo.what}"):
        score = demo.ask(loaded, items)
    percent = (f"{score.accuracy:.1%}", f"bold {style}")
    screen.line(percent, f" exactly right: {score} held-out {demo.what}, asked in {score.seconds:.0f} s.")
    return score


def _print_training(demo: Demo, screen: DemoScreen, result: Result, config: TrainConfig) -> None:
    losses = screen.losses
    curve = sparkline([math.log(loss) for loss in losses], 40)
    screen.line((curve, "cyan"), (f"  loss {losses[0]:.2f} → {losses[-1]:.4f} (log scale)", "dim"))
    screen.line(
        f"{result.iterations:,} iterations of {config.batch_size} {demo.what} in {result.seconds:.0f} s; "
        f"{result.tokens_per_second:,.0f} tok/s; peak memory {gigabytes(result.peak_memory)}."
    )


def _side_by_side(
    demo: Demo, before: Score, after: Score, screen: DemoScreen
) -> list[tuple[str | Text, str, str, bool]]:
    """One rightly answered example of each group, and the first wrong one where there is any."""
    rows: dict[str, tuple[Any, str, str, bool]] = {}
    for item, old, new, right in zip(after.items, before.answers, after.answers, after.right, strict=True):
        rows.setdefault(item.group if right else "wrong", (item, old, new, right))
    shown = sorted(rows.values(), key=lambda row: not row[3])
    return [(demo.on_screen(item, screen), old, new, right) for item, old, new, right in shown]


def _write_report(
    demo: Demo, trainer: Trainer, config: TrainConfig, result: Result, before: Score, after: Score, same: str
) -> None:
    rows = [
        (demo.in_report(item), old, new, "yes" if right else f"no, expected {item.answer}")
        for item, old, new, right in zip(after.items, before.answers, after.answers, after.right, strict=True)
    ]
    columns = (demo.what.removesuffix("s"), "before", "after", "right")
    description = RunDescription(
        trainer.about,
        tables=[
            ReportTable(f"Some held-out {demo.what}", columns, rows[:12], demo.note),
            ReportTable("All of them", columns, rows, folded=True),
        ],
        headline={
            "right before": f"{before.accuracy:.1%}",
            "right after": f"{after.accuracy:.1%}",
            f"same through {demo.upstream}": same,
        },
        title=demo.title,
    )
    outputs = trainer.outputs
    write_report(outputs.report, outputs.metrics, config, dataclasses.asdict(result), description)
