"""Measures a step of reinforcement learning on a model with random weights: seconds of sampling, rewards and update.

usage: python -u benchmarks/rollouts.py [--shape 0.8B] [--bits 4] [--prompts 8] [--answers 8] [--tokens 512] [--steps 4]
       [--grad-checkpoint] [--beside]
       python -u benchmarks/rollouts.py --shape Qwen3.5-9B --bits 4 --prompts 1 --answers 4 --tokens 609 --steps 2
       --grad-checkpoint --card 12e9 --counted

`deltatune train --loss grpo` runs in a process of its own. No random weights end an answer, so that each has all its
tokens; a reward is a drawn number. Beside the seconds of a step stand the GPU's clock, power, temperature and share of
busy time, the processor time of the run, and the share of the machine's processors that others took. --beside takes the
same step with transformers and PEFT afterwards: generate() on all rows, then TRL's loss on as many rows at a time as a
prompt has answers, and one update of AdamW. --counted prints what MLX and the driver count after each sampling and each
update, and --card leaves so many bytes of the GPU free, as a smaller card has them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
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
    # It imports deltatune, and that must come before MLX.
    model = trainers.mlx_model(shape, bits=bits)
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from deltatune.demo.assets import MODEL

    config = shape.config()
    if bits:
        config["quantization"] = {"group_size": 64, "bits": bits}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    for file in Path(MODEL).iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))


class Machine:
    """What a machine does while a step runs: the GPU by nvidia-smi, the processors by Linux's files."""

    QUERY = ("clocks.sm", "power.draw", "temperature.gpu", "utilization.gpu")

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: list[list[float]] = []
        self._before = self._processors()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        command = ["nvidia-smi", f"--query-gpu={','.join(self.QUERY)}", "--format=csv,noheader,nounits"]
        try:
            with subprocess.Popen([*command, "--loop-ms=200"], stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    self._seen.append([float(value) for value in line.split(",")])
        except (OSError, ValueError):
            return

    def _processors(self) -> tuple[float, float, float]:
        """Seconds of the run's threads, and of all processors: stolen, and in all."""
        tick = os.sysconf("SC_CLK_TCK")
        own = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        every = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return (int(own[11]) + int(own[12])) / tick, every[7] / tick, sum(every[:8]) / tick

    def cells(self) -> list[str]:
        """The cells of a step, since the last call."""
        seen, self._seen = self._seen, []
        now = self._processors()
        own, stolen, every = (b - a for a, b in zip(self._before, now, strict=True))
        self._before = now
        gpu = ["", "", "", ""]
        if seen:
            clocks, watts, degrees, busy = zip(*seen, strict=True)
            gpu = [f"{min(clocks):.0f} to {max(clocks):.0f}", f"{np.mean(watts):.0f}", f"{max(degrees):.0f}"]
            gpu.append(f"{np.mean(busy):.0f}")
        return [*gpu, f"{own:.2f}", f"{100 * stolen / max(every, 1e-9):.1f}", f"{os.getloadavg()[0]:.1f}"]


HEAD = ["step", "sampling, s", "rewards, s", "update, s", "whole, s", "peak, GB", "SM, MHz", "W", "degrees"]
HEAD += ["GPU busy, %", "processor time, s", "stolen, %", "load"]


def train(options: Any, folder: Path) -> list[dict[str, Any]]:
    """Run some steps, print each when it has ended, and return their records."""
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
    if options.counted:
        program = [str(Path(__file__).with_name("observed_training.py"))]
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    records: list[dict[str, Any]] = []
    metrics = folder / "adapters" / "metrics.jsonl"
    with smaller_card(options.card), subprocess.Popen([sys.executable, "-u", *program, "train", *words]) as process:
        machine = Machine(process.pid)
        ended = False
        while not ended:
            time.sleep(0.02)
            ended = process.poll() is not None
            lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
            steps = [record for record in map(json.loads, lines) if "train_loss" in record]
            for record in steps[len(records) :]:
                print(f"| {' | '.join([*cells(record), *([] if ended else machine.cells())])} |", flush=True)
            records = steps
    if process.returncode:
        sys.exit(process.returncode)
    return records


def cells(record: dict[str, Any]) -> list[str]:
    """The cells of a step's own figures."""
    whole = 1 / record["iterations_per_second"]
    sampling, rewards = record["seconds/sampling"], record["seconds/rewards"]
    times = sampling, rewards, whole - sampling - rewards, whole, record["peak_memory"]
    return [str(record["iteration"]), *(f"{value:.3f}" for value in times)]


def step_of_peft(shape: trainers.Shape, options: Any) -> None:
    """Print the seconds that transformers and PEFT take to sample as many answers and to train on them, and the peak.

    Log-probabilities are those of TRL's selective_log_softmax: in bf16, one row after another.
    """
    import inspect

    import peft
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = trainers.torch_model(shape)
    model.config.use_cache = True
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-6)
    rows = options.prompts * options.answers
    prompt = torch.randint(0, shape.vocabulary, (rows, PROMPT_WORDS), device=device)

    def seconds(work: Any, *given: Any) -> tuple[float, Any]:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        result = work(*given)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, result

    def sample(tokens: int) -> Any:
        model.eval()
        with torch.no_grad():
            return model.generate(
                input_ids=prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0
            )

    def update(answers: Any) -> None:
        model.train()
        advantages = torch.randn(rows, 1, device=device)
        for first in range(0, rows, options.answers):
            part = answers[first : first + options.answers]
            logits = model(input_ids=part, use_cache=False, logits_to_keep=part.shape[1] - PROMPT_WORDS + 1).logits
            targets = part[:, PROMPT_WORDS:, None]
            chosen = [row.log_softmax(-1).gather(-1, ids) for row, ids in zip(logits[:, :-1], targets, strict=True)]
            scored = torch.stack(chosen)[..., 0]
            ratio = torch.exp(scored - scored.detach())
            clipped = ratio.clamp(0.8, 1.2)
            advantage = advantages[first : first + options.answers]
            (-torch.min(ratio * advantage, clipped * advantage).sum() / (rows * part.shape[1])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    print(f"\ntransformers + PEFT: {seconds(sample, 8)[0]:.1f} s for the first 8 tokens of each row", flush=True)
    sampling, answers = seconds(sample, options.tokens)
    print(f"transformers + PEFT: {sampling:.2f} s of sampling", flush=True)
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        # Kernels of others may refuse the backward pass, as FLA's do on Hopper.
        setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
    for attempt in ("first", "second"):
        took = seconds(update, answers)[0]
        peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
        print(f"transformers + PEFT: {attempt} update {took:.2f} s, whole {sampling + took:.2f} s, peak {peak:.1f} GB")


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=[*trainers.SHAPES, *CONFIGS], default="0.8B")
    parser.add_argument("--bits", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--grad-checkpoint", action="store_true")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--card", type=float)
    parser.add_argument("--counted", action="store_true")
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
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": paths})
        print(f"a checkpoint was written in {time.perf_counter() - started:.0f} s\n", flush=True)
        records = [record for record in train(options, folder) if "train_loss" in record]
    steady = [1 / record["iterations_per_second"] for record in records[1:]]
    sampling = [record["seconds/sampling"] for record in records[1:]]
    for name, values in (("a step", steady), ("sampling", sampling)):
        print(
            f"{name}, without the first: {np.median(values):.2f} s, {min(values):.2f} to {max(values):.2f}", flush=True
        )
    if options.beside:
        step_of_peft(shape, options)


if __name__ == "__main__":
    main()
