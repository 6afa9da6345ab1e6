"""Measures how fast a model decodes under deltatune's patches, beside mlx-lm alone.

usage: python benchmarks/decoding.py [--shape 0.8B] [--rows 1 64] [--prompt 512] [--tokens 100] [--adapters]

Rows of random prompts continue with their likeliest tokens through mlx-lm's caches, the next step started before a
token is read, as mlx-lm does it. Ways: mlx-lm alone; under the patches; as deltatune's commands decode, without kernels
that mx.compile builds; and many prompts at once, by models/batch_decoder.py. They take turns, twice; figures are the
better of each way's two. Prompts are timed too. With --dtype float32, the tokens of all ways should be the same.
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

# The steps of the batch decoder before it is timed, in which the step is compiled.
_WARM_UP = 4


def decode(model: Any, prompts: list[list[int]], tokens: int) -> tuple[float, float, list[list[int]]]:
    """Return tokens a second of the prompt and of decoding, over all rows, and the tokens."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    rows, prompt = len(prompts), mx.array(prompts)
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
    return prompt.size / (prompted - started), rows * tokens / (ended - prompted), found


def decode_together(model: Any, prompts: list[list[int]], tokens: int) -> tuple[float, float, list[list[int]]]:
    """The same by the batch decoder, from when the tokens of one step are read to when those of the last one are."""
    from deltatune.models.batch_decoder import BatchDecoder

    class Timed(BatchDecoder):
        """Notes when prompts have been read, and when the tokens of each step are read."""

        def _decode(self, enough: int) -> None:
            times.append(time.perf_counter())
            super()._decode(enough)

        def _take(self, tokens: mx.array) -> None:
            super()._take(tokens)
            times.append(time.perf_counter())

    import mlx.core as mx

    rows, times = len(prompts), [time.perf_counter()]
    answers = Timed(model, rows, (), _WARM_UP + tokens).run(prompts)
    # The last step is one that nobody needs, started before its predecessor's tokens were read.
    started, prompted, steps = times[0], times[1], times[2 + _WARM_UP : -1]
    found = [list(step) for step in zip(*answers, strict=True)]
    return rows * len(prompts[0]) / (prompted - started), rows * (len(steps) - 1) / (steps[-1] - steps[0]), found


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(trainers.SHAPES), default="0.8B")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--dtype", help="of the weights; by default that of the shape")
    parser.add_argument("--adapters", action="store_true", help="with LoRA on every linear layer")
    options = parser.parse_args()
    shape = trainers.SHAPES[options.shape]
    model = trainers.mlx_model(shape, options.dtype)
    from deltatune.lora import convert_to_lora
    from deltatune.machine.compiling import without_kernels
    from deltatune.options.config import LoraConfig
    from deltatune.patches import patched

    if options.adapters:
        convert_to_lora(model, LoraConfig(rank=trainers.RANK, scale=trainers.SCALE), num_layers=-1)
    model.eval()
    print(f"{heading()}\n{shape}\n", flush=True)
    print(
        "| rows | way | prompt, tokens/s | decoding, tokens/s | of mlx-lm alone | tokens as mlx-lm alone |\n"
        + "|---" * 6
        + "|"
    )
    ways: dict[str, tuple[Callable[..., Any], list[Callable[[], Any]]]] = {
        "mlx-lm alone": (decode, []),
        "under the patches": (decode, [patched]),
        "as deltatune's commands": (decode, [without_kernels, patched]),
        "many prompts at once": (decode_together, [without_kernels, patched]),
    }
    for rows in options.rows:
        best: dict[str, tuple[float, float]] = {}
        chosen: dict[str, np.ndarray] = {}
        prompts = np.random.default_rng(0).integers(0, shape.vocabulary, (rows, options.prompt)).tolist()
        for turn in range(3):
            for name, (way, contexts) in ways.items():
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context())
                    *rates, found = way(model, prompts, options.tokens if turn else 10)
                chosen[name] = np.array(found)
                if turn:
                    best[name] = tuple(map(max, rates, best.get(name, rates)))
        for name, (prompted, decoded) in best.items():
            share = decoded / best["mlx-lm alone"][1]
            alone = chosen["mlx-lm alone"]
            same = (chosen[name][: len(alone)] == alone).mean()
            print(f"| {rows} | {name} | {prompted:,.0f} | {decoded:,.1f} | {share:.3f} | {same:.1%} |", flush=True)


if __name__ == "__main__":
    main()
