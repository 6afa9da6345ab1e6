"""The options with which a model answers: those of `generate` and of `chat`."""

from __future__ import annotations

import dataclasses
from typing import Any

from .conditions import ANSWERS, refuse_unread_flags
from .values import Range, fix


def _number(default: Any, **limits: float) -> Any:
    """A field that is a number within these limits."""
    return dataclasses.field(default=default, metadata={"range": Range(**limits)})  # type: ignore[arg-type]


def _text() -> Any:
    """A field that is a text, which may be empty, or None."""
    return dataclasses.field(default=None, metadata={"empty": True})


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """The options with which a model answers, under the names that mlx_lm.generate and mlx_lm.chat give them.

    Raises:
        UserError: If an option has a value that it may not have.
    """

    model: str
    _: dataclasses.KW_ONLY
    adapter_path: str | None = None
    system_prompt: str | None = _text()
    max_tokens: int = _number(100, least=1)
    temp: float = _number(0.0, least=0)
    top_p: float = _number(1.0, above=0, most=1)
    min_p: float = _number(0.0, least=0, most=1)
    top_k: int = _number(0, least=0)
    seed: int | None = _number(None, least=0, most=2**64 - 1)
    chat_template_config: str | None = None
    tools: str | None = None
    extra_eos_token: tuple[str, ...] = ()
    memory: int | None = _number(None, least=1, most=2**63 - 1)
    trust_remote_code: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        fix(self)
        refuse_unread_flags(ANSWERS, self)


@dataclasses.dataclass(frozen=True)
class GenerateOptions(AnswerOptions):
    """The options of `generate`.

    Raises:
        UserError: If an option has a value that it may not have.
    """

    prompt: str
    prefill_response: str | None = _text()
    ignore_chat_template: bool = False
    image: tuple[str, ...] = ()
    video: tuple[str, ...] = ()
    min_pixels: int | None = _number(None, least=1)
    max_pixels: int | None = _number(None, least=1)
    fps: float | None = _number(None, above=0)
    video_max_frames: int | None = _number(None, least=2)
    verbose: bool = True


@dataclasses.dataclass(frozen=True)
class ChatOptions(AnswerOptions):
    """The options of `chat`.

    Raises:
        UserError: If an option has a value that it may not have.
    """

    max_tokens: int = _number(256, least=1)
    compare: bool = False
