"""The demo: a model that knows nothing of a task, fine-tuned until it does it, and asked again by mlx-lm alone."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from ..config import LoraConfig, TrainConfig
from ..models.answer import answer_all
from ..models.describe import describe
from ..models.generate import prompt_tokens
from ..models.load import Loaded, load
from ..train.announce import layer_summary
from . import flow, task
from .assets import MODEL
from .flow import Score
from .screen import DemoScreen

ITERATIONS = 240
QUESTIONS = 240
LONGEST = 72
RELOAD = Path(__file__).with_name("reload.py")
EXAMPLE = "6 mochas for Zelda, please."


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


def ask(loaded: Loaded, items: Sequence[task.Item]) -> Score:
    """Let the model answer every item, likeliest token by likeliest token."""
    started = time.perf_counter()
    prompts = [prompt_tokens(loaded.tokenizer, item.message) for item in items]
    answers = answer_all(loaded.model, loaded.tokenizer, prompts, max_tokens=LONGEST)
    return Score(items, answers, time.perf_counter() - started)


def ask_mlx_lm(adapter: Path, items: Sequence[task.Item]) -> list[str]:
    """The answers of a new process that has mlx-lm, the base model and the adapter, and no deltatune."""
    questions = adapter / "questions.json"
    questions.write_text(json.dumps([item.message for item in items]), encoding="utf-8")
    return flow.run_script(RELOAD, MODEL, adapter, questions, LONGEST)


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
        load=lambda: load(MODEL),
        describe=_describe,
        ask=ask,
        ask_upstream=ask_mlx_lm,
        on_screen=lambda item, screen: item.message,
        in_report=lambda item: item.message,
    )
    items = flow.written(lambda: task.write(output / "data", test=questions)["test"], output)
    again = f'--prompt "{EXAMPLE}"'
    return flow.run(demo, items, output, options(output, iterations), screen or DemoScreen(), again)


def _describe(loaded: Loaded) -> str:
    text = loaded.config["text_config"]
    return (
        f"{loaded.config['model_type']}, {flow.size(loaded)}, "
        f"{layer_summary(describe(loaded.model))} ({text['num_experts']} each, {text['num_experts_per_tok']} a token)."
    )
