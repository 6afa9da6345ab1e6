"""Renders conversations through chat templates in a process of its own, which limits of time and memory may stop.

A chat template is a program from whoever published the model. Jinja's sandbox keeps it away from files, but not from
looping without end or from filling the memory. rendering.py starts this file as a script. It imports neither deltatune
nor MLX, so it starts in about a second.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

LARGEST_TEXT = 1 << 26
# A process that has had nothing to do for this long ends itself, and frees its memory.
IDLE_SECONDS = 30
_LOOK_SECONDS = 0.1

Messages = list[dict[str, Any]]
Render = Callable[..., tuple[str, list[list[int]]]]


class RenderLimits(NamedTuple):
    """What rendering one conversation may take.

    Args:
        seconds: processor time; a single step of Python is stopped after twice this time.
        memory: bytes beyond those that the process has.
    """

    seconds: float = 10
    memory: int = 2 << 30


class RefusalError(Exception):
    """A conversation that cannot be rendered; the message goes to the user, behind the name of the row."""


class _OvertimeError(RuntimeError):
    """The template has run for too long."""


@dataclass
class Marks:
    """What a template and its tokenizer are known by, as far as the rows of a conversation depend on it.

    Args:
        specials: the special tokens as they are written, of which some templates end a conversation with one.
        ends: the tokens at which generation stops, as they are written.
        added: the tokens that are cut out of a text before anything else, so that nothing merges with them.
        blocks: whether the template marks what is generated with {% generation %} blocks.
        plain: what the prompt of a model that does not think has after the prompt of one that thinks; "" if it is the
            same prompt, and None if it is not known yet or not so simple.
    """

    specials: Sequence[str]
    ends: Sequence[str]
    added: Sequence[str]
    blocks: bool
    plain: str | None = None


def chat_rows(
    messages: Messages, turns: list[int], every_turn: bool, render: Render, marks: Marks
) -> list[tuple[str, list[Any], int]]:
    """Render a conversation as the fewest rows in which each turn stands as it is generated.

    The first row is the whole conversation. A turn counts there if the row begins with the turn's prompt, followed by
    the turn as the template writes it when it is the last one. Templates that drop earlier reasoning write some turns
    differently once others follow. The last of these gets a row that ends with it, in which more of them may count;
    and so on. Kimi K2 Thinking's writes even the messages before an answer differently once the answer is there; that
    answer is put behind its prompt.

    Args:
        messages: the conversation.
        turns: the numbers of the messages that count in the loss.
        every_turn: whether these are all of the assistant's turns, so that {% generation %} blocks may choose instead.
        render: renders the first messages; returns the text and the spans of the {% generation %} blocks.
        marks: what is known of the template.

    Returns:
        For each row: its text, the (starts, end) of each turn that counts, and how many messages it has. Of several
        starts, the first whose tokens fit is meant.

    Raises:
        RefusalError: an answer does not begin with its prompt.
    """
    count = len(messages)
    text, generated = render(count)
    if not text:
        return [(text, [], count)]
    if marks.blocks and every_turn:
        return [(text, [([start], end) for start, end in generated], count)]
    rows: list[tuple[str, list[Any], int]] = []
    # Without a turn that counts, the row is returned all the same: its source is named in a message.
    while turns or not rows:
        if turns and count == turns[-1] + 1 and _span(text, count, turns[-1], render, marks) is None:
            text = _behind_its_prompt(text, turns[-1], render)
        spans = {turn: _span(text, count, turn, render, marks) for turn in turns}
        counted = [(turn, span) for turn, span in spans.items() if span is not None]
        if counted or not turns:
            rows.append((text, [span for _, span in counted], count))
        turns = [turn for turn in turns if spans[turn] is None]
        if turns:
            count = turns[-1] + 1
            text = render(count)[0]
    return rows[::-1]


def _span(text: str, count: int, turn: int, render: Render, marks: Marks) -> tuple[list[int], int] | None:
    """Return where a turn starts and ends in the row of the first `count` messages; None if it is written otherwise."""
    if turn == 0:
        raise RefusalError(
            "message 1: the conversation begins with an assistant turn, so there is no prompt to leave out; put a user "
            'message before it, or "weight": 0 on it to leave it out of the loss.'
        )
    prompt = render(turn, prompt=True)[0]
    starts = [len(prompt)] if text.startswith(prompt) else []
    if not starts or _may_merge(text, len(prompt), marks):
        plain = render(turn, prompt=True, thinking=False)[0]
        marks.plain = plain[len(prompt) :] if plain.startswith(prompt) else None
        if plain != prompt and text.startswith(plain):
            starts.append(len(plain))
    if not starts:
        return None
    if count == turn + 1:
        return starts, len(text)
    end = _end(text, render(turn + 1)[0], marks)
    return None if end is None or end <= starts[0] else (starts, end)


def _may_merge(text: str, start: int, marks: Marks) -> bool:
    """Whether the answer's first token could merge with its prompt, so that the prompt without thinking is meant."""
    if marks.plain == "" or text.startswith(tuple(marks.added), start):
        return False
    return marks.plain is None or text.startswith(marks.plain, start)


def _end(text: str, alone: str, marks: Marks) -> int | None:
    """Return where a turn ends in a row that goes on; None if the row does not begin with the turn as it is `alone`.

    A special token that ends a conversation is missing after a turn within it, or another end token stands there.
    """
    kept = alone
    while not text.startswith(kept):
        closing = next((token for token in marks.specials if token and kept.endswith(token)), None)
        if closing is None:
            return None
        kept = kept[: -len(closing)]
    if kept == alone or kept.rstrip().endswith(tuple(marks.specials)):
        return len(kept)
    other = next((token for token in marks.ends if text.startswith(token, len(kept))), None)
    return None if other is None else len(kept) + len(other)


def _behind_its_prompt(text: str, turn: int, render: Render) -> str:
    """Return the prompt of a turn, followed by the turn as it ends `text`; RefusalError if it is not found there."""
    before = render(turn)[0]
    for thinking in (None, False):
        prompt = render(turn, prompt=True, thinking=thinking)[0]
        opening = prompt.removeprefix(before)
        if opening != prompt and opening and opening in text:
            return prompt + text[text.rindex(opening) + len(opening) :]
    raise RefusalError(_not_a_prompt(turn, render(turn, prompt=True)[0], text))


def _not_a_prompt(turn: int, prompt: str, text: str) -> str:
    """Return the message for an answer that does not begin with its prompt, not even where it is the last message."""
    different = (index for index, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1])
    at = next(different, min(len(prompt), len(text)))
    before, after = (whole[max(at - 20, 0) : at + 20] for whole in (prompt, text))
    return (
        f"message {turn + 1}: the chat template writes the conversation before this answer differently from the prompt "
        f"that the answer is generated from ({before!r} became {after!r}), so it would be trained on in a context that "
        'the model never meets. Put "weight": 0 on this message to leave it out of the loss, or use --no-mask-prompt '
        "to train on every token."
    )


def _refusal(error: BaseException, limits: RenderLimits) -> str:
    """Return the message for a template that raised an error, with the line of the template."""
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
    """Stop what runs inside when it reaches a limit.

    A timer looks every tenth of a second, between two steps of Python. A single step that takes for ever, such as the
    power of large numbers, is stopped by the second timer, whose signal ends the process.
    """
    began, before = time.process_time(), _peak_bytes()

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


class _Template:
    """A chat template with the special tokens that it may write, rendered by transformers."""

    def __init__(self, setup: dict[str, Any]):
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        self._text: str = setup["template"]
        self._options: dict[str, Any] = setup["options"]
        self._specials: dict[str, Any] = setup["special_tokens"]
        self._tokenizer = PreTrainedTokenizerBase(**self._specials)
        self._tokenizer.chat_template = self._text
        self.marks = Marks(**setup["marks"])
        if "enable_thinking" not in self._text:
            self.marks.plain = ""

    def render(self, messages: Messages, tools: Any, thinking: bool | None, prompt: bool) -> tuple[str, Any]:
        """Return the text of a conversation, and the spans that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = self._options if thinking is None else self._options | {"enable_thinking": thinking}
        text = self.text(messages, tools, options | {"add_generation_prompt": prompt})
        if not self.marks.blocks or prompt:
            return text, []
        # apply_chat_template gives the spans as tokens alone, of a tokenizer with a vocabulary.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        texts, spans = render_jinja_template(
            [given],
            tools=tools,
            chat_template=self._text,
            return_assistant_tokens_mask=True,
            **(self._specials | options),
        )
        if texts[0] != text:
            raise RefusalError("the chat template's generation blocks do not fit its text; use --no-mask-prompt.")
        return text, spans[0]

    def text(self, messages: Messages, tools: Any, options: dict[str, Any]) -> str:
        """Return the text of a conversation."""
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        if len(text) > LARGEST_TEXT:
            raise RefusalError(f"the model's chat template writes {len(text):,} characters for this conversation.")
        return text

    def rows(self, request: dict[str, Any]) -> list[Any]:
        """Return the rows of a conversation; without `turns`, one row that counts as a whole, or not with `options`."""
        messages, tools = request["messages"], request["tools"]
        if "options" in request:
            return [(self.text(messages, tools, self._options | request["options"]), [], len(messages))]

        # A turn is looked for in several rows, but rendered once.
        @functools.cache
        def render(count: int, prompt: bool = False, thinking: bool | None = None) -> tuple[str, Any]:
            return self.render(messages[:count], tools, thinking, prompt)

        if request["turns"] is None:
            text = render(len(messages))[0]
            return [(text, [([0], len(text))], len(messages))]
        return chat_rows(messages, request["turns"], request["every_turn"], render, self.marks)


def answer(templates: dict[str, _Template], request: dict[str, Any], limits: RenderLimits) -> dict[str, Any]:
    """Return {"rows": ...}, or {"error": a message for the user}."""
    import jinja2

    template = templates[request["template"]]
    try:
        with _limited(limits):
            return {"rows": template.rows(request)}
    except RefusalError as error:
        return {"error": str(error)}
    except (
        ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
        jinja2.TemplateError,
    ) as error:  # fmt: skip
        return {"error": _refusal(error, limits)}


def main(limits: RenderLimits) -> None:
    """Answer the requests on standard input until it closes or none has come for IDLE_SECONDS."""
    replies, requests = Connection(os.dup(1), readable=False), Connection(os.dup(0), writable=False)
    # Nothing that a library prints may come between the replies.
    os.dup2(2, 1)
    # The program that started this one handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    templates: dict[str, _Template] = {}
    _limit_memory(limits.memory)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while requests.poll(IDLE_SECONDS):
            setups, chunk = json.loads(requests.recv_bytes())
            templates.update({name: _Template(setup) for name, setup in setups.items()})
            for request in chunk:
                replies.send_bytes(json.dumps(answer(templates, request, limits)).encode())


def _limit_memory(more: int) -> None:
    """Let Linux refuse this process more than `more` bytes beyond what it has, even in a single step."""
    # transformers would import PyTorch with itself, which templates do not need.
    sys.modules.setdefault("torch", cast(Any, None))
    import transformers.tokenization_utils_base  # noqa: F401  (its memory is not the template's)

    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main(RenderLimits(float(sys.argv[1]), int(sys.argv[2])))
