"""The demo of reinforcement learning: the bundled model learns from the rewards of its own answers alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..options.config import TrainConfig
from . import task
from .assets import MODEL
from .flow import QUESTIONS, options, teach, written
from .screen import DemoScreen
from .task import CafeMessage

ITERATIONS = 75
# A reward function of the user's own, in the form that --reward-funcs takes.
REWARDS = '''\
def near(completions, answer):
    """One point for the word, which it shares with all words beside it."""
    return [(word in text) / (len(text.split()) or 1) for text, word in zip(completions, answer)]
'''


def run_rewarded_demo(
    output: str | Path = "demo-out",
    *,
    iterations: int = ITERATIONS,
    questions: int = QUESTIONS,
    screen: DemoScreen | None = None,
) -> int:
    """Run the demo of rewards, as run_demo() does; its exit code is 0 where 90 % of the sampled answers are right."""
    output = Path(output)
    screen = screen or DemoScreen()
    items = written(output, questions, write)
    config = rewarded_options(output, iterations)
    screen.title("deltatune demo rl", "Messages come in at a café counter. The board wants one word of each.")
    sampled = f"It samples {config.num_generations:,} answers to each message"
    lesson = teach(
        config,
        items,
        screen,
        knows="It chats about such words. No right answer is ever shown to it, before or during training.",
        learns=f"{sampled}; better ones than their mean get likelier.",
    )
    return 0 if lesson.end(screen, {"mean reward": f"{screen.rewards[-1]:.2f}"}) else 1


def rewarded_options(output: Path, iterations: int, **more: Any) -> TrainConfig:
    """The configuration of the demo's run; the arguments are those of options()."""
    settings: dict[str, Any] = {
        "loss": "grpo",
        "reward_funcs": ["exact", f"{output / 'data' / 'rewards.py'}:near"],
        "learning_rate": 2e-3,
        "batch_size": 16,
        "max_completion_length": 12,
        "steps_per_report": 1,
        "val_batches": 0,
    }
    return options(MODEL, output, iterations, **settings | more)


def word_of(item: CafeMessage) -> CafeMessage:
    """The item with one word as its answer: the drink, the day, or the thing that the message is about."""
    call = json.loads(item.answer)
    word = call.get("drink") or call.get("day") or call["text"].split()[1]
    return dataclasses.replace(item, answer=word)


def write(folder: Path, *, train: int = 2000, test: int = QUESTIONS, seed: int = 0) -> dict[str, list[CafeMessage]]:
    """Write train.jsonl with prompts, and rewards.py; return them and the held-out messages, which training lacks."""
    splits = {
        "train": list(map(word_of, task.draw(seed, train, task.known_name, held_out=False))),
        "test": list(map(word_of, task.draw(seed, test, task.held_out_name, held_out=True))),
    }
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": item.message, "answer": item.answer}) for item in splits["train"]]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return splits
