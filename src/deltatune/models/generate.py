"""Generates text with mlx-lm, and with mlx-vlm from a prompt with images or videos."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ..errors import NotFiniteError
from ..layers import logits_of
from ..machine.compiling import without_kernels
from ..ops.functional import undisturbed
from ..patches import patched
from .load import Loaded
from .vision.inputs import Picture

# stream_generate() gives a model so many tokens of a prompt at a time.
PIECE = 2048


@dataclass(frozen=True)
class Sampling:
    """How each next token is chosen. The options are those of `mlx_lm.generate`.

    Attributes:
        temp: The temperature. 0 takes the likeliest token, with any values of the other options.
        top_p: Only the likeliest tokens with this sum of probabilities are drawn from.
        min_p: Only tokens at least this likely, relative to the likeliest, are drawn from.
        top_k: Only this many of the likeliest tokens are drawn from. 0 means all.
    """

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0

    def sampler(self) -> Callable[[mx.array], mx.array] | None:
        """Return a function that chooses a token of each row of log-probabilities [B, V]; None for the likeliest."""
        if self.temp == 0:
            return None
        return make_sampler(temp=self.temp, top_p=self.top_p, min_p=self.min_p, top_k=self.top_k)


def stream(loaded: Loaded, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> Generator[Any, None, None]:
    """Yield mlx-lm's responses with the `text` of each piece; the last has speeds, counts and `finish_reason`, too."""
    # Building kernels would take longer than an answer takes without them; on CUDA every process builds them anew.
    with without_kernels(), patched():
        responses = stream_generate(
            loaded.model, loaded.tokenizer, list(prompt), max_tokens=max_tokens, sampler=sampling.sampler()
        )
        yield from with_first_space(finite(responses, prompt), loaded.tokenizer)


def finite(responses: Iterator[Any], prompt: Sequence[int]) -> Iterator[Any]:
    """Yield the responses of mlx-lm or mlx-vlm to a prompt; NotFiniteError for a log-probability that is not finite.

    The first token is looked at before it is handed on, and each later one when the next has come: nothing waits then.
    """
    read = list(prompt)
    healthy: list[mx.array] = []
    for response in responses:
        if response.logprobs is not None:
            healthy.append(mx.isfinite(mx.array(response.logprobs)[..., response.token]).all())
            mx.async_eval(healthy)
        later = len(read) > len(prompt)
        while len(healthy) > later:
            _refuse(healthy.pop(0), read)
        read.append(response.token)
        yield response
    for last in healthy:
        _refuse(last, read)


def _refuse(healthy: mx.array, read: Sequence[int]) -> None:
    if not healthy.item():
        raise NotFiniteError(read)


def with_first_space(responses: Iterator[Any], tokenizer: Any) -> Iterator[Any]:
    """Yield mlx-lm's responses with the space that begins an answer, where its detokenizer alone leaves it out."""
    tokens: list[int] = []
    for response in responses:
        if response.finish_reason != "stop":
            tokens.append(response.token)
        if response.text:
            written = tokenizer.decode(tokens)
            yield replace(response, text=written) if written == f" {response.text}" else response
            break
        yield response
    yield from responses


def on_stream_of_answers() -> mx.StreamContext:
    """Return the context of the stream that answers run on, for which mx.compile traces its functions anew."""
    return mx.stream(generation_stream)


def begun(model: nn.Module, tokens: int, rows: int = 1, piece: int = PIECE, most: int = 1) -> Iterator[list[mx.array]]:
    """Let a model read prompts and write the first and the last token of answers, without computing anything.

    Of a prompt of many pieces it reads the first one and the last two, which hold most, with blank keys and values of
    those between; a model with caches of other kinds than a hybrid one's reads them all. It yields the arrays of each
    evaluation: those of the caches, and behind a prompt's last token the logits, too. Each of `rows` prompts has
    `tokens` tokens, `piece` of which are read at once; an answer has `most` at most.
    """
    cache: Any = make_prompt_cache(model)
    steps = [range(start, min(start + piece, tokens - 1)) for start in range(0, tokens - 1, piece)]
    if all(type(layer_cache).__name__ in _MOVED for layer_cache in cache):
        steps = [step for at, step in enumerate(steps) if at == 0 or at >= len(steps) - 2]
    read = 0
    for step in [*steps, range(tokens - 1, tokens), *[range(tokens + most - 2, tokens + most - 1)] * (most > 1)]:
        if step.start > read:
            _move(cache, step.start)
            yield _held(cache)
        logits = logits_of(model, mx.zeros((rows, len(step)), mx.int32), cache=cache)[:, -1]
        read = step.stop
        yield _held(cache) if read < tokens else [*_held(cache), logits]


# Caches that can be moved behind tokens that nobody read: states have the same size wherever they are.
_MOVED = (KVCache.__name__, ArraysCache.__name__)


def _move(cache: Sequence[Any], tokens: int) -> None:
    """Let caches have room for so many tokens, and hold blank keys and values of them."""
    for layer_cache in cache:
        if type(layer_cache).__name__ == KVCache.__name__:
            for name in ("keys", "values"):
                rows, heads, _, size = getattr(layer_cache, name).shape
                blank = mx.zeros((rows, heads, _roomy(tokens), size), getattr(layer_cache, name).dtype)
                setattr(layer_cache, name, blank)
            layer_cache.offset = tokens


class CacheBytes(NamedTuple):
    """The memory of a model's caches: the bytes of a row of any length, and those that each token adds."""

    fixed: int
    token: int


def cache_bytes(model: nn.Module) -> CacheBytes:
    """Find the memory of caches, without computing anything."""

    def after(tokens: int) -> int:
        return sum(array.nbytes for array in next(begun(model, tokens + 1)))

    # mlx-lm's caches have room for whole steps of tokens.
    one = after(KVCache.step)
    two = after(2 * KVCache.step)
    return CacheBytes(2 * one - two, (two - one) // KVCache.step)


def _roomy(tokens: int) -> int:
    """Return for how many tokens keys and values have room where there are so many."""
    return -(-tokens // KVCache.step) * KVCache.step


def _held(cache: Sequence[Any]) -> list[mx.array]:
    held: Any = tree_flatten([layer_cache.state for layer_cache in cache])
    return [array for _, array in held if isinstance(array, mx.array)]


def stream_with_pictures(
    loaded: Loaded,
    prompt: Sequence[int],
    images: Sequence[Picture],
    videos: Sequence[Picture],
    max_tokens: int,
    sampling: Sampling,
) -> Generator[Any, None, None]:
    """Yield mlx-vlm's responses, each with the `text` of a piece, to a prompt with images or videos cut into patches.

    The prompt has one image or video token for each feature. The patches of deltatune are applied meanwhile; without
    them qwen3_vl_moe would compute other features than in training. Generation stops at the end tokens of
    `loaded.tokenizer`, too, and leaves nothing on the model, where mlx-vlm keeps the positions of the last prompt.
    """
    from mlx_vlm import stream_generate

    inputs = _inputs(prompt, images, videos)
    options: dict[str, Any] = {
        "temperature": sampling.temp,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
    }
    with without_kernels(), patched(), _stopping(loaded), undisturbed(loaded.model):
        responses = stream_generate(loaded.model, loaded.processor, "", max_tokens=max_tokens, **inputs, **options)
        yield from finite(responses, prompt)


def _inputs(prompt: Sequence[int], images: Sequence[Picture], videos: Sequence[Picture]) -> dict[str, Any]:
    """Return a prompt with images or videos as mlx-vlm takes it."""
    inputs: dict[str, Any] = {"input_ids": mx.array([list(prompt)])}
    if images:
        inputs["pixel_values"] = mx.array(np.concatenate([image.patches for image in images]))
        inputs["image_grid_thw"] = mx.array([image.grid for image in images])
    if videos:
        inputs["pixel_values_videos"] = mx.array(np.concatenate([video.patches for video in videos]))
        inputs["video_grid_thw"] = mx.array([video.grid for video in videos])
    return inputs


def embedded(model: Any, prompt: Sequence[int], images: Sequence[Picture], videos: Sequence[Picture]) -> list[mx.array]:
    """Return the lazy embeddings that mlx-vlm makes of a prompt with images or videos.

    They are held while all pieces of the prompt are read. The arguments are those of stream_with_pictures().
    """
    inputs = _inputs(prompt, images, videos)
    rows = inputs.pop("input_ids")
    pixels = inputs.pop("pixel_values", None)
    features = model.get_input_embeddings(rows, pixels, mask=None, **inputs)
    leaves: Any = tree_flatten(features.to_dict())
    return [array for _, array in leaves if isinstance(array, mx.array)]


@contextlib.contextmanager
def _stopping(loaded: Loaded) -> Iterator[None]:
    """Let mlx-vlm stop at the end tokens of mlx-lm's wrapper of the tokenizer, too."""
    criteria = getattr(loaded.processor, "tokenizer", loaded.processor).stopping_criteria
    before = criteria.eos_token_ids
    criteria.eos_token_ids = sorted({*before, *loaded.tokenizer.eos_token_ids})
    try:
        yield
    finally:
        criteria.eos_token_ids = before
