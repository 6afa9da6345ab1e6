"""Plans steps of every preference loss beside one of supervised training, of the same rows, and prints their peaks.

usage: python benchmarks/preference_memory.py [--shape 0.8B] [--rows 4] [--tokens 2048] [--device cuda]

Each plan is that of `deltatune plan`, of the graph that the device would build (pretended.py), with LoRA r=8 on every
linear and AdamW. A pair takes two rows. No step runs.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from pathlib import Path

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

sys.path.insert(0, str(Path(__file__).parent))
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan.array_layout import ArrayLayout
from deltatune.plan.forecast import forecast_step
from deltatune.plan.traced_step import BatchShape
from deltatune.train.preferences.objectives import OBJECTIVES
from deltatune.train.setup import prepare
from machine import versions
from pretended import pretended
from trainers import SHAPES, lazy_model


def peaks(shape: str, rows: int, tokens: int, checkpoint: bool, device: str) -> dict[str, int]:
    """The planned bytes of a step by the name of its loss."""
    found = {}
    with pretended(device):
        layout = ArrayLayout.measured()
        for loss in ("sft", *OBJECTIVES):
            model = lazy_model(SHAPES[shape].config(), 0)
            config = TrainConfig(loss=loss, lora_parameters=LoraConfig(rank=8), grad_checkpoint=checkpoint)
            prepare(model, config)
            pairs = rows // 2 if loss != "sft" else 0
            found[loss] = forecast_step(model, config, BatchShape(rows, tokens, preferences=pairs), layout).bytes.amount
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.8B")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", choices=("metal", "cuda"), default="cuda")
    arguments = parser.parse_args()
    size = f"{arguments.shape}, {arguments.rows} x {arguments.tokens}"
    print(f"{date.today()}, {size}, as on {arguments.device}; {versions()}")
    names = ("sft", *OBJECTIVES)
    print(f"| | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for checkpoint in (False, True):
        found = peaks(arguments.shape, arguments.rows, arguments.tokens, checkpoint, arguments.device)
        cells = [f"{size / 1e9:.2f} GB ({size / found['sft']:.2f}x)" for size in found.values()]
        print(f"| {'checkpointed' if checkpoint else 'plain'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
