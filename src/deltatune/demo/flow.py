"""The course of the demo: ask the base model, train, ask again, ask through mlx-lm alone, and report."""

from __future__ import annotations

import contextlib
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

import mlx.core as mx

from ..data.prompts import Question, prompt_tokens
from ..errors import UserError
from ..layers import describe
from ..models.batch_decoder import Sampler, answer_all
from ..models.load import Loaded
from ..options.config import TrainConfig
from ..rewards import Rewards
from ..train import Result, Trainer
from ..train.reports.announce import layer_summary, trainable_count
from ..train.reports.report import ReportTable, RunDescription, write_report
from ..train.reports.screen import gigabytes, sparkline
from ..train.setup import ready
from ..train.tree import leaves
from . import task
from .assets import MODEL
from .screen import DemoScreen
from .task import CafeMessage

ITERATIONS = 120
QUESTIONS = 240
LONGEST = 72
RELOAD = Path(__file__).with_name("reload.py")
EXAMPLE = "6 mochas for Zelda, please."
RELOADED = 24
ENOUGH = 0.9


@dataclass(frozen=True)
class Score:
    """The model's answers to messages, and the seconds they took."""

    items: Sequence[CafeMessage]
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


def run_demo(
    output: str | Path = "demo-out",
    *,
    iterations: int = ITERATIONS,
    questions: int = QUESTIONS,
    screen: DemoScreen | None = None,
) -> int:
    """Run the demo, which asks so many held-out messages, in the folder `output` for data, adapter and report.

    Returns the exit code: 0 where 90 % of the answers are right after training and mlx-lm gives the same, else 1.
    """
    output = Path(output)
    screen = screen or DemoScreen()
    items = written(output, questions, task.write)
    config = options(MODEL, output, iterations)
    screen.title("deltatune demo", "Messages come in at a café counter. The till wants one exact JSON call for each.")
    lesson = teach(
        config,
        items,
        screen,
        knows="It has read small talk about people, drinks and days. It has never seen JSON, nor this task.",
        learns="{trained:,} LoRA numbers train. No held-out name is in the training data.",
    )

    screen.part(4, "A new process, with mlx-lm alone")
    with screen.working("mlx_lm.load(model, adapter_path=…)"):
        reloaded = ask_mlx_lm(output, items[:RELOADED])
    same = sum(a == b for a, b in zip(reloaded, lesson.after.answers, strict=False))
    screen.line(f"mlx_lm.load reads the adapter; {same} of {len(reloaded):,} answers are the same.")

    enough = lesson.end(screen, {"same through mlx-lm": f"{same} of {len(reloaded)}"})
    return 0 if enough and same == len(reloaded) else 1


@dataclass(frozen=True)
class Lesson:
    """A model's answers before and after its training, which began at `started`."""

    before: Score
    after: Score
    trainer: Trainer
    result: Result
    started: float

    def end(self, screen: DemoScreen, headline: dict[str, str]) -> bool:
        """Write the report with these figures at its head, and print where it is; return whether enough is right."""
        self._write_report(headline)
        outputs = self.trainer.outputs
        seconds = time.perf_counter() - self.started
        before = f"{self.before.accuracy:.1%}"
        after = f"{self.after.accuracy:.1%}"
        screen.end(before, after, str(outputs.report), command_again(outputs.directory), seconds)
        return self.after.accuracy >= ENOUGH

    def _write_report(self, headline: dict[str, str]) -> None:
        before = self.before
        after = self.after
        expected = [item.answer for item in after.items]
        messages = [item.message for item in after.items]
        rows = list(zip(messages, before.answers, after.answers, expected, after.right, strict=True))
        columns = ("message", "before", "after", "expected", "right")
        note = "Names and combinations that training never shows."
        outputs = self.trainer.outputs
        description = RunDescription(
            self.trainer.about,
            tables=[
                ReportTable("Some held-out messages", columns, rows[:12], note),
                ReportTable(f"All {len(rows):,} messages", columns, rows, folded=True),
            ],
            headline={"right before": f"{before.accuracy:.1%}", "right after": f"{after.accuracy:.1%}"} | headline,
            title="deltatune demo",
            commands=[command_again(outputs.directory)],
        )
        result = dataclasses.asdict(self.result)
        write_report(outputs.report, outputs.metrics, self.trainer.config, result, description)


def teach(config: TrainConfig, items: Sequence[CafeMessage], screen: DemoScreen, *, knows: str, learns: str) -> Lesson:
    """Ask the base model, train it, and ask it again: parts 1 to 3 of a demo.

    `knows` is a sentence on the base model, and `learns` one on its training with the number `trained`.
    """
    started = time.perf_counter()
    rewarded = config.loss == "grpo"
    sampler = mx.random.categorical if rewarded else None
    screen.part(1, "The base model")
    run = ready(config)
    screen.line(describe_model(run.loaded))
    screen.line(knows)
    before = ask_and_print(run.loaded, items, screen, "red", sampler)

    screen.part(2, "Learning from rewards" if rewarded else "Fine-tuning")
    run.prepare()
    screen.line(learns.format(trained=trainable_count(run.model)))
    with Rewards(config) if rewarded else contextlib.nullcontext() as rewards:
        trainer = Trainer.of(run, screen, rewards=rewards)
        result = trainer.run()
    _print_training(screen, result, config)

    screen.part(3, "The same messages again")
    after = ask_and_print(run.loaded, items, screen, "green", sampler)
    screen.answers(side_by_side(before, after))
    return Lesson(before, after, trainer, result, started)


def ask(loaded: Loaded, items: Sequence[CafeMessage], sampler: Sampler | None = None) -> Score:
    """Let the model answer every item; each token is the most likely one, or the sampler's, drawn alike each time."""
    mx.random.seed(0)
    started = time.perf_counter()
    prompts = [prompt_tokens(loaded.tokenizer, Question(item.message)) for item in items]
    answers = [
        loaded.tokenizer.decode(tokens)
        for tokens in answer_all(loaded.model, loaded.tokenizer, prompts, max_tokens=LONGEST, sampler=sampler)
    ]
    return Score(items, answers, time.perf_counter() - started)


def ask_mlx_lm(adapter: Path, items: Sequence[CafeMessage]) -> list[str]:
    """Return the answers of mlx-lm with the base model and the adapter, in a new process without deltatune."""
    questions = adapter / "questions.json"
    questions.write_text(json.dumps([item.message for item in items]), encoding="utf-8")
    # -P keeps the script's folder, with modules of deltatune, out of the search path.
    command = [sys.executable, "-P", *map(str, (RELOAD, MODEL, adapter, questions, LONGEST))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"})
    if done.returncode:
        raise UserError(f"{RELOAD.name}: reloading the adapter in a new process failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def options(model: Path, output: Path, iterations: int, **more: Any) -> TrainConfig:
    """The configuration of the demo's run: the defaults, but a rate for a model of this size, and batches of 16.

    `output` is the folder for data, adapter and report; `more` are options beside these, or in their place.
    """
    settings: dict[str, Any] = {
        "model": str(model),
        "data": str(output / "data"),
        "adapter_path": str(output),
        "overwrite": True,
        "learning_rate": 5e-3,
        "grad_clip": 1.0,
        "batch_size": 16,
        "iters": iterations,
        "max_seq_length": 128,
        "steps_per_report": max(1, iterations // 24),
        "steps_per_eval": max(1, iterations // 4),
        "val_batches": -1,
        "save_every": iterations,
    }
    return TrainConfig(**settings | more)


def written(output: Path, questions: int, write: Callable[..., dict[str, list[CafeMessage]]]) -> list[CafeMessage]:
    """Write the data with a function such as task.write(), and return the held-out messages."""
    try:
        return write(output / "data", test=questions)["test"]
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); choose another --output.") from error


def command_again(output: Path) -> str:
    """Return the command that asks the trained model another question."""
    python = _shorter_path(sys.executable)
    model = _shorter_path(MODEL)
    return (
        f"{quote(python)} -m deltatune generate --model {quote(model)} --adapter-path {quote(str(output))} "
        f'--prompt "{EXAMPLE}"'
    )


def _shorter_path(path: str | Path) -> str:
    """The path as given, or relative to the current folder where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def describe_model(loaded: Loaded) -> str:
    """Return the kind, the size and the layers of a model."""
    text = loaded.config["text_config"]
    numbers = sum(leaf.size for _, leaf in leaves(loaded.model.parameters()))
    return (
        f"{loaded.config['model_type']}, {numbers / 1e6:.1f} M numbers, "
        f"{layer_summary(describe(loaded.model))} ({text['num_experts']} each, {text['num_experts_per_tok']} a token)."
    )


def ask_and_print(
    loaded: Loaded, items: Sequence[CafeMessage], screen: DemoScreen, style: str, sampler: Sampler | None = None
) -> Score:
    """Ask the held-out messages, and print how many answers are right."""
    with screen.working(f"asking {len(items)} held-out messages"):
        score = ask(loaded, items, sampler)
    percent = (f"{score.accuracy:.1%}", f"bold {style}")
    screen.line(percent, f" exactly right: {score} held-out messages, asked in {score.seconds:.0f} s.")
    return score


def _print_training(screen: DemoScreen, result: Result, config: TrainConfig) -> None:
    """Print the course of the rewards or losses, and the time, the speed and the memory of training."""
    values = screen.rewards or screen.losses
    batch = f"{config.batch_size} messages"
    if screen.rewards:
        curve = sparkline(values, 40)
        words = f"  mean reward {values[0]:.2f} → {values[-1]:.2f}"
        batch += f" with {config.num_generations:,} answers each"
    else:
        curve = sparkline([math.log(loss) for loss in values], 40)
        words = f"  loss {values[0]:.2f} → {values[-1]:.4f} (log scale)"
    screen.line((curve, "cyan"), (words, "dim"))
    screen.line(
        f"{result.iterations:,} iterations of {batch} in {result.seconds:.0f} s; "
        f"{result.tokens_per_second:,.0f} tok/s; peak memory {gigabytes(result.peak_memory)}."
    )


def side_by_side(before: Score, after: Score) -> list[tuple[str, str, str, bool]]:
    """Return one rightly answered message of each kind, and the first wrong one where there is any."""
    rows: dict[str, tuple[str, str, str, bool]] = {}
    for item, old, new, right in zip(after.items, before.answers, after.answers, after.right, strict=True):
        rows.setdefault(item.tool if right else "wrong", (item.message, old, new, right))
    return sorted(rows.values(), key=lambda row: not row[3])
