"""Compares the losses of fifty training steps in bf16 with those in fp32, from the same weights and batches.

usage: python benchmarks/bf16_losses.py [--shape 0.8B] [--steps 50] [--tokens 512]

Each run has a process of its own: fp32, bf16 as deltatune trains, and bf16 with array operations in the place of the
kernels for the recurrence and for attention. The last one's distance from fp32 is bf16's own noise: the kernels are as
good as bf16 allows where theirs is not much larger. Weights and tokens are random, LoRA r=8 is on every linear.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import processes
import trainers

RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "fp32": ("float32", {}),
    "bf16, deltatune": ("bfloat16", {}),
    "bf16, array operations": ("bfloat16", {"DELTATUNE_GATED_DELTA": "chunk", "DELTATUNE_ATTENTION": "blocked"}),
}


def losses(options: dict[str, Any]) -> list[float]:
    shape = replace(trainers.SHAPES[options["shape"]], dtype=options["dtype"], tokens=options["tokens"])
    with trainers.deltatune(shape, checkpoint=False, waits=True) as trainer:
        return [trainer.step() for _ in range(options["steps"])]


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(trainers.SHAPES), default="0.8B")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=512)
    options = vars(processes.arguments(parser, losses))
    found: dict[str, Any] = {}
    for name, (dtype, variables) in RUNS.items():
        found[name] = processes.measured(__file__, options | {"dtype": dtype}, **variables)
        print(f"{name}: {found[name][0]:.4f} to {found[name][-1]:.4f}", flush=True)
    print("\n| run | largest difference from fp32 | mean |\n|---|---|---|")
    for name in list(RUNS)[1:]:
        apart = [abs(one - exact) for one, exact in zip(found[name], found["fp32"], strict=True)]
        print(f"| {name} | {max(apart):.1e} | {sum(apart) / len(apart):.1e} |")


if __name__ == "__main__":
    main()
