"""Measures a step of reinforcement learning on a model with random weights: seconds of sampling, rewards and update.

usage: python benchmarks/rollouts.py [--shape 0.8B] [--bits 4] [--prompts 8] [--answers 8] [--tokens 512] [--steps 4]
       [--grad-checkpoint] [--card 12e9] [--beside]

`deltatune train --loss grpo` runs in a process of its own. No random weights end an answer, so that each has all its
tokens; a reward is a drawn number. --beside runs as many steps of the same shape with TRL's trainer, which samples by
transformers' generate(). --card leaves so many bytes of the GPU free, as a smaller card has them, and prints what MLX
and the driver count after each sampling and each update.
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
from larger_than_memory import shape_of, smaller_card
from machine import heading
from public_configs import CONFIGS

# How many tokens a prompt has, some more or less.
PROMPT_WORDS = 60
REWARDS = """
import random


def drawn(completions):
    return [random.random() for _ in completions]
"""


def write_model(shape: trainers.Shape, bits: int, folder: Path) -> None:
    """Write a checkpoint with random weights, and the demo's tokenizer."""
    from deltatune.demo.assets import MODEL

    model = trainers.mlx_model(shape, bits=bits)
    config = shape.config()
    if bits:
        config["quantization"] = {"group_size": 64, "bits": bits}
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
    program = ["-c", "import sys; from deltatune.cli import main; sys.exit(main())"]
    if options.card:
        program = [str(Path(__file__).with_name("observed_training.py"))]
    with smaller_card(options.card):
        done = subprocess.run([sys.executable, *program, "train", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return [json.loads(line) for line in (folder / "adapters" / "metrics.jsonl").read_text().splitlines()]


def train_with_trl(options: Any, folder: Path) -> list[float]:
    """Run as many steps with TRL's GRPOTrainer, PEFT and transformers' generation; return the seconds of each."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from with_torch import FlashLinearAttention

    note = FlashLinearAttention().times_only()
    if note:
        print(f"TRL: {note}", flush=True)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())
            print(f"TRL: step of {self.times[-1] - self.times[-2]:.2f} s", flush=True)

    shape = shape_of(options.shape)
    (folder / "torch").mkdir()
    (folder / "torch" / "config.json").write_text(json.dumps(shape.config() | {"model_type": "qwen3_5_text"}))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "torch"), dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    clock = Clock()
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        # Larger batches would hold the logits of all rows at once.
        per_device_train_batch_size=options.answers,
        gradient_accumulation_steps=options.prompts,
        num_generations=options.answers,
        max_completion_length=options.tokens,
        generation_kwargs={"min_new_tokens": options.tokens},
        max_steps=options.steps,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=options.grad_checkpoint,
        save_strategy="no",
        report_to=[],
    )
    GRPOTrainer(
        model=model,
        args=settings,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: list(np.random.random(len(completions))),
        train_dataset=Dataset.from_list(prompts),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[clock],
    ).train()
    return list(np.diff(clock.times))


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=[*trainers.SHAPES, *CONFIGS], default="0.8B")
    parser.add_argument("--bits", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--grad-checkpoint", action="store_true")
    parser.add_argument("--card", type=float)
    parser.add_argument("--beside", action="store_true")
    options = parser.parse_args()
    shape = shape_of(options.shape)
    print(
        f"{heading()}\n{shape}\n{options.prompts} x {options.answers} answers of {options.tokens} tokens\n", flush=True
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        program = f"import rollouts, pathlib; rollouts.write_model(rollouts.shape_of({options.shape!r}), "
        program += f"{options.bits}, pathlib.Path({str(folder / 'model')!r}))"
        here = str(Path(__file__).parent)
        paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": paths})
        records = [record for record in train(options, folder) if "train_loss" in record]
        beside = train_with_trl(options, folder) if options.beside else []
    print("| step | sampling, s | rewards, s | whole, s | peak, GB |\n|---|---|---|---|---|")
    for record in records:
        whole = 1 / record["iterations_per_second"]
        times = record["seconds/sampling"], record["seconds/rewards"], whole, record["peak_memory"]
        print(f"| {record['iteration']} | " + " | ".join(f"{value:.2f}" for value in times) + " |")
    steady = np.median([1 / record["iterations_per_second"] for record in records[1:]])
    print(f"\n{steady:.2f} s a step, without the first")
    if beside:
        print(f"TRL: {np.median(beside[1:]):.2f} s a step, without the first")


if __name__ == "__main__":
    main()
