"""Measures what a run loses to the allocation of memory on an NVIDIA GPU.

usage: python benchmarks/allocation.py [--shape 0.8B] [--rows 2 8] [--widths 2048 960] [--steps 48] [--checkpoint]
                                       [--room 1.25 1.5]

`Trainer` trains on random rows of these widths, which come in random order, with several bounds on the memory that MLX
keeps of freed arrays: that of train/freed_memory.py; the same with each `--room` in place of its ROOM; a quarter of the
GPU, above which all is given back after an iteration; and none. For each: tokens a second after a first round through
the widths, the longest iteration, the peak of memory in use by MLX's count, and the most that the driver held for it.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from dataclasses import replace
from typing import Any

import processes
import trainers
from machine import heading

# CUmemPool_attribute values of CUDA's cuda.h.
_RESERVED_HIGH = 6
_ROUNDS = 4


class Pool:
    """The driver's pool of the GPU's memory, from which MLX allocates."""

    def __init__(self) -> None:
        self._driver, self._pool = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        device = ctypes.c_int()
        for code in (
            self._driver.cuInit(0),
            self._driver.cuDeviceGet(ctypes.byref(device), 0),
            self._driver.cuDeviceGetDefaultMemPool(ctypes.byref(self._pool), device),
        ):
            if code:
                raise RuntimeError(f"the driver answers {code}")

    def start(self) -> None:
        """Give back what is not in use, and count the most that is held from now on."""
        self._driver.cuMemPoolTrimTo(self._pool, ctypes.c_size_t(0))
        self._driver.cuMemPoolSetAttribute(self._pool, _RESERVED_HIGH, ctypes.byref(ctypes.c_uint64(0)))

    def most(self) -> int:
        value = ctypes.c_uint64()
        self._driver.cuMemPoolGetAttribute(self._pool, _RESERVED_HIGH, ctypes.byref(value))
        return value.value


def measure(model: Any, shape: Any, options: Any, threshold: int | None, room: float) -> str:
    """Train once, with `room` as train/freed_memory.py's ROOM; returns the cells of the table."""
    import mlx.core as mx
    import numpy as np

    from deltatune.data import Splits
    from deltatune.options.config import TrainConfig
    from deltatune.train import freed_memory, loop
    from deltatune.train.iterations import Iterations
    from deltatune.train.reports.screen import Screen
    from random_data import UnsavedTokenizer, random_examples

    iterations: list[tuple[int, float]] = []

    class Timed(Iterations):
        def _iterate(self) -> bool:
            started = time.perf_counter()
            asked = super()._iterate()
            iterations.append((self._batches[-1].inputs.size, time.perf_counter() - started))
            return asked

    loop.Iterations = Timed  # type: ignore[misc]
    freed_memory.ROOM["cuda"] = room
    random, pool = np.random.default_rng(0), Pool()
    lengths = np.repeat(options.widths, shape.batch * _ROUNDS)
    data = Splits(train=random_examples(random, lengths, shape.vocabulary))
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    pool.start()
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            batch_size=shape.batch, iters=options.steps, max_seq_length=max(options.widths),
            adapter_path=folder, learning_rate=trainers.RATE, val_batches=0, save_every=10**9, steps_per_report=10**9,
            grad_checkpoint=options.checkpoint, clear_cache_threshold=threshold,
        )  # fmt: skip
        loop.Trainer(model, UnsavedTokenizer(), config, data, model_config={}, screen=Screen(shown=False)).run()
    after = iterations[len(options.widths) * _ROUNDS :]
    rate = sum(tokens for tokens, _ in after) / sum(seconds for _, seconds in after)
    longest = max(seconds for _, seconds in after)
    return f"{rate:,.0f} | {longest * 1e3:.0f} | {mx.get_peak_memory() / 1e9:.2f} | {pool.most() / 1e9:.2f}"


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(trainers.SHAPES), default="0.8B")
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    parser.add_argument("--widths", type=int, nargs="+", default=[2048])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--room", type=float, nargs="+", default=[])
    options = parser.parse_args()
    model = trainers.mlx_model(trainers.SHAPES[options.shape])
    from deltatune.lora import convert_to_lora
    from deltatune.machine.backend import gpu_memory
    from deltatune.options.config import LoraConfig
    from deltatune.train.freed_memory import ROOM

    convert_to_lora(model, LoraConfig(rank=trainers.RANK, scale=trainers.SCALE), num_layers=-1)

    print(f"{heading()}\n{trainers.SHAPES[options.shape]} Widths {options.widths}.\n", flush=True)
    heads = ["rows", "what MLX keeps", "tokens/s", "longest iteration, ms", "peak in use, GB", "most held, GB"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    bounds: dict[str, tuple[int | None, float]] = {"as train/freed_memory.py": (None, ROOM["cuda"])}
    bounds |= {f"{room:g} times the peak": (None, room) for room in options.room}
    bounds |= {"a quarter of the GPU": (gpu_memory() // 4, ROOM["cuda"]), "everything": (1 << 60, ROOM["cuda"])}
    for rows in options.rows:
        for name, bound in bounds.items():
            shape = replace(trainers.SHAPES[options.shape], batch=rows)
            print(f"| {rows} | {name} | {measure(model, shape, options, *bound)} |", flush=True)


if __name__ == "__main__":
    main()
