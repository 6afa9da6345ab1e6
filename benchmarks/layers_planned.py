"""Compares the planned memory of training by layers with MLX's peak, on models small enough for any machine.

usage: python benchmarks/layers_planned.py [--only dense] [--iters 3]

Models of Qwen3.5's form with random weights, dense and mixtures, in 4 bits, bf16 and fp32, train with all layers on the
disk. Printed are the planned bytes, the peak that MLX counted, and their ratio.
"""

from __future__ import annotations

import contextlib
import gc
import io
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx

import processes
from deltatune import finetune
from deltatune.options.config import LoraConfig, TrainConfig
from deltatune.plan import placement
from deltatune.train.setup import ready
from larger_than_memory import write_model
from long_rows import write_rows
from machine import heading
from trainers import Shape

DENSE = Shape("dense", 256, 768, 8, (4, 2, 64), (4, 4, 64), 2048, 1, 512, "bfloat16")
EXPERTS = Shape("experts", 256, 128, 8, (4, 2, 64), (4, 4, 64), 2048, 1, 512, "bfloat16", (32, 4))
# Shape, bits, tokens of the row, whether experts have adapters, and other options.
CASES: list[tuple[str, Shape, int, int, bool, dict[str, Any]]] = [
    ("dense, bf16", DENSE, 0, 512, True, {}),
    ("dense, bf16, large vocabulary", replace(DENSE, vocabulary=16384), 0, 512, True, {}),
    ("dense, 4 bits", DENSE, 4, 512, True, {}),
    ("dense, 4 bits, long", DENSE, 4, 2048, True, {}),
    ("dense, wide, few tokens", replace(DENSE, hidden=512, mlp=1536), 0, 64, True, {}),
    ("dense, accumulated", DENSE, 4, 256, True, {"grad_accumulation_steps": 2}),
    ("experts, bf16", EXPERTS, 0, 512, True, {}),
    ("experts, 4 bits", EXPERTS, 4, 512, True, {}),
    ("experts at rest, bf16", EXPERTS, 0, 512, False, {}),
    ("experts at rest, 4 bits", EXPERTS, 4, 512, False, {}),
    ("experts at rest, 4 bits, many", replace(EXPERTS, experts=(128, 8), mlp=64), 4, 256, False, {}),
]  # fmt: skip


def compared(case: tuple[str, Shape, int, int, bool, dict[str, Any]], iters: int, folder: Path) -> tuple[int, int]:
    """Train; return the planned and the counted bytes."""
    _, shape, bits, tokens, on_experts, changes = case
    model = folder / "model"
    model.mkdir()
    write_model(model, shape, bits)
    write_rows(folder / "data", tokens, 3)
    lora = LoraConfig(rank=8, exclude=[] if on_experts else ["*.switch_mlp.*"])
    config = TrainConfig(
        model=str(model), data=str(folder / "data"), adapter_path=str(folder / "out"), iters=max(iters, 2),
        batch_size=1, max_seq_length=tokens, val_batches=0, grad_checkpoint=True,
        memory=1000, lora_parameters=lora, **changes,
    )  # fmt: skip
    said = io.StringIO()
    with all_on_disk(), contextlib.redirect_stdout(said):
        planned = placement.placed(ready(config, lazy=True))[0].bytes
        if not iters:
            return planned, 0
        # A run before may have left cycles that hold its arrays.
        gc.collect()
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        finetune(replace(config, memory=planned))
    assert "Waited" in said.getvalue(), said.getvalue()
    return planned, mx.get_peak_memory() - held


def all_on_disk() -> Any:
    """Within the context, all layers stay on the disk, whatever is planned."""
    return patch.object(placement, "left_on_disk", lambda _, sizes, *__, **___: tuple(range(len(sizes))))


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--iters", type=int, default=3, help="0 plans alone")
    options = parser.parse_args()
    print(f"{heading()}\n", flush=True)
    for case in CASES:
        if options.only in case[0]:
            with tempfile.TemporaryDirectory() as temporary:
                planned, counted = compared(case, options.iters, Path(temporary))
            said = f", counted {counted / 1e6:.2f} MB ({planned / counted:.3f})" if counted else ""
            print(f"{case[0]}: planned {planned / 1e6:.2f} MB{said}", flush=True)


if __name__ == "__main__":
    main()
