"""Text from images and a prompt: mlx-vlm's own generation, behind one function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import UserError
from ..patches import patched
from .generate import Sampling
from .load import Loaded


def stream_with_images(
    loaded: Loaded, prompt: Sequence[int], images: Sequence[str], max_tokens: int, sampling: Sampling
) -> Iterator[Any]:
    """mlx-vlm's responses one by one, as models.generate.stream gives mlx-lm's. `prompt` has one token an image.

    With the patches in force: qwen3_vl_moe sees what it was trained to see. UserError where an image is refused.
    """
    from mlx_vlm import stream_generate

    text = loaded.tokenizer.decode(list(prompt))
    options: dict[str, Any] = {
        "temperature": sampling.temp,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
    }
    with patched():
        try:
            yield from stream_generate(
                loaded.model, loaded.processor, text, list(images), max_tokens=max_tokens, **options
            )
        except ValueError as error:
            raise UserError(f"--image: {error}") from error
