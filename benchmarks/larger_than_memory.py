"""Measures training whose frozen layers stay on the disk, beside the same run with all weights in memory.

usage: python benchmarks/larger_than_memory.py --shape 35B-A3B --bits 4 --memory 8GB --tokens 4096 16384 [--beside]
       python benchmarks/larger_than_memory.py --shape 35B-A3B --memory 24GB --from host --folder /data /dev/shm
       python benchmarks/larger_than_memory.py --shape tiny --memory 3MB --tokens 64 --beside
       python benchmarks/larger_than_memory.py --shape Nemotron-3-Nano-30B-A3B --bits 4 --memory 10GB --tokens 2048

A checkpoint with random weights is written first: the layers of one kind hold the same numbers under their own names,
so that writing is all that it costs. Where the first folder has no room for all layers, the next ones take the rest,
and the checkpoint has links to them; what fits nowhere is left out. /dev/shm is the host's memory in place of a disk.
Then observed_training.py runs a few iterations of one row in a process of its own, with and (--beside) without
--memory. What it says is printed as it says it, with the seconds since its start.

What trains is LoRA of rank 8 on every linear, experts included; with --no-experts on every linear but the routed ones.
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
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
from machine import gpu, heading
from observed_training import SOURCES
from public_configs import CONFIGS
from recipe import write_tokenizer
from trainers import SHAPES, Shape, lazy_model

# What of the disk stays free.
SPARE = 3e9
NAMES = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.uint32: "U32"}
OBSERVED = Path(__file__).with_name("observed_training.py")
# The file that ends a checkpoint.
WRITTEN = "written.txt"
# What of a run's output is printed.
SAYS = re.compile(r"Memory|Disk|Waited|Plan: |step \d|memory:|error", re.IGNORECASE)


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


def placed_layers(folders: list[Path], sizes: list[int], outside: int) -> list[Path]:
    """The folder of each layer, as many layers as there is room for; the first folder also holds what is outside."""
    room = {folder: shutil.disk_usage(folder).free - SPARE for folder in folders}
    room[folders[0]] -= outside
    places: list[Path] = []
    for size in sizes:
        folder = next((folder for folder in folders if room[folder] >= size), None)
        if folder is None:
            break
        room[folder] -= size
        places.append(folder)
    return places


def write_model(folder: Path, shape: Shape, bits: int, others: list[Path] | None = None) -> tuple[int, int]:
    """Write a checkpoint; returns how many layers it has, and its bytes."""
    config = shape.config()
    pattern = config.get("hybrid_override_pattern") or [str(layer % shape.interval) for layer in range(shape.layers)]
    kinds = sorted(set(pattern))
    few = {"hybrid_override_pattern": kinds} if "hybrid_override_pattern" in config else {}
    model = lazy_model(config | few | {"num_hidden_layers": len(kinds)}, bits)
    by_layer: dict[int | None, dict[str, mx.array]] = {}
    for path, array in tree_flatten(model.parameters()):
        found = re.search(r"\.layers\.(\d+)\.", path)
        by_layer.setdefault(int(found[1]) if found else None, {})[path.removeprefix("language_model.")] = array
    made = {at: {name: raw(drawn(name, a, bits)) for name, a in arrays.items()} for at, arrays in by_layer.items()}
    sizes = {at: sum(len(data) for data, _ in tensors.values()) for at, tensors in made.items()}
    sources = [kinds.index(kind) for kind in pattern[: shape.layers]]
    of_layers = [sizes[source] for source in sources]
    places = placed_layers([folder, *(others or [])], of_layers, sizes[None])
    layers = len(places)
    config |= {"num_hidden_layers": layers, "eos_token_id": 2}
    config |= {"hybrid_override_pattern": pattern[:layers]} if few else {}
    config["max_position_embeddings"] = 1 << 20
    if bits:
        config["quantization"] = {"group_size": 64, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    files = {folder / "model-outside.safetensors": made[None]}
    for layer, place in enumerate(places):
        source = sources[layer]
        tensors = {name.replace(f".layers.{source}.", f".layers.{layer}."): t for name, t in made[source].items()}
        path = place / f"model-{layer:05}.safetensors"
        files[path] = tensors
        if place != folder:
            (folder / path.name).symlink_to(path)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda item: write_file(*item), files.items()))
    return layers, sizes[None] + sum(of_layers[:layers])


class Public(Shape):
    """A model of public_configs.py, of which a shape knows the name and the layers alone."""

    def __str__(self) -> str:
        return f"{self.name}, {self.layers} layers"

    def config(self) -> dict[str, Any]:
        return dict(CONFIGS[self.name])


def shape_of(name: str) -> Shape:
    if name in SHAPES:
        return SHAPES[name]
    sizes, config = (1, 1, 1), CONFIGS[name]
    return Public(name, 1, 1, config["num_hidden_layers"], sizes, sizes, config["vocab_size"], 1, 1, "bfloat16")


@contextmanager
def watched_card() -> Iterator[None]:
    """Print the most memory of the GPU that was in use within the context, as NVIDIA's driver counts it."""
    if gpu() is None:
        yield
        return
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=500"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        yield
        process.terminate()
        assert process.stdout is not None
        most = max((float(line) for line in process.stdout if line.strip().isdigit()), default=0.0)
    print(f"             the driver counted {most * 2**20 / 1e9:.2f} GB on the card at most", flush=True)


# Takes so many bytes of the GPU's memory, says so, and holds them until its input ends.
TAKES = """
import ctypes, sys
driver, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
driver.cuInit(0)
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuCtxSetCurrent(context)
driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
size = free.value - int(sys.argv[1])
if driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
    raise SystemExit("the GPU refused")
print(f"another program holds {size / 1e9:.2f} GB of the card", flush=True)
sys.stdin.read()
"""


@contextmanager
def smaller_card(free: float | None) -> Iterator[None]:
    """Within the context another program holds all of the GPU's memory but so many bytes."""
    if free is None:
        yield
        return
    command = [sys.executable, "-c", TAKES, str(int(free))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        print(f"    {process.stdout.readline().strip()}", flush=True)
        yield


def train(options: argparse.Namespace, model: Path, folder: Path, tokens: int, memory: str | None) -> None:
    """Run `deltatune train`, and print what it says of its memory, its disk and its speed, when it says it."""
    folder.mkdir()
    write_rows(folder / "data", tokens, options.iters)
    lora: dict[str, Any] = {"rank": 8}
    if options.no_experts:
        lora["exclude"] = ["*.switch_mlp.*"]
    (folder / "lora.yaml").write_text(json.dumps({"lora_parameters": lora}))
    flags: dict[str, Any] = {
        "config": folder / "lora.yaml", "model": model, "data": folder / "data", "adapter-path": folder / "adapters",
        "batch-size": 1, "iters": options.iters, "max-seq-length": tokens,
        "optimizer": options.optimizer, "steps-per-report": 1, "val-batches": 0,
    }  # fmt: skip
    command = [
        sys.executable,
        "-u",
        str(OBSERVED),
        *["--all-on-disk"] * options.all_on_disk,
        *["--try"] * options.tried,
    ]
    command += [f"--from={options.source}", "train", "--grad-checkpoint", "--force"]
    command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    command += ["--memory", memory] if memory else []
    started = time.perf_counter()
    last: deque[str] = deque(maxlen=30)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with watched_card(), smaller_card(options.card), subprocess.Popen(command, **streams) as process:
        stop = threading.Timer(options.seconds, process.kill)
        stop.start()
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            if SAYS.match(line):
                print(f"    {time.perf_counter() - started:5.1f} s  {line.rstrip()}", flush=True)
        process.wait()
        stop.cancel()
    print(f"    {time.perf_counter() - started:5.1f} s  ended with exit code {process.returncode}", flush=True)
    if process.returncode:
        print("".join(last), flush=True)


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, *CONFIGS], default="35B-A3B")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--bits", type=int, default=0, choices=(0, 4, 8), help="0 for the shape's own dtype")
    parser.add_argument("--memory", required=True, help="as `deltatune train` takes it")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--iters", type=int, default=3)
    parser.add_argument("--beside", action="store_true", help="also with all weights in memory")
    parser.add_argument("--no-experts", action="store_true", help="without adapters on experts")
    parser.add_argument("--try", dest="tried", action="store_true", help="what the plan refuses, too")
    parser.add_argument("--from", dest="source", choices=SOURCES, default="plan", help="where layers come from")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--all-on-disk", action="store_true", help="leave all layers on the disk, whatever is planned")
    parser.add_argument("--card", type=float, help="leave so many bytes of the GPU free, as a smaller card has them")
    parser.add_argument("--seconds", type=float, default=150, help="of one training")
    parser.add_argument("--folder", type=Path, nargs="+", default=[Path(tempfile.gettempdir())], help="of the layers")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint there, and use one that was kept")
    options = parser.parse_args()
    shape = shape_of(options.shape)
    shape = replace(shape, layers=options.layers or shape.layers)
    print(f"{heading()}\n{shape}\n", flush=True)
    for folder in options.folder:
        print(f"{folder}: {shutil.disk_usage(folder).free / 1e9:.1f} GB free", flush=True)
    name = f"deltatune-{shape.name}-{shape.layers}-{options.bits}".replace(" ", "-")
    kept = [folder / name for folder in options.folder if (folder / name / WRITTEN).exists()]
    with ExitStack() as stack:

        def temporary(folder: Path) -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))

        if not kept:
            large = [folder for folder in options.folder if shutil.disk_usage(folder).free > 2 * SPARE]
            kept = [(folder if options.keep else temporary(folder)) / name for folder in large or options.folder]
            for folder in kept:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            started = time.perf_counter()
            layers, size = write_model(kept[0], shape, options.bits, kept[1:])
            seconds = time.perf_counter() - started
            (kept[0] / WRITTEN).write_text(f"{layers} of {shape.layers} layers, {size / 1e9:.2f} GB")
            print(f"written in {seconds:.0f} s", flush=True)
            mx.clear_cache()
        model = kept[0]
        results = temporary(max(options.folder, key=lambda folder: shutil.disk_usage(folder).free))
        print((model / WRITTEN).read_text(), flush=True)
        for tokens in options.tokens:
            for memory in (options.memory, None) if options.beside else (options.memory,):
                print(f"{tokens:,} tokens, {memory or 'in memory'}:", flush=True)
                train(options, model, results / f"{tokens}-{memory}", tokens, memory)


if __name__ == "__main__":
    main()
