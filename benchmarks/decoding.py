"""Measures how fast a model decodes under deltatune's patches, beside mlx-lm alone.

usage: python benchmarks/decoding.py [--shape 0.8B] [--rows 1 64] [--prompt 512] [--tokens 100] [--adapters]

Rows of random prompts continue with their likeliest tokens through mlx-lm's caches, the next step started before a
token is read, as mlx-lm does it. Ways: mlx-lm alone; under the patches; as deltatune's commands decode, without kernels
that mx.compile builds; and many prompts at once, by models/batch_decoder.py. With --adapters, mlx-lm's own layers serve
alone and once more under the patches, and ours without patches, too. Ways take turns; figures are the better of each
way's turns, and shares are those of the middle step, for which one long step does not count. Prompts are timed too.
With --dtype float32, the tokens of all ways should be the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

import processes
import trainers
from machine import heading

# The steps of the batch decoder before it is timed, in which the step is compiled.
_WARM_UP = 4


class Decoded(NamedTuple):
    """Tokens a second over all rows, of the prompts, of all steps and of the median step; and each step's tokens."""

    prompt: float
    whole: float
    middle: float
    tokens: list[list[int]]


def decode(model: Any, prompts: list[list[int]], tokens: int) -> Decoded:
    """Decode by mlx-lm's caches."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    rows, prompt = len(prompts), mx.array(prompts)
    cache = make_prompt_cache(model)
    mx.eval(prompt)
    started = time.perf_counter()
    y = model(prompt, cache=cache)[:, -1].argmax(axis=-1)
    mx.eval(y)
    prompted = time.perf_counter()
    found, read = [], []
    for _ in range(tokens):
        following = model(y[:, None], cache=cache)[:, -1].argmax(axis=-1)
        mx.async_eval(following)
        found.append(y.tolist())
        read.append(time.perf_counter())
        y = following
    mx.eval(y)
    ended = time.perf_counter()
    return Decoded(prompt.size / (prompted - started), rows * tokens / (ended - prompted), rows / middle(read), found)


def middle(times: list[float]) -> float:
    """The median of the seconds between one time and the next."""
    return float(np.median(np.diff(times)))


def decode_together(model: Any, prompts: list[list[int]], tokens: int) -> Decoded:
    """The same by the batch decoder, from when the tokens of one step are read to when those of the last one are."""
    from deltatune.models.batch_decoder import BatchDecoder

    class Timed(BatchDecoder):
        """Notes when prompts have been read, and when the tokens of each step are read."""

        def _decode(self, *of_decoder: Any) -> None:
            times.append(time.perf_counter())
            super()._decode(*of_decoder)

        def _take(self, chosen: Any) -> None:
            super()._take(chosen)
            times.append(time.perf_counter())

    rows, times = len(prompts), [time.perf_counter()]
    answers = Timed(model, rows, (), _WARM_UP + tokens).run(prompts)
    # The last step is one that nobody needs, started before its predecessor's tokens were read.
    started, prompted, steps = times[0], times[1], times[2 + _WARM_UP : -1]
    found = [list(step) for step in zip(*answers, strict=True)]
    whole = rows * (len(steps) - 1) / (steps[-1] - steps[0])
    return Decoded(rows * len(prompts[0]) / (prompted - started), whole, rows / middle(steps), found)


def both_layers(model: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Put adapters of drawn numbers on every linear layer; return ours and mlx-lm's with the same arrays, by paths."""
    import mlx.core as mx
    from mlx_lm.tuner.lora import LoRALinear

    from deltatune.lora import convert_to_lora
    from deltatune.lora.convert import adapters
    from deltatune.options.config import LoraConfig

    convert_to_lora(model, LoraConfig(rank=trainers.RANK, scale=trainers.SCALE), num_layers=-1)
    ours, theirs = list(adapters(model).items()), []
    mx.random.seed(0)
    for path, layer in ours:
        layer.lora_b = 1e-3 * mx.random.normal(layer.lora_b.shape)
        upstream = LoRALinear.from_base(layer.linear, r=trainers.RANK, scale=trainers.SCALE)
        upstream.lora_a, upstream.lora_b = layer.lora_a, layer.lora_b
        theirs.append((path, upstream))
    mx.eval(model.parameters())
    return ours, theirs


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--shape", choices=list(trainers.SHAPES), default="0.8B")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--dtype", help="of the weights; by default that of the shape")
    parser.add_argument("--adapters", action="store_true", help="with LoRA on every linear layer")
    parser.add_argument("--ways", nargs="+", help="only these, the first of which the others are compared with")
    parser.add_argument("--turns", type=int, default=2, help="how often each way is timed")
    options = parser.parse_args()
    shape = trainers.SHAPES[options.shape]
    model = trainers.mlx_model(shape, options.dtype)
    from deltatune.machine.compiling import without_kernels
    from deltatune.patches import patched

    ours, theirs = both_layers(model) if options.adapters else ([], [])
    print(f"{heading()}\n{shape}\n", flush=True)
    print(
        "| rows | way | prompt, tokens/s | decoding, tokens/s | by its middle step | of mlx-lm alone "
        "| tokens as mlx-lm alone |\n" + "|---" * 7 + "|"
    )
    ways: dict[str, tuple[Callable[..., Decoded], list[Callable[[], Any]], list[tuple[str, Any]]]] = {
        "mlx-lm alone": (decode, [], theirs),
        "under the patches": (decode, [patched], ours),
        "as deltatune's commands": (decode, [without_kernels, patched], ours),
        "many prompts at once": (decode_together, [without_kernels, patched], ours),
    }
    if options.adapters:
        ways |= {
            "mlx-lm's layers under the patches": (decode, [patched], theirs),
            "our layers without patches": (decode, [], ours),
        }
    chosen = {name: ways[name] for name in options.ways or ways}
    for rows in options.rows:
        prompts = np.random.default_rng(0).integers(0, shape.vocabulary, (rows, options.prompt)).tolist()
        measured = {name: [] for name in chosen}
        for turn in range(1 + options.turns):
            for name, (way, contexts, layers) in chosen.items():
                use(model, layers)
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context())
                    measured[name].append(way(model, prompts, options.tokens if turn else 10))
        show(rows, {name: results[1:] for name, results in measured.items()})


def use(model: Any, layers: list[tuple[str, Any]]) -> None:
    """Put these layers, by their paths, in their places in the model."""
    from mlx.utils import tree_unflatten

    model.update_modules(tree_unflatten(layers))
    model.eval()


def show(rows: int, measured: dict[str, list[Decoded]]) -> None:
    """Print a line of the table for each way."""
    first = next(iter(measured))
    alone = np.array(measured[first][-1].tokens)
    for name, results in measured.items():
        prompt, whole, middle = (max(rates) for rates in list(zip(*results, strict=True))[:3])
        share = middle / max(result.middle for result in measured[first])
        same = (np.array(results[-1].tokens)[: len(alone)] == alone).mean()
        print(
            f"| {rows} | {name} | {prompt:,.0f} | {whole:,.1f} | {middle:,.1f} | {share:.3f} | {same:.1%} |", flush=True
        )


if __name__ == "__main__":
    main()
