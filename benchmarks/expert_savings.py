"""Trains the demo's mixture with less memory for the adapters of its experts: loss and answers beside full size.

usage: python benchmarks/expert_savings.py [--seeds 0 1] [--rate 5e-3] [--updates 260] [--questions 60] RESULTS.jsonl

Each run is that of `make demo` (16 experts a layer, AdamW) at rank 8, but for one saving.
With alpha 16, experts of a lower rank have a higher scale. Adapters in bf16 do not exist in
deltatune: here the numbers of experts' adapters are rounded to bf16 after each update, to the nearest or at random,
and kept in fp32. A result is a line of RESULTS.jsonl; runs that are in it already are not repeated. At the end all are
printed as a table. The bytes are those of adapters, their gradients and both moments, and with bf16 those that it would
take, gradients in bf16 too.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deltatune  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import mlx.optimizers

from choosing import measured_once, train_and_ask
from deltatune.demo import flow, task
from deltatune.demo.assets import MODEL
from deltatune.train.tree import leaves
from deltatune.train.updates import optimizer as optimizers
from machine import heading

EXPERTS = "mlp.switch_mlp.*"
RUNS: dict[str, dict[str, Any]] = {
    "rank 8, fp32": {},
    "experts of rank 4": {"rank": 4},
    "experts of rank 2": {"rank": 2},
    "experts of rank 1": {"rank": 1},
    "experts of rank 4, alpha 16": {"rank": 4, "alpha": 16.0},
    "experts of rank 2, alpha 16": {"rank": 2, "alpha": 16.0},
    "experts of rank 1, alpha 16": {"rank": 1, "alpha": 16.0},
    "8-bit moments": {"optimizer": "adamw8bit"},
    "experts of rank 4, alpha 16, 8-bit moments": {"rank": 4, "alpha": 16.0, "optimizer": "adamw8bit"},
    "experts in bf16, rounded to the nearest": {"rounded": "nearest"},
    "experts in bf16, rounded at random": {"rounded": "random"},
}


class Rounded(mlx.optimizers.AdamW):
    """AdamW after which experts' adapters, the only arrays with three axes, hold numbers of bf16."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        updated = super().apply_single(gradient, parameter, state)
        return updated if updated.ndim != 3 else updated.astype(mx.bfloat16).astype(updated.dtype)


class RoundedAtRandom(mlx.optimizers.AdamW):
    """The same, rounded up as often as the number is near to the next one, so that no update is lost on average."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        updated = super().apply_single(gradient, parameter, state)
        if updated.ndim != 3:
            return updated
        key = mx.stack([self.step.astype(mx.uint32), mx.array(sum(updated.shape), mx.uint32)])
        bits = mx.random.randint(0, 1 << 16, updated.shape, mx.uint32, key=key)
        return ((updated.view(mx.uint32) + bits) & mx.array(0xFFFF0000, mx.uint32)).view(mx.float32)


ROUNDED = {"nearest": Rounded, "random": RoundedAtRandom}


def measure(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Losses, the share of right answers, and the bytes of adapters, gradients and moments, after a run."""
    changes, rate = RUNS[run["run"]], run["rate"]
    items = task.write(folder / "data", test=run["questions"])["test"]
    more = {
        "learning_rate": rate,
        "seed": run["seed"],
        "steps_per_eval": run["updates"],
        "lora_parameters": {"rank": 8},
    }
    config = flow.options(MODEL, folder, run["updates"], **more)
    if "rank" in changes:
        chosen = {"rank_pattern": {EXPERTS: changes["rank"]}, "alpha": changes.get("alpha")}
        config = replace(config, lora_parameters=replace(config.lora_parameters, **chosen))
    if "optimizer" in changes:
        config = replace(config, optimizer=changes["optimizer"])
    kinds = {"adamw": ROUNDED[changes["rounded"]]} if "rounded" in changes else {}
    with patch.dict(optimizers.OPTIMIZERS, kinds):
        prepared, found = train_and_ask(config, items)
    sizes = {"experts": 0.0, "others": 0.0}
    for _, array in leaves(prepared.model.trainable_parameters()):
        of_experts = array.ndim == 3
        stored = 2 if of_experts and "rounded" in changes else 4
        moments = 2.03 if "optimizer" in changes and array.size >= 4096 else 8
        sizes["experts" if of_experts else "others"] += array.size * (2 * stored + moments)
    return found | {f"{name}_bytes": int(size) for name, size in sizes.items()}


def table(results: list[dict[str, Any]]) -> str:
    """The results as a table of Markdown, seeds beside one another."""
    rows = ["| run | MB of experts | training loss | validation loss | right |", "|---|---|---|---|---|"]
    for name in dict.fromkeys((each["run"], each["rate"]) for each in results):
        same = [each for each in results if (each["run"], each["rate"]) == name]
        cells = [", ".join(f"{each[key]:.4f}" for each in same) for key in ("train_loss", "val_loss")]
        right = ", ".join(f"{each['right']:.0%}" for each in same)
        size = f"{same[0]['experts_bytes'] / 1e6:.2f}"
        rows.append(f"| {name[0]}, rate {name[1]:g} | {size} | {' | '.join(cells)} | {right} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--updates", type=int, default=260)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    common = {"rate": arguments.rate, "updates": arguments.updates, "questions": arguments.questions}
    runs = [{"run": name, "seed": seed} | common for seed in arguments.seeds for name in arguments.runs]
    results = measured_once(arguments.results, runs, measure)
    print(f"\n{heading()}\n\n{table(results)}")


if __name__ == "__main__":
    main()
