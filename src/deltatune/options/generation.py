"""The options with which a model answers: those of `generate`, of `chat`, and of `eval` for tasks of lm-eval."""

from __future__ import annotations

import dataclasses
from functools import partial

from ..errors import UserError
from .conditions import ANSWERS, TASKS, refuse_unread_flags
from .values import COUNT, NOT_NEGATIVE, POSITIVE, Range, fix, option

_PIXELS = "area of an image or frame, in pixels; default: as the adapter was trained, else the model's own"
_answer = partial(option, "answers", negated=False)


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """The options with which a model answers, under the names that mlx_lm.generate and mlx_lm.chat give them."""

    model: str
    _: dataclasses.KW_ONLY
    adapter_path: str | None = None
    system_prompt: str | None = _answer(None, "system message that goes before the prompt", empty=True)
    max_tokens: int = _answer(100, "largest number of tokens in the answer", short="-m", range=COUNT)
    temp: float = _answer(0.0, "sampling temperature; 0 always takes the likeliest token", range=NOT_NEGATIVE)
    top_p: float = _answer(
        1.0, "sample from the likeliest tokens whose probabilities sum to this", range=Range(above=0, most=1)
    )
    min_p: float = _answer(
        0.0, "leave out tokens below this share of the likeliest one's probability", range=Range(least=0, most=1)
    )
    top_k: int = _answer(0, "sample from this number of the likeliest tokens; 0 means all", range=NOT_NEGATIVE)
    seed: int | None = _answer(None, "seed of the sampling", range=Range(least=0, most=2**64 - 1))
    chat_template_config: str | None = _answer(
        None,
        'variables of the chat template, such as {"enable_thinking": false}; default: those of the adapter',
        metavar="JSON",
    )
    tools: str | None = _answer(
        None, "tools that the chat template describes to the model, as OpenAI lists them", metavar="FILE.json"
    )
    extra_eos_token: tuple[str, ...] = _answer((), "further tokens that end the answer")
    draft: bool = _answer(
        False, "let the multi-token-prediction head draft tokens, which the model then checks: the same answer, sooner"
    )
    memory: int | None = _answer(
        None,
        "size, such as 12GB, of the arrays that may be held: layers that do not fit stay on the disk and are read for "
        "every token, which is slow",
        range=Range(least=1, most=2**63 - 1, size=True),
    )
    trust_remote_code: bool = _answer(False, "allow code that comes with the model or its tokenizer to run")
    force: bool = _answer(False, "answer although a function that results depend on runs upstream's code")

    def __post_init__(self) -> None:
        fix(self)
        refuse_unread_flags(ANSWERS, self)


@dataclasses.dataclass(frozen=True)
class GenerateOptions(AnswerOptions):
    """The options of `generate`; an AnswerOptions checks them."""

    prompt: str = _answer(
        dataclasses.MISSING,
        "the user's message; - reads it from standard input; it may be empty beside --image or --video, as behind the "
        "pictures of captions",
        short="-p",
        empty=True,
    )
    prefill_response: str | None = _answer(None, "text with which the answer begins", empty=True)
    ignore_chat_template: bool = _answer(False, "give the prompt to the model without a chat template")
    image: tuple[str, ...] = _answer(
        (), "images to put before the prompt, for a model with a vision tower", metavar="FILE"
    )
    video: tuple[str, ...] = _answer(
        (), "videos to put before the prompt, or images that are the frames of one video", metavar="FILE"
    )
    min_pixels: int | None = _answer(None, f"smallest {_PIXELS}", range=COUNT)
    max_pixels: int | None = _answer(None, f"largest {_PIXELS}", range=COUNT)
    fps: float | None = _answer(None, "frames per second to take from --video; default: as for pixels", range=POSITIVE)
    video_max_frames: int | None = _answer(
        None, "largest number of frames to take from --video; default: as for pixels", range=Range(least=2)
    )
    verbose: bool = _answer(True, "whether to print speeds after the answer: true or false", flag=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.prompt.strip() or self.image or self.video):
            raise UserError(f"--prompt: expected text in UTF-8 that is not empty, got {self.prompt!r}.")


@dataclasses.dataclass(frozen=True)
class ChatOptions(AnswerOptions):
    """The options of `chat`; an AnswerOptions checks them."""

    compare: bool = _answer(False, "ask the base too, and print its answers first")
    max_tokens: int = _answer(256, "largest number of tokens in the answer", short="-m", range=COUNT)


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """The options of `eval` for tasks of lm-eval, under the names that `lm_eval` gives them."""

    tasks: str | None = _answer(None, "names or patterns of tasks, separated by commas, such as arc_easy,hellaswag")
    num_fewshot: int | None = _answer(
        None, "number of examples in a prompt; default: the task's own", range=NOT_NEGATIVE
    )
    limit: int | None = _answer(None, "number of questions of each task to ask; default: all", range=COUNT)
    apply_chat_template: bool = _answer(False, "ask through the model's chat template")
    include_path: str | None = _answer(None, "folder with task files of your own", metavar="DIR")

    def __post_init__(self) -> None:
        fix(self)
        refuse_unread_flags(TASKS, self)
