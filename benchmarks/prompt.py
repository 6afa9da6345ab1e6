"""Times the reading of a prompt with upstream's layers, without and with deltatune's patches.

usage: python benchmarks/prompt.py [--tokens 1024] [--layers 8]

The model is a random one of the Qwen3.5 shape (hidden 512, 8 heads of 128 in its gated-delta layers) in fp32, in
inference with a cache. Logits are compared first; a figure is the best of three.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import deltatune  # noqa: F401  (binds OpenBLAS, so before mlx)

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import processes
from deltatune.ops.operator.measure import largest_error
from deltatune.patches import patched
from machine import heading
from trainers import Shape, mlx_model


def read(model: Any, prompt: mx.array) -> tuple[mx.array, float, float]:
    """Read the prompt; returns the logits, the seconds and the peak memory in MB."""
    mx.reset_peak_memory()
    cache = make_prompt_cache(model)
    start = time.perf_counter()
    logits = model(prompt, cache=cache)
    mx.eval(logits, [each.state for each in cache])
    return logits, time.perf_counter() - start, mx.get_peak_memory() / 1e6


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8, help="4 or more: the fourth is the first of attention")
    options = parser.parse_args()
    shape = Shape("small", 512, 1024, options.layers, (4, 2, 128), (8, 8, 128), 4096, 1, options.tokens, "float32")
    model = mlx_model(shape)
    model.eval()
    prompt = mx.random.randint(0, shape.vocabulary, (1, options.tokens))
    print(f"{heading()}\n\n{options.tokens} tokens, {options.layers} layers\n")
    print("| | s | MB |\n|---|---|---|")
    logits = []
    for name, context in (("mlx-lm", nullcontext()), ("under the patches", patched())):
        with context:
            runs = [read(model, prompt) for _ in range(3)]
        logits.append(runs[0][0])
        if not largest_error(logits[-1:], logits[:1]) < 1e-4:
            raise SystemExit(f"{name}: logits differ; no figures.")
        print(f"| {name} | {min(run[1] for run in runs):.2f} | {max(run[2] for run in runs):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
