"""Measures a step of reinforcement learning on a model with random weights: seconds of sampling, rewards and update.

usage: python benchmarks/rollouts.py [--shape 0.8B] [--bits 4] [--prompts 8] [--answers 8] [--tokens 512] [--steps 4]
       [--grad-checkpoint] [--beside]

`deltatune train --loss grpo` runs in a process of its own. No random weights end an answer, so that each has all its
tokens; a reward is a drawn number. --beside times transformers' generate() on as many rows of the same shape, alone:
TRL's step samples with it, and trains besides.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import processes
import trainers
from machine import heading

# How many tokens a prompt has, some more or less.
PROMPT_WORDS = 60
REWARDS = """
import random


def drawn(completions):
    return [random.random() for _ in completions]
"""


def write_model(shape: trainers.Shape, bits: int, folder: Path) -> None:
    """Write a checkpoint with random weights, and the demo's tokenizer."""
    import mlx.nn as nn

    from deltatune.demo.assets import MODEL

    model = trainers.mlx_model(shape)
    config = shape.config()
    if bits:
        config["quantization"] = {"group_size": 64, "bits": bits}
        nn.quantize(model, 64, bits)
    for file in Path(MODEL).iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, folder)
    trainers.save_model(folder, model, config)


def train(options: Any, folder: Path) -> list[dict[str, Any]]:
    """Run some steps, and return their records."""
    rows = [{"prompt": " ".join(["word"] * (PROMPT_WORDS + n % 8)) + f" {n}"} for n in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    flags = {
        "model": folder / "model",
        "data": folder / "prompts.jsonl",
        "adapter-path": folder / "adapters",
        "loss": "grpo",
        "reward-funcs": f"{folder / 'rewards.py'}:drawn",
        "batch-size": options.prompts,
        "num-generations": options.answers,
        "max-completion-length": options.tokens,
        "max-seq-length": options.tokens + 256,
        "iters": options.steps,
        "steps-per-report": 1,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if options.grad_checkpoint:
        words.append("--grad-checkpoint")
    program = "import sys; from deltatune.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, "train", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return [json.loads(line) for line in (folder / "adapters" / "metrics.jsonl").read_text().splitlines()]


def generate(shape: trainers.Shape, rows: int, tokens: int) -> float:
    """Return the seconds that transformers takes to sample as many answers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape.config() | {"model_type": "qwen3_5_text"}))
        config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(0, shape.vocabulary, (rows, PROMPT_WORDS), device="cuda")
    seconds = []
    for length in (8, tokens):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(prompt, max_new_tokens=length, min_new_tokens=length, do_sample=True, top_k=0, pad_token_id=0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[-1]


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(trainers.SHAPES), default="0.8B")
    parser.add_argument("--bits", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--grad-checkpoint", action="store_true")
    parser.add_argument("--beside", action="store_true")
    options = parser.parse_args()
    shape = trainers.SHAPES[options.shape]
    rows = options.prompts * options.answers
    print(
        f"{heading()}\n{shape}\n{options.prompts} x {options.answers} answers of {options.tokens} tokens\n", flush=True
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        program = f"import rollouts, trainers, pathlib; rollouts.write_model(trainers.SHAPES[{options.shape!r}], "
        program += f"{options.bits}, pathlib.Path({str(folder / 'model')!r}))"
        here = str(Path(__file__).parent)
        paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": paths})
        records = [record for record in train(options, folder) if "train_loss" in record]
    print("| step | sampling, s | rewards, s | whole, s | peak, GB |\n|---|---|---|---|---|")
    for record in records:
        whole = 1 / record["iterations_per_second"]
        times = record["seconds/sampling"], record["seconds/rewards"], whole, record["peak_memory"]
        print(f"| {record['iteration']} | " + " | ".join(f"{value:.2f}" for value in times) + " |")
    steady = np.median([1 / record["iterations_per_second"] for record in records[1:]])
    print(f"\n{steady:.2f} s a step, without the first", flush=True)
    if options.beside:
        print(f"transformers' generate alone: {generate(shape, rows, options.tokens):.2f} s")


if __name__ == "__main__":
    main()
