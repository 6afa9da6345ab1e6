"""Computes products of one row with a faulty BLAS in many new processes, with and without deltatune's patches.

usage: python benchmarks/one_row.py --processes 100

It prints for each product in how many processes the result had NaN. `planted_blas.c` is the BLAS; `--healthy` builds it
without the fault, as a control. It needs Linux and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).with_name("planted_blas.c")
WHO = ("upstream", "deltatune")

PROGRAM = '''
import contextlib, importlib.util, json, sys, types
applied = contextlib.nullcontext()
if sys.argv[1] == "deltatune":
    import warnings
    from deltatune import patched
    warnings.simplefilter("ignore")
    applied = patched()
import mlx.core as mx
import mlx.nn as nn

# mlx-lm's expert layers are loaded without importing mlx_lm itself, which would be slow in a hundred processes.
folder = importlib.util.find_spec("mlx_lm").submodule_search_locations[0]
for name, path in (("mlx_lm", folder), ("mlx_lm.models", folder + "/models")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from mlx_lm.models.switch_layers import SwitchLinear, SwitchGLU

N, K, E = 512, 544, 4

mx.set_cache_limit(0)  # What is freed goes back, and what is new comes from malloc, full of NaN.

def draw(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed)) / 8

def gradients(function, *arrays):
    y, vjp = mx.vjp(function, list(arrays), [draw(9, *function(*arrays).shape)])
    return [*y, *vjp]

def linear(bias):
    layer = nn.Linear(K, N, bias=bias)
    layer.update({"weight": draw(1, N, K)})
    return gradients(lambda x, w: (layer.update({"weight": w}), layer(x))[1], draw(0, 1, K), layer.weight)

def experts(rank):
    layer = SwitchLinear(K, rank, E, bias=False)
    indices = mx.array([[0, 2], [3, 3], [1, 0]])
    return gradients(lambda x, w: (layer.update({"weight": w}), layer(x, indices))[1],
                     draw(0, 3, 1, 1, K), draw(1, E, rank, K))

def sorted_experts():
    indices = mx.array([0] * 9 + [2] * 30 + [3] * 25, mx.uint32)
    return gradients(lambda x, w: mx.gather_mm(x, w, rhs_indices=indices, sorted_indices=True),
                     draw(0, 64, 1, 64), draw(1, E, 64, 96))

def block():
    layer = SwitchGLU(64, 32, E)
    layer.update({name: {"weight": draw(seed, E, *(layer[name].weight.shape[1:]))}
                  for seed, name in enumerate(("gate_proj", "up_proj", "down_proj"))})
    return gradients(lambda x: layer(x, mx.array([[0, 1], [2, 3]])), draw(0, 2, 64))

def attention(heads, groups, length, keys, **options):
    q, k, v = draw(0, 1, heads, length, 64), draw(1, 1, groups, keys, 64), draw(2, 1, groups, keys, 64)
    return gradients(lambda *a: mx.fast.scaled_dot_product_attention(*a, scale=0.1, **options), q, k, v)

def published():
    """Quantised gathers in every mode, nvfp4 last, then the one-row gather, in one process (mlx issue 3200)."""
    rows, inner, out, chosen = 64, N, K, 2
    results = []
    for mode, group in (("affine", 64), ("mxfp4", None), ("mxfp8", None), ("nvfp4", None)):
        for transpose in (True, False):
            k, d = (inner, out) if transpose else (out, inner)
            indices = (mx.random.uniform(shape=(rows, chosen), key=mx.random.key(0)) * E).astype(mx.uint32)
            x = draw(1, rows, 1, 1, k)
            packed = mx.quantize(draw(2, *((E, d, k) if transpose else (E, k, d))), group, mode=mode)
            options = {"group_size": group, "mode": mode}
            scales = packed[1:] if len(packed) == 3 else (packed[1], None)
            y = mx.gather_qmm(x, packed[0], *scales, rhs_indices=indices, transpose=transpose, **options)
            w = mx.dequantize(packed[0], *scales, **options)
            mx.eval(y)
            results.append(y)
            results.append(mx.gather_mm(x, w.swapaxes(-1, -2) if transpose else w, rhs_indices=indices))
            mx.eval(results)
    return results

PRODUCTS = {
    "matmul, one row": lambda: [mx.matmul(draw(0, 1, K), draw(1, K, N))],
    "x @ w.T, one row": lambda: [draw(0, 1, K) @ draw(1, N, K).T],
    "vector @ matrix": lambda: [draw(0, K) @ draw(1, K, N)],
    "batched, one row each": lambda: gradients(mx.matmul, draw(0, 3, 1, K), draw(1, 3, K, N)),
    "weight gradient of rank 1": lambda: gradients(lambda a, b: a @ b, draw(0, 8, 1), draw(1, 1, N)),
    "addmm, gradient of a row": lambda: gradients(lambda c, a, b: mx.addmm(c, a, b), draw(2, N), draw(0, 1, K),
                                                  draw(1, K, N)),
    "inner": lambda: [mx.inner(draw(0, K), draw(1, N, K))],
    "nn.Linear": lambda: linear(False),
    "nn.Linear with bias": lambda: linear(True),
    "attention, one query": lambda: attention(4, 2, 1, 40),
    "attention, one key": lambda: attention(2, 2, 3, 1),
    "attention, causal": lambda: attention(2, 1, 1, 40, mask="causal"),
    "conv1d, one position": lambda: [mx.conv1d(draw(0, 1, 4, 64), draw(1, 64, 4, 1), groups=64)],
    "SwitchLinear": lambda: experts(N),
    "SwitchLinear, rank 1": lambda: experts(1),
    "SwitchGLU": block,
    "gather_mm, sorted": sorted_experts,
    "compiled": lambda: [mx.compile(lambda a, b: mx.tanh(a @ b))(draw(0, 1, K), draw(1, K, N))],
    "checkpointed": lambda: gradients(mx.checkpoint(lambda a, b: mx.tanh(a @ b)), draw(0, 1, K), draw(1, K, N)),
    "the published sequence": published,
    "two rows (control)": lambda: gradients(mx.matmul, draw(0, 2, K), draw(1, K, N)),
}

found = {}
with applied:
    for name, product in PRODUCTS.items():
        found[name] = sum(int(mx.isnan(array.astype(mx.float32)).sum()) for array in product())
print(json.dumps(found))
'''


def build(folder: Path, *, healthy: bool = False) -> Path:
    """Compile planted_blas.c into `folder`, and return the library's path."""
    library = folder / ("healthy_blas.so" if healthy else "planted_blas.so")
    compiler = [shutil.which("cc")] if shutil.which("cc") else [sys.executable, "-m", "ziglang", "cc"]
    options = [
        "-O3",
        "-fassociative-math",
        "-fno-signed-zeros",
        "-fno-trapping-math",
        "-shared",
        "-fPIC",
        *(["-DHEALTHY"] if healthy else []),
    ]
    subprocess.run([*compiler, *options, "-o", str(library), str(SOURCE)], check=True, capture_output=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """The environment variables with which a process uses `library` as its BLAS."""
    return {**os.environ, "LD_PRELOAD": str(library), "DELTATUNE_BLAS": "system"}


def products(library: Path, who: str) -> dict[str, int]:
    """How many NaN each product has in a new process, of upstream alone or with deltatune's patches."""
    command = [sys.executable, "-c", PROGRAM, who]
    result = subprocess.run(command, env=environment(library), capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=10, metavar="N", help="fresh processes of each (default: 10)")
    parser.add_argument("--healthy", action="store_true", help="without the planted fault: a control")
    arguments = parser.parse_args()
    counts: dict[str, Counter[str]] = {who: Counter() for who in WHO}
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder), healthy=arguments.healthy)
        for _ in range(arguments.processes):
            for who in WHO:
                found = products(library, who)
                counts[who].update({name: int(held > 0) for name, held in found.items()})
    print(f"Processes with NaN in the result, of {arguments.processes} each:")
    print(f"{'':28}{WHO[0]:>10}{WHO[1]:>11}")
    for name in counts[WHO[0]]:
        print(f"{name:28}{counts[WHO[0]][name]:>10}{counts[WHO[1]][name]:>11}")


if __name__ == "__main__":
    main()
