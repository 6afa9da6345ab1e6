"""Text from images or videos and a prompt: mlx-vlm's own generation, behind two functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import UserError
from ...machine.compiling import without_kernels
from ...patches import patched
from ..generate import Sampling
from ..load import Loaded
from .inputs import Picture, single_frames


def stream_with_images(
    loaded: Loaded, prompt: Sequence[int], images: Sequence[str], max_tokens: int, sampling: Sampling
) -> Iterator[Any]:
    """mlx-vlm's responses one by one, as models.generate.stream gives mlx-lm's. `prompt` has one token an image.

    With the patches in force: qwen3_vl_moe sees what it was trained to see. UserError where an image is refused.
    """
    text = loaded.tokenizer.decode(list(prompt))
    yield from _stream(loaded, text, max_tokens, sampling, image=list(images))


def stream_with_videos(
    loaded: Loaded, prompt: Sequence[int], videos: Sequence[Picture], max_tokens: int, sampling: Sampling
) -> Iterator[Any]:
    """As `stream_with_images`, for videos already in patches. `prompt` has a token for each of their features."""
    inputs = {
        "input_ids": mx.array([list(prompt)]),
        "pixel_values_videos": mx.array(np.concatenate([video.patches for video in videos])),
        # Frame by frame, as they stand in the prompt: mlx-vlm before 0.7 does not take a video apart itself.
        "video_grid_thw": mx.array(single_frames([video.grid for video in videos])),
    }
    yield from _stream(loaded, "", max_tokens, sampling, **inputs)


def _stream(loaded: Loaded, text: str, max_tokens: int, sampling: Sampling, **inputs: Any) -> Iterator[Any]:
    from mlx_vlm import stream_generate

    options: dict[str, Any] = {
        "temperature": sampling.temp,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
    }
    with without_kernels(), patched():
        try:
            yield from stream_generate(loaded.model, loaded.processor, text, max_tokens=max_tokens, **inputs, **options)
        except ValueError as error:
            raise UserError(f"{'--image' if 'image' in inputs else '--video'}: {error}") from error


def answer_pictures(loaded: Loaded, prompt: str, pictures: Sequence[str], max_tokens: int) -> list[str]:
    """The model's likeliest answer to a user's `prompt` for each picture alone, up to its end or `max_tokens`.

    Token by token, all pictures at once. Leaves the model in inference mode.
    """
    from mlx_vlm.generate import batch_generate
    from transformers.utils import logging

    loaded.model.eval()
    verbosity = logging.get_verbosity()
    # mlx-vlm gives transformers an argument in a way that it warns of, once for each picture.
    logging.set_verbosity_error()
    try:
        with without_kernels(), patched():
            found = batch_generate(
                loaded.model,
                loaded.processor,
                images=list(pictures),
                prompts=[prompt] * len(pictures),
                max_tokens=max_tokens,
            )
    finally:
        logging.set_verbosity(verbosity)
    return found.texts
