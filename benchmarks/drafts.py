"""Measures training with a multi-token-prediction head beside training without, and answers with its drafts.

usage: python -u benchmarks/drafts.py [--shape 0.8B] [--iters 30] [--tokens 2048] [--rate 2e-3] [--answer 128]
           [--runs "with the head" ...]

A checkpoint of the shape gets random weights, and a head of mlx-vlm's modules with random weights. `deltatune train`
runs on it three times in this process: with the head, without it, and with the head alone. `deltatune eval --draft`
then measures the drafts after training, `deltatune generate` answers without drafts and with them, and the evaluation
before training comes last. Every row repeats one sentence, so that losses fall within a few iterations.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import processes
from deltatune.cli import main as command_line
from deltatune.models.adapted_base import reader_of
from machine import heading
from recipe import write_tokenizer
from trainers import SHAPES, Shape, lazy_model

SENTENCE = "the quick brown fox jumps over the lazy dog, and then it sleeps until the sun is up. "
# Without marks of a message's end, which a model would learn before all else, and then answer with nothing.
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
RUNS: dict[str, list[str]] = {"with the head": ["--mtp"], "without": [], "the head alone": ["--mtp", "only"]}
# Iterations that a median leaves out: kernels are built in them.
FIRST = 5


def write_model(folder: Path, shape: Shape) -> None:
    """Write a checkpoint with random weights, the tensors of a head, and a tokenizer."""
    folder.mkdir()
    config = shape.config() | {"mtp_num_hidden_layers": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, shape.vocabulary, TEMPLATE)
    model = lazy_model(shape.config(), 0, shape.dtype)
    tensors = {path.removeprefix("language_model."): array for path, array in tree_flatten(model.parameters())}
    reader, completed = reader_of(folder)
    package = importlib.import_module(f"mlx_vlm.speculative.drafters.{reader.output_model_type}")
    options = {"model_type": reader.output_model_type, "text_config": reader.read_text_config(completed)}
    head = package.Model(package.ModelConfig.from_dict(options))
    kind = getattr(mx, shape.dtype)
    tensors |= {f"mtp.{path}": array.astype(kind) for path, array in tree_flatten(head.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    mx.clear_cache()


def write_data(folder: Path, tokens: int) -> None:
    """Write rows of so many tokens, each a repeated sentence that begins somewhere else."""
    folder.mkdir()
    for name, count in (("train", 64), ("valid", 4), ("test", 4)):
        lines = []
        for number in range(count):
            text = (SENTENCE * (tokens // len(SENTENCE) + 2))[7 * number % len(SENTENCE) :]
            content = [{"role": "user", "content": text[:40]}, {"role": "assistant", "content": text[40 : tokens - 16]}]
            lines.append(json.dumps({"messages": content}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def said(words: list[Any]) -> None:
    """Run a command of deltatune in this process, which prints what it prints, and its seconds."""
    print(f"\n$ deltatune {' '.join(map(str, words))}", flush=True)
    mx.reset_peak_memory()
    started = time.perf_counter()
    code = command_line(list(map(str, words)))
    print(f"exit code {code or 0}, {time.perf_counter() - started:.1f} s", flush=True)
    mx.clear_cache()


def row(name: str, metrics: Path) -> str:
    """The row of a run in the table: its losses, tokens a second and peak of memory."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "train_loss" in record]
    validated = [record for record in records if "val_loss" in record]

    def between(key: str, of: list[dict[str, Any]]) -> str:
        values = [record[key] for record in of if key in record]
        return f"{values[0]:.3f} to {values[-1]:.3f}" if values else ""

    rate = np.median([record["tokens_per_second"] for record in steps[FIRST:]])
    peak = max(record["peak_memory"] for record in steps)
    cells = [between("train_loss", steps), between("mtp_loss", steps), between("val_mtp_accepted", validated)]
    return f"| {name} | " + " | ".join([*cells, f"{rate:,.0f}", f"{peak:.2f}"]) + " |"


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.8B")
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    print(f"{heading()}\n{shape}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = folder / "model", folder / "data"
        write_model(model, shape)
        write_data(data, options.tokens)
        shared = ["--model", model, "--data", data, "--max-seq-length", options.tokens, "--batch-size", shape.batch]
        flags = [*shared, "--iters", options.iters, "--learning-rate", options.rate, "--steps-per-report", 1]
        flags += ["--steps-per-eval", options.iters, "--val-batches", 1]
        for run in options.runs:
            said(["train", *flags, *RUNS[run], "--adapter-path", folder / run.replace(" ", "-")])
        heads = ["run", "loss", "loss of the head", "accepted in validation", "tokens/s", "peak, GB"]
        print("\n| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
        for run in options.runs:
            print(row(run, folder / run.replace(" ", "-") / "metrics.jsonl"), flush=True)
        adapted = ["--adapter-path", folder / "with-the-head"]
        said(["eval", *shared, "--draft", *adapted])
        asked = ["generate", "--model", model, *adapted, "--prompt", SENTENCE[:40], "--max-tokens", options.answer]
        for draft in ([], ["--draft"]):
            said([*asked, *draft])
        said(["eval", *shared, "--draft"])


if __name__ == "__main__":
    main()
