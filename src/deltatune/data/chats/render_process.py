"""Renders conversations through chat templates in a process of its own, which limits of time and memory may stop.

A chat template is a program from whoever published the model. Jinja's sandbox keeps it away from files, but not from
looping without end or from filling the memory. rendering.py starts main() in that process. It imports neither
deltatune nor MLX, so it starts in about a second.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

from .chat_rows import Marks, RefusalError, TurnEnds, chat_rows
from .template_probes import REFUSED, Messages, argument_form, calls_tools, with_arguments
from .unwritten import UnwrittenParts

LARGEST_TEXT = 1 << 26
# A process that has had nothing to do for this long ends itself, and frees its memory.
IDLE_SECONDS = 30
_LOOK_SECONDS = 0.1
_REFUSED = (*REFUSED, MemoryError, RuntimeError)


class RenderLimits(NamedTuple):
    """The limits of rendering one conversation: processor time, and bytes beyond those that the process has.

    A single step of Python is stopped after twice this time.
    """

    seconds: float = 10
    memory: int = 2 << 30


class _OvertimeError(RuntimeError):
    """The template has run for too long."""


def _refusal(error: BaseException, limits: RenderLimits) -> str:
    line = getattr(error, "lineno", None)
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    where = f"the model's chat template, line {line}," if line else "the model's chat template"
    stopped = "It was stopped: mend the template, or give the model's folder another chat_template.jinja."
    if isinstance(error, _OvertimeError):
        return f"{where} ran for more than {limits.seconds:g} seconds on this conversation. {stopped}"
    if isinstance(error, MemoryError):
        return f"{where} took more than {limits.memory / (1 << 30):g} GB of memory for this conversation. {stopped}"
    if isinstance(error, RecursionError):
        return f"{where} calls itself without end, or is nested too deeply. {stopped}"
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, KeyError):
        text = f"missing key {text}"
    return f"{where} refuses this conversation: {text}"


@contextlib.contextmanager
def _limited(limits: RenderLimits) -> Iterator[None]:
    """Stop the code inside when it reaches a limit.

    A timer looks every tenth of a second, between two steps of Python. A single step that takes for ever, such as the
    power of large numbers, is stopped by the second timer: its signal ends the process.
    """
    began = time.process_time()
    before = _peak_bytes()

    def look(*_: object) -> None:
        over = time.process_time() - began > limits.seconds
        if over or _peak_bytes() - before > limits.memory:
            signal.setitimer(signal.ITIMER_PROF, 0)
            raise _OvertimeError if over else MemoryError

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _LOOK_SECONDS, _LOOK_SECONDS)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * limits.seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _peak_bytes() -> int:
    """Return the most memory that this process has had; Linux counts it in units of 1,024 bytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(eq=False)
class Template:
    """Writes conversations with the chat template, or the code, of a tokenizer of transformers.

    `thinking` are the tags around the reasoning of its answers. Code is no template and runs without limits, None.
    """

    tokenizer: Any
    options: dict[str, Any]
    marks: Marks
    thinking: Sequence[str] = ()
    limits: RenderLimits | None = None

    def __post_init__(self) -> None:
        self._ends = TurnEnds(self._write, self.marks.ends, self.marks.specials, self.marks.end)
        self._unwritten = UnwrittenParts(self.thinking)
        self._form: str | None = None

    @classmethod
    def of(cls, setup: dict[str, Any], limits: RenderLimits) -> Template:
        """Return the template of a setup, with the special tokens that it may write."""
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        tokenizer = PreTrainedTokenizerBase(**setup["special_tokens"])
        tokenizer.chat_template = setup["template"]
        other = None if "enable_thinking" in setup["template"] else ""
        return cls(tokenizer, setup["options"], Marks(**setup["marks"], other=other), setup["thinking"], limits)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the rows of a conversation, or {"error": a message for the user}; with `options` it is a prompt.

        With `turns`, the parts of it that stand in no row are there, too: each as its kind and its message.
        """
        try:
            rows = self._limited(request)
            if "turns" not in request:
                return {"rows": rows}
            return {"rows": rows, "lost": self._unwritten.of(request, [row[0] for row in rows], self._copied)}
        except RefusalError as error:
            return {"error": str(error)}
        except _REFUSED as error:
            return {"error": _refusal(error, self.limits or RenderLimits())}

    def _copied(self, request: dict[str, Any]) -> str | None:
        try:
            return "\n".join(row[0] for row in self._limited(request))
        except (RefusalError, *_REFUSED):
            return None

    def _limited(self, request: dict[str, Any]) -> list[Any]:
        with contextlib.nullcontext() if self.limits is None else _limited(self.limits):
            return self._rows(request)

    def _rows(self, request: dict[str, Any]) -> list[Any]:
        """Return the rows of a conversation; with `options`, one row without turns, such as a prompt."""
        messages = self.taken(request["messages"])
        tools = request["tools"]
        if "options" in request:
            return [(self._text(messages, tools, self.options | request["options"]), [], len(messages), [])]

        # A turn is looked for in several rows, but rendered once.
        @functools.cache
        def render(count: int, prompt: bool = False, thinking: bool | None = None) -> tuple[str, Any]:
            return self._render(messages[:count], tools, thinking, prompt)

        return chat_rows(messages, request["turns"], request["every_turn"], render, self.marks, self._ends)

    def _render(self, messages: Messages, tools: Any, thinking: bool | None, prompt: bool) -> tuple[str, Any]:
        """Return the text of a conversation, and the spans that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = self.options if thinking is None else self.options | {"enable_thinking": thinking}
        text = self._text(messages, tools, options | {"add_generation_prompt": prompt})
        if not self.marks.blocks or prompt:
            return text, []
        # apply_chat_template gives the spans as tokens alone, of a tokenizer with a vocabulary.
        without_nulls = [{key: value for key, value in message.items() if value is not None} for message in messages]
        texts, spans = render_jinja_template(
            [without_nulls],
            tools=tools,
            chat_template=self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **(self.tokenizer.special_tokens_map | options),
        )
        if texts[0] != text:
            raise RefusalError("the chat template's generation blocks do not fit its text; use --no-mask-prompt.")
        return text, spans[0]

    def _text(self, messages: Messages, tools: Any, options: dict[str, Any]) -> str:
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        if len(text) > LARGEST_TEXT:
            raise RefusalError(f"the model's chat template writes {len(text):,} characters for this conversation.")
        return text

    def taken(self, messages: Messages) -> Messages:
        """Return the messages with the arguments of tool calls in the form that the template takes."""
        if not calls_tools(messages):
            return messages
        if self._form is None:
            self._form = argument_form(self._write)
        return with_arguments(messages, self._form)

    def _write(self, messages: Messages) -> str:
        return self._text(messages, None, self.options)


def main(seconds: str, memory: str) -> None:
    """Answer the requests on standard input until it closes or none has come for IDLE_SECONDS; limits are text."""
    limits = RenderLimits(float(seconds), int(memory))
    replies = Connection(os.dup(1), readable=False)
    requests = Connection(os.dup(0), writable=False)
    # Nothing that a library prints may come between the replies.
    os.dup2(2, 1)
    # The program that started this one handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    templates: dict[str, Template] = {}
    _limit_memory(limits.memory)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while requests.poll(IDLE_SECONDS):
            setups, chunk = json.loads(requests.recv_bytes())
            templates.update({name: Template.of(setup, limits) for name, setup in setups.items()})
            for request in chunk:
                replies.send_bytes(json.dumps(templates[request["template"]].answer(request)).encode())


def _limit_memory(more: int) -> None:
    """Let Linux refuse this process more than `more` bytes beyond its present memory, even in a single step."""
    # transformers would import PyTorch with itself, which templates do not need.
    sys.modules.setdefault("torch", cast(Any, None))
    import transformers.tokenization_utils_base  # noqa: F401  (its memory is not the template's)

    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.getrlimit(resource.RLIMIT_AS)[1]))
