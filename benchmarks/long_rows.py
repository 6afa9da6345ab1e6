"""Measures checkpointed training steps on long rows, as `deltatune train` runs them.

usage: python benchmarks/long_rows.py [--only NAME ...] [--steps 3] [--folder DIR] [--tiny]

Each length has a process of its own: `deltatune train` with LoRA r=8 on every linear, AdamW, one row a step and
--grad-checkpoint, on a checkpoint with random weights and on random letters, one token each. Tokens a second are those
of the last step, and memory is MLX's peak of the whole run, both as the trainer reports them; the plan is the one that
the trainer prints. --tiny runs tiny shapes on a CPU, to try the script.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import processes
from machine import heading
from recipe import write_tokenizer
from trainers import SHAPES

# Name -> the shape and the length of its row.
ROWS = {f"0.8B, {tokens:,}": ("0.8B", tokens) for tokens in (2048, 8192, 32768, 131072, 262144)}
ROWS["9B, 16,384"] = ("9B", 16384)
TINY = {f"tiny, {tokens:,}": ("tiny", tokens) for tokens in (256, 1024)}


def write_model(folder: Path, name: str) -> None:
    """Write a checkpoint of random weights, in a process of its own, whose memory the training must not share."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from trainers import SHAPES, mlx_model, save_model\n"
        "shape = SHAPES[sys.argv[2]]\n"
        "config = shape.config() | {'max_position_embeddings': 262144, 'eos_token_id': 2}\n"
        "save_model(Path(sys.argv[3]), mlx_model(shape), config)\n"
    )
    folder.mkdir()
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), name, str(folder)], check=True)
    write_tokenizer(folder)


def write_rows(folder: Path, tokens: int, count: int) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(count):
        # A row ends in one more token, and the last token is no input.
        letters = bytes(draw.integers(ord("a"), ord("z"), tokens, dtype=np.uint8)).decode()
        lines.append(json.dumps({"text": letters}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def measure(model: Path, folder: Path, tokens: int, steps: int) -> dict[str, Any]:
    """Run `deltatune train`; returns what it reported of its last step, its plan, and how long the first step took."""
    write_rows(folder / "data", tokens, steps)
    command = [sys.executable, "-m", "deltatune", "train", "--model", str(model), "--data", str(folder / "data")]
    options: dict[str, Any] = {
        "adapter-path": folder / "adapters", "batch-size": 1, "iters": steps, "max-seq-length": tokens,
        "optimizer": "adamw", "steps-per-report": 1, "val-batches": 0,
    }  # fmt: skip
    command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
    done = subprocess.run([*command, "--grad-checkpoint", "--force"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    (metrics,) = (folder / "adapters").rglob("metrics.jsonl")
    reports = [json.loads(line) for line in metrics.read_text().splitlines()]
    reports = [report for report in reports if "tokens_per_second" in report]
    planned = re.search(r"Plan: .*? need ([\d.,]+ [GM]B)", done.stdout)
    first = 1 / reports[0]["iterations_per_second"]
    return reports[-1] | {"planned": planned[1] if planned else "-", "first": first}


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary folder by default")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    table = TINY if arguments.tiny else ROWS
    names = arguments.only or list(table)
    if unknown := [name for name in names if name not in table]:
        parser.error(f"--only {' '.join(unknown)}: expected some of: {'; '.join(table)}.")
    print(f"{heading()}\n", flush=True)
    for name in dict.fromkeys(table[name][0] for name in names):
        print(SHAPES[name])
    print("\n| row | tokens/s | GB | planned | s of the first step | s in all |\n" + "|---" * 6 + "|", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        for number, name in enumerate(names):
            shape, tokens = table[name]
            model = Path(temporary, shape)
            if not model.is_dir():
                write_model(model, shape)
            folder = Path(temporary, str(number))
            folder.mkdir()
            start = time.perf_counter()
            found = measure(model, folder, tokens, arguments.steps)
            seconds = time.perf_counter() - start
            print(
                f"| {name} | {found['tokens_per_second']:,.0f} | {found['peak_memory']:.2f} | {found['planned']} "
                f"| {found['first']:.1f} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
