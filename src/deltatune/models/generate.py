"""Text from a model: mlx-lm's own generation, behind one function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler

from ..machine.compiling import without_kernels
from ..patches import patched
from .load import Loaded


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 takes the likeliest. The rest as mlx_lm.generate has it."""

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0


def prompt_tokens(
    tokenizer: Any,
    prompt: str,
    *,
    system_prompt: str | None = None,
    prefill_response: str | None = None,
    chat_template: bool = True,
    template_options: dict[str, Any] | None = None,
    images: int = 0,
    videos: Sequence[str] = (),
) -> list[int]:
    """The tokens of a user's `prompt`, through the tokenizer's chat template where it has one and it is wanted.

    images: how many stand before it; the template then writes one image token for each. videos: what is written for
    each of those that stand before it.
    """
    if not (chat_template and tokenizer.has_chat_template):
        return tokenizer.encode(prompt)
    messages: list[dict[str, Any]] = []
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}]
    content: Any = prompt
    if images or videos:
        before = [{"type": "image"}] * images + [{"type": "text", "text": text} for text in videos]
        content = [*before, {"type": "text", "text": prompt}]
    messages.append({"role": "user", "content": content})
    prefilled = prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": str(prefill_response)})
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        continue_final_message=prefilled,
        add_generation_prompt=not prefilled,
        **(template_options or {}),
    )
    return tokenizer.encode(text, add_special_tokens=False)


def stream(loaded: Loaded, prompt: list[int], max_tokens: int, sampling: Sampling) -> Iterator[Any]:
    """mlx-lm's responses one by one: `text`, and on the last one speeds, token counts and `finish_reason`."""
    sampler = make_sampler(temp=sampling.temp, top_p=sampling.top_p, min_p=sampling.min_p, top_k=sampling.top_k)
    # Kernels would take longer to build than an answer takes without, on CUDA in every process.
    with without_kernels(), patched():
        yield from stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=max_tokens, sampler=sampler)
