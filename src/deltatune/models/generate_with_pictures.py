"""Generates text from a prompt with images or videos, through mlx-vlm."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..machine.compiling import without_kernels
from ..ops.functional import undisturbed
from ..patches import patched
from .generate import Sampling, finite
from .load import Loaded
from .vision.inputs import Picture


def stream_with_pictures(
    loaded: Loaded,
    prompt: Sequence[int],
    images: Sequence[Picture],
    videos: Sequence[Picture],
    max_tokens: int,
    sampling: Sampling,
) -> Generator[Any, None, None]:
    """Generate an answer to a prompt with images or videos, piece by piece.

    The patches of deltatune are applied meanwhile; without them qwen3_vl_moe would compute other features than in
    training. Generation stops at the end tokens of `loaded.tokenizer`, too, and leaves nothing on the model, where
    mlx-vlm keeps the positions of the last prompt.

    Args:
        loaded: A model that was loaded for images.
        prompt: The prompt's tokens, with one image or video token for each feature.
        images: The images, already cut into patches.
        videos: The videos, already cut into patches.
        max_tokens: The largest number of tokens in the answer.
        sampling: How each token is chosen.

    Yields:
        mlx-vlm's responses, each with the `text` of a piece.

    Raises:
        NotFiniteError: The probability of a token is not finite.
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
    rows, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values", None)
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
