"""The text demo: it fine-tunes a model on a task that it has never seen, and asks mlx-lm alone afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ..data.prompts import Question, prompt_tokens
from ..layers import describe
from ..models.answer import answer_all
from ..models.load import Loaded
from ..train.reports.announce import layer_summary
from . import flow, task
from .assets import MODEL
from .flow import Score
from .screen import DemoScreen

ITERATIONS = 260
QUESTIONS = 240
LONGEST = 72
RELOAD = Path(__file__).with_name("reload.py")
EXAMPLE = "6 mochas for Zelda, please."


def ask(loaded: Loaded, items: Sequence[task.CafeMessage]) -> Score:
    """Let the model answer every item; each token is the most likely one."""
    started = time.perf_counter()
    prompts = [prompt_tokens(loaded.tokenizer, Question(item.message)) for item in items]
    answers = [
        loaded.tokenizer.decode(tokens)
        for tokens in answer_all(loaded.model, loaded.tokenizer, prompts, max_tokens=LONGEST)
    ]
    return Score(items, answers, time.perf_counter() - started)


def ask_mlx_lm(adapter: Path, items: Sequence[task.CafeMessage]) -> list[str]:
    """The answers of mlx-lm with the base model and the adapter, in a new process without deltatune."""
    return flow.ask_in_new_process(RELOAD, MODEL, adapter, [item.message for item in items], LONGEST)


def run_demo(
    output: str | Path = "demo-out",
    *,
    iterations: int = ITERATIONS,
    questions: int = QUESTIONS,
    screen: DemoScreen | None = None,
) -> int:
    """Run the text demo.

    Args:
        output: The folder for data, adapter and report.
        iterations: The number of training iterations.
        questions: The number of held-out messages to ask.
        screen: Where to show the demo; the terminal by default.

    Returns:
        The exit code: 0 where 90 % of the answers are right after training and mlx-lm gives the same, else 1.

    Raises:
        UserError: `output` cannot be written.
    """
    output = Path(output)
    demo = flow.Demo(
        title="deltatune demo",
        task="Messages come in at a café counter. The till wants one exact JSON call for each.",
        what="messages",
        knows="It has read small talk about people, drinks and days. It has never seen JSON, nor this task.",
        unseen="No held-out name is in the training data.",
        note="Names and combinations that training never shows.",
        upstream="mlx-lm",
        loader="mlx_lm.load",
        describe=_describe,
        ask=ask,
        ask_upstream=ask_mlx_lm,
        on_screen=lambda item, screen: item.message,
        in_report=lambda item: item.message,
    )
    items = flow.write_or_refuse(lambda: task.write(output / "data", test=questions)["test"], output)
    again = f'--prompt "{EXAMPLE}"'
    config = flow.options(MODEL, output, iterations, (5e-3, 2e-4))
    return flow.demonstrate(demo, items, output, config, screen or DemoScreen(), again)


def _describe(loaded: Loaded) -> str:
    text = loaded.config["text_config"]
    return (
        f"{loaded.config['model_type']}, {flow.size(loaded)}, "
        f"{layer_summary(describe(loaded.model))} ({text['num_experts']} each, {text['num_experts_per_tok']} a token)."
    )
