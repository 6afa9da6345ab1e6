"""The demo: a model that knows nothing of a task, fine-tuned until it does it, and asked again by mlx-lm alone."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import LoraConfig, TrainConfig
from ..data.load import load_datasets
from ..errors import UserError
from ..models.answer import answer_all
from ..models.describe import describe
from ..models.generate import prompt_tokens
from ..models.load import Loaded, load
from ..train import Result, Trainer
from ..train.announce import layer_summary, trainable_count
from ..train.commands import prepare
from ..train.report import Table, write_report
from ..train.tree import leaves
from . import task
from .assets import MODEL
from .screen import DemoScreen, sparkline

ITERATIONS = 240
QUESTIONS = 240
RELOADED = 24
LONGEST = 72
RELOAD = Path(__file__).with_name("reload.py")
ENOUGH = 0.9
EXAMPLE = "6 mochas for Zelda, please."


@dataclass(frozen=True)
class Score:
    """The answers to `items`, and how many of them are exactly right."""

    items: list[task.Item]
    answers: list[str]
    seconds: float

    @property
    def right(self) -> list[bool]:
        """Whether each answer equals the expected one, character by character."""
        return [item.answer == answer for item, answer in zip(self.items, self.answers, strict=True)]

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return sum(self.right) / len(self.items)

    def __str__(self) -> str:
        return f"{sum(self.right)} of {len(self.items)}"


def options(output: Path, iterations: int) -> TrainConfig:
    """The demo's training run."""
    return TrainConfig(
        model=str(MODEL),
        data=str(output / "data"),
        adapter_path=str(output),
        num_layers=-1,
        lora_parameters=LoraConfig(rank=8, scale=2.0),
        optimizer="adamw",
        optimizer_config={"adamw": {"weight_decay": 0.0, "bias_correction": True}},
        lr_schedule={"name": "cosine_decay", "arguments": [5e-3, iterations, 2e-4], "warmup": min(10, iterations // 2)},
        grad_clip=1.0,
        batch_size=16,
        iters=iterations,
        max_seq_length=128,
        steps_per_report=max(1, iterations // 24),
        steps_per_eval=max(1, iterations // 4),
        val_batches=-1,
        save_every=iterations,
    )


def ask(loaded: Loaded, items: list[task.Item]) -> Score:
    """Let the model answer every item, likeliest token by likeliest token."""
    started = time.perf_counter()
    prompts = [prompt_tokens(loaded.tokenizer, item.message) for item in items]
    answers = answer_all(loaded.model, loaded.tokenizer, prompts, max_tokens=LONGEST)
    return Score(items, answers, time.perf_counter() - started)


def ask_mlx_lm(adapter: Path, items: list[task.Item]) -> list[str]:
    """The answers of a new process that has mlx-lm, the base model and the adapter, and no deltatune."""
    questions = adapter / "questions.json"
    questions.write_text(json.dumps([item.message for item in items]), encoding="utf-8")
    # -P: the script's own folder holds deltatune modules, which are not to be found from there.
    command = [sys.executable, "-P", str(RELOAD), str(MODEL), str(adapter), str(questions), str(LONGEST)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"})
    if done.returncode:
        raise UserError(f"reloading the adapter through mlx-lm failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def run_demo(
    output: str | Path = "demo-out",
    *,
    iterations: int = ITERATIONS,
    questions: int = QUESTIONS,
    screen: DemoScreen | None = None,
) -> int:
    """Ask, train, ask again, reload; returns 0 where it worked: 90 % right after, and mlx-lm answers the same.

    output: the folder for data, adapter and report. UserError where it cannot be written.
    """
    started = time.perf_counter()
    output, screen = Path(output), screen or DemoScreen()
    config = options(output, iterations)
    items = _write_data(output, questions)
    screen.title("deltatune demo", "Messages come in at a café counter. The till wants one exact JSON call for each.")

    screen.part(1, "The base model")
    loaded = load(MODEL)
    screen.line(_describe(loaded))
    screen.line("It has read small talk about people, drinks and days. It has never seen JSON, nor this task.")
    before = _ask_aloud(loaded, items, screen, "red")

    screen.part(2, "Fine-tuning")
    prepare(loaded.model, config)
    screen.line(f"{trainable_count(loaded.model):,} LoRA numbers train. No held-out name is in the training data.")
    trainer = Trainer(loaded.model, loaded.tokenizer, config, load_datasets(config, loaded.tokenizer), screen=screen)
    result = trainer.run()
    _say_trained(screen, result, config)

    screen.part(3, "The same messages again")
    after = _ask_aloud(loaded, items, screen, "green")
    screen.answers(_side_by_side(before, after))

    screen.part(4, "A new process, with mlx-lm alone")
    with screen.working("mlx_lm.load(model, adapter_path=…)"):
        reloaded = ask_mlx_lm(output, items[:RELOADED])
    same = sum(a == b for a, b in zip(reloaded, after.answers, strict=False))
    screen.line(f"mlx_lm.load reads the adapter; {same} of {len(reloaded)} answers are the same.")

    _write_report(trainer, config, result, before, after, f"{same} of {len(reloaded)}")
    screen.end(
        f"{before.accuracy:.1%}",
        f"{after.accuracy:.1%}",
        str(trainer.outputs.report),
        f"{_near(sys.executable)} -m deltatune generate --model {_near(MODEL)} --adapter-path {output} "
        f'--prompt "{EXAMPLE}"',
        time.perf_counter() - started,
    )
    return 0 if after.accuracy >= ENOUGH and same == len(reloaded) else 1


def _ask_aloud(loaded: Loaded, items: list[task.Item], screen: DemoScreen, style: str) -> Score:
    with screen.working(f"asking {len(items)} held-out messages"):
        score = ask(loaded, items)
    percent = (f"{score.accuracy:.1%}", f"bold {style}")
    screen.line(percent, f" exactly right: {score} held-out messages, asked in {score.seconds:.0f} s.")
    return score


def _write_data(output: Path, questions: int) -> list[task.Item]:
    try:
        return task.write(output / "data", test=questions)["test"]
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); choose another --output.") from error


def _near(path: str | Path) -> str:
    """The shorter of a path's two names: from the root, and from here."""
    return min(str(path), os.path.relpath(path), key=len)


def _numbers(loaded: Loaded) -> list[Any]:
    return [leaf for _, leaf in leaves(loaded.model.parameters())]


def _describe(loaded: Loaded) -> str:
    text = loaded.config["text_config"]
    return (
        f"{loaded.config['model_type']}, {sum(leaf.size for leaf in _numbers(loaded)) / 1e6:.1f} M numbers, "
        f"{layer_summary(describe(loaded.model))} ({text['num_experts']} each, {text['num_experts_per_tok']} a token)."
    )


def _say_trained(screen: DemoScreen, result: Result, config: TrainConfig) -> None:
    losses = screen.losses
    curve = sparkline([math.log(loss) for loss in losses], 40)
    screen.line((curve, "cyan"), (f"  loss {losses[0]:.2f} → {losses[-1]:.4f} (log scale)", "dim"))
    screen.line(
        f"{result.iterations} iterations of {config.batch_size} messages in {result.seconds:.0f} s; "
        f"{result.tokens_per_second:,.0f} tok/s; peak memory {result.peak_memory:.2f} GB."
    )


def _side_by_side(before: Score, after: Score) -> list[tuple[str, str, str, bool]]:
    """One example a tool, and the first that is still wrong, if any."""
    rows: dict[str, tuple[str, str, str, bool]] = {}
    for item, old, new, right in zip(after.items, before.answers, after.answers, after.right, strict=True):
        rows.setdefault(item.tool if right else "wrong", (item.message, old, new, right))
    return sorted(rows.values(), key=lambda row: not row[3])


def _write_report(
    trainer: Trainer, config: TrainConfig, result: Result, before: Score, after: Score, same: str
) -> None:
    rows = [
        (item.message, old, new, "yes" if right else f"no, expected {item.answer}")
        for item, old, new, right in zip(after.items, before.answers, after.answers, after.right, strict=True)
    ]
    columns = ("message", "before", "after", "right")
    write_report(
        trainer.outputs.report,
        trainer.outputs.metrics,
        config,
        dataclasses.asdict(result),
        tables=[
            Table("Some held-out messages", columns, rows[:12], "Names and combinations that training never shows."),
            Table("All of them", columns, rows, folded=True),
        ],
        headline={
            "right before": f"{before.accuracy:.1%}",
            "right after": f"{after.accuracy:.1%}",
            "same through mlx-lm": same,
        },
        title="deltatune demo",
    )
