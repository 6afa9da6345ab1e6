"""Measures training whose frozen layers stay on the disk, beside the same run with all weights in memory.

usage: python benchmarks/larger_than_memory.py --shape 35B-A3B --bits 4 --memory 8GB --tokens 4096 16384 [--beside]
       python benchmarks/larger_than_memory.py --shape tiny --memory 3MB --tokens 64 --beside

A checkpoint with random weights is written first: the layers of one kind hold the same numbers under their own names,
so that writing is all that it costs. It has fewer layers where the disk has no room for all. Then `deltatune train`
runs a few iterations of one row in a process of its own, with and (--beside) without --memory. Printed are the plan,
MLX's peak of memory, tokens a second of the last iteration, and how long the run waited for the disk.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import processes
from long_rows import write_rows
from machine import heading
from recipe import write_tokenizer
from trainers import SHAPES, Shape, lazy_model

# What of the disk stays free.
SPARE = 3e9
NAMES = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.uint32: "U32"}
# Runs the command line with what it reads left in the system's page cache, or with all layers on the disk whatever the
# plan says.
KEEPS_CACHE = "from deltatune.machine.page_cache import PageCache; PageCache.drop = lambda self: None"
ALL_ON_DISK = (
    "from deltatune.plan import placement; placement.left_on_disk = lambda _, sizes, *a, **b: range(len(sizes))"
)
MAIN = "import sys; from deltatune.cli import main; sys.exit(main(sys.argv[1:]))"


def drawn(name: str, array: mx.array, bits: int) -> mx.array:
    """Numbers of usual size in the shape and dtype of a parameter that is not computed."""
    if array.dtype == mx.uint32:
        return mx.random.randint(0, 2**32 - 1, array.shape, mx.uint32)
    # A quantised weight is scale * q + bias, with q even in 0 to 2^bits - 1.
    step = 12**0.5 / 2**bits * 0.02
    if name.endswith("scales"):
        return mx.full(array.shape, step, array.dtype)
    if name.endswith(".biases"):
        return mx.full(array.shape, -step * (2**bits - 1) / 2, array.dtype)
    if array.ndim == 1:
        return array
    return (mx.random.normal(array.shape, mx.float32) * 0.02).astype(array.dtype)


def raw(array: mx.array) -> tuple[memoryview, dict[str, Any]]:
    """The bytes of an array, and its entry in a header of safetensors."""
    entry = {"dtype": NAMES[array.dtype], "shape": list(array.shape)}
    mx.eval(array)
    # NumPy has no bf16.
    data = np.array(array.view(mx.uint16) if array.itemsize == 2 else array)
    return memoryview(data).cast("B"), entry


def write_file(path: Path, tensors: dict[str, tuple[memoryview, dict[str, Any]]]) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, (data, entry) in tensors.items():
        header[name] = entry | {"data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data, _ in tensors.values():
            written = 0
            while written < len(data):
                written += file.write(data[written : written + (1 << 26)]) or 0


def write_model(folder: Path, shape: Shape, bits: int) -> tuple[int, int]:
    """Write a checkpoint; returns how many layers it has, and its bytes."""
    model = lazy_model({**shape.config(), "num_hidden_layers": shape.interval}, bits)
    by_layer: dict[int | None, dict[str, mx.array]] = {}
    for path, array in tree_flatten(model.parameters()):
        found = re.search(r"\.layers\.(\d+)\.", path)
        by_layer.setdefault(int(found[1]) if found else None, {})[path.removeprefix("language_model.")] = array
    made = {at: {name: raw(drawn(name, a, bits)) for name, a in arrays.items()} for at, arrays in by_layer.items()}
    sizes = {at: sum(len(data) for data, _ in tensors.values()) for at, tensors in made.items()}
    room = shutil.disk_usage(folder).free - SPARE - sizes[None]
    layers = 0
    while layers < shape.layers and (room := room - sizes[layers % shape.interval]) > 0:
        layers += 1
    config: dict[str, Any] = shape.config() | {"num_hidden_layers": layers, "eos_token_id": 2}
    config["max_position_embeddings"] = 1 << 20
    if bits:
        config["quantization"] = {"group_size": 64, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    files = {"model-outside.safetensors": made[None]}
    for layer in range(layers):
        source = layer % shape.interval
        tensors = {name.replace(f".layers.{source}.", f".layers.{layer}."): t for name, t in made[source].items()}
        files[f"model-{layer:05}.safetensors"] = tensors
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: write_file(folder / item[0], item[1]), files.items()))
    return layers, sum(len(data) for tensors in files.values() for data, _ in tensors.values())


def train(options: argparse.Namespace, model: Path, folder: Path, tokens: int, memory: str | None) -> str:
    """Run `deltatune train`; returns what it said of its memory, its disk and its speed."""
    folder.mkdir()
    write_rows(folder / "data", tokens, options.iters)
    lora: dict[str, Any] = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    if options.no_experts:
        lora["exclude"] = ["*.switch_mlp.*"]
    (folder / "lora.yaml").write_text(json.dumps({"lora_parameters": lora}))
    flags: dict[str, Any] = {
        "config": folder / "lora.yaml", "model": model, "data": folder / "data", "adapter-path": folder / "adapters",
        "batch-size": 1, "iters": options.iters, "max-seq-length": tokens, "num-layers": -1, "optimizer": "adamw",
        "steps-per-report": 1, "val-batches": 0,
    }  # fmt: skip
    changes = [KEEPS_CACHE] * options.keep_cache + [ALL_ON_DISK] * options.all_on_disk
    command = [sys.executable, "-c", "; ".join([*changes, MAIN]), "train", "--grad-checkpoint", "--force"]
    command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    command += ["--memory", memory] if memory else []
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
    except subprocess.TimeoutExpired as error:
        return f"stopped after {options.seconds:.0f} s: {(error.stdout or b'')[-600:]!r}"
    seconds = time.perf_counter() - started
    if done.returncode:
        return f"failed after {seconds:.0f} s:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    (metrics,) = (folder / "adapters").rglob("metrics.jsonl")
    reports = [json.loads(line) for line in metrics.read_text().splitlines()]
    reports = [report for report in reports if "tokens_per_second" in report]
    said = [line for line in done.stdout.splitlines() if re.match("Memory|Disk|Waited|Plan: ", line)]
    rates = ", ".join(f"{report['tokens_per_second']:,.0f}" for report in reports)
    losses = ", ".join(f"{report['train_loss']:.6f}" for report in reports)
    said += [f"tokens/s {rates}; peak {reports[-1]['peak_memory']:.2f} GB; losses {losses}; {seconds:.0f} s in all"]
    return "\n".join(f"    {line}" for line in said)


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="35B-A3B")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--bits", type=int, default=0, choices=(0, 4, 8), help="0 for the shape's own dtype")
    parser.add_argument("--memory", required=True, help="as `deltatune train` takes it")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--iters", type=int, default=3)
    parser.add_argument("--beside", action="store_true", help="also with all weights in memory")
    parser.add_argument("--no-experts", action="store_true", help="without adapters on experts")
    parser.add_argument("--keep-cache", action="store_true", help="leave what was read in the system's page cache")
    parser.add_argument("--all-on-disk", action="store_true", help="leave all layers on the disk, whatever is planned")
    parser.add_argument("--seconds", type=float, default=100, help="of one training")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; a temporary folder by default")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    shape = replace(shape, layers=options.layers or shape.layers)
    print(f"{heading()}\n{shape}\n", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        model = Path(temporary, "model")
        model.mkdir()
        started = time.perf_counter()
        layers, size = write_model(model, shape, options.bits)
        seconds = time.perf_counter() - started
        print(f"{layers} of {shape.layers} layers, {size / 1e9:.2f} GB, written in {seconds:.0f} s", flush=True)
        mx.clear_cache()
        for tokens in options.tokens:
            for memory in (options.memory, None) if options.beside else (options.memory,):
                folder = Path(temporary, f"{tokens}-{memory}")
                print(f"{tokens:,} tokens, {memory or 'in memory'}:", flush=True)
                print(train(options, model, folder, tokens, memory), flush=True)


if __name__ == "__main__":
    main()
