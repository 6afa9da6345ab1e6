"""Measures how fast a model decodes under deltatune's patches, beside mlx-lm alone.

usage: python benchmarks/decoding.py [--shape 0.8B] [--rows 1 64] [--tokens 100] [--adapters]

Rows of random prompts continue with their likeliest tokens through mlx-lm's caches, the next step started before a
token is read, as mlx-lm does it. Ways: mlx-lm alone; under the patches; and as deltatune's commands decode, without
kernels that mx.compile builds. They take turns, twice; figures are the better of each way's two. Prompts are timed too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import processes
import trainers
from machine import heading

_PROMPT = 512


def decode(model: Any, rows: int, tokens: int, vocabulary: int) -> tuple[float, float, list[list[int]]]:
    """Return tokens a second of the prompt and of decoding, over all rows, and the tokens."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    prompt = mx.array(np.random.default_rng(0).integers(0, vocabulary, (rows, _PROMPT)))
    cache = make_prompt_cache(model)
    mx.eval(prompt)
    started = time.perf_counter()
    y = model(prompt, cache=cache)[:, -1].argmax(axis=-1)
    mx.eval(y)
    prompted = time.perf_counter()
    found = []
    for _ in range(tokens):
        following = model(y[:, None], cache=cache)[:, -1].argmax(axis=-1)
        mx.async_eval(following)
        found.append(y.tolist())
        y = following
    mx.eval(y)
    ended = time.perf_counter()
    return rows * _PROMPT / (prompted - started), rows * tokens / (ended - prompted), found


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(trainers.SHAPES), default="0.8B")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--adapters", action="store_true", help="with LoRA on every linear layer")
    options = parser.parse_args()
    shape = trainers.SHAPES[options.shape]
    model = trainers.mlx_model(shape)
    from deltatune.lora import convert_to_lora
    from deltatune.machine.compiling import without_kernels
    from deltatune.options.config import LoraConfig
    from deltatune.patches import patched

    if options.adapters:
        convert_to_lora(model, LoraConfig(rank=trainers.RANK, scale=trainers.SCALE), num_layers=-1)
    model.eval()
    print(f"{heading()}\n{shape}\n", flush=True)
    print(
        "| rows | way | prompt, tokens/s | decoding, tokens/s | of mlx-lm alone | first tokens |\n" + "|---" * 6 + "|"
    )
    ways: dict[str, list[Callable[[], Any]]] = {
        "mlx-lm alone": [], "under the patches": [patched], "as deltatune's commands": [without_kernels, patched],
    }  # fmt: skip
    for rows in options.rows:
        best: dict[str, tuple[float, float]] = {}
        for turn in range(3):
            for name, contexts in ways.items():
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context())
                    *rates, found = decode(model, rows, options.tokens if turn else 10, shape.vocabulary)
                if turn:
                    best[name] = tuple(map(max, rates, best.get(name, rates)))
        for name, (prompted, decoded) in best.items():
            share = decoded / best["mlx-lm alone"][1]
            print(f"| {rows} | {name} | {prompted:,.0f} | {decoded:,.1f} | {share:.3f} | {found[1][:2]} |", flush=True)


if __name__ == "__main__":
    main()
