"""Finds the rows of a conversation: the fewest texts in which each turn stands as the model generates it.

render_process.py runs this file without deltatune, so it imports nothing but its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from .template_probes import Messages, Write, behind_an_answer, behind_the_last_answer, first_of

# White space that templates put behind an end token is shorter than this.
_LOOK_BACK = 200
Render = Callable[..., tuple[str, list[list[int]]]]
# A row: its text, the (starts, end) of each turn that counts, its number of messages, and those of the starts that are
# behind a prompt with the other value of enable_thinking.
Row = tuple[str, list[Any], int, list[int]]


class RefusalError(Exception):
    """A conversation that cannot be rendered; the message goes to the user, behind the name of the row."""


@dataclass
class Marks:
    """The properties of a template and its tokenizer on which the rows of a conversation depend.

    Tokens are given as they are written: `specials`, with one of which some templates end a conversation; `ends`, at
    which generation stops; `end`, which ends a text, "" for none; and `added`, which are cut out of a text before
    anything else, so that nothing merges with them. With `blocks` the template marks generated text with
    {% generation %}. `thinking` is the value of enable_thinking, and `other` the text that the prompt with the other
    value has after the prompt with this one; None where it is not known yet, or not so simple.
    """

    specials: Sequence[str]
    ends: Sequence[str]
    end: str
    added: Sequence[str]
    blocks: bool
    thinking: bool
    other: str | None = None


class TurnEnds:
    """The ends of turns in the texts of one template, which `write` renders and may refuse.

    GLM-4.5 ends a turn by the marker of the next role, which is a token at which generation stops. So it is part of the
    turn, and behind the last turn it is added, as in TRL's template for that model. Where a template marks no end at
    all, the token `added` is put behind the last turn, "" for none.
    """

    def __init__(self, write: Write, ends: Sequence[str], specials: Sequence[str], added: str):
        self._write = write
        self._added = added
        self._ends = tuple(filter(None, ends))
        self._specials = tuple(filter(None, specials))
        self._missing = cache(self._found_missing)

    def closed(self, text: str, message: dict[str, Any]) -> str:
        """Return a conversation's text with the token that ends its last message; a prompt stays as it is."""
        if message["role"] != "assistant" or self._ends_with(self._ends, text, len(text)):
            return text
        missing = self._missing(bool(message.get("tool_calls")))
        if missing is None:
            missing = "" if self._ends_with(self._specials, text, len(text)) else self._added
        return text + missing

    def within(self, text: str, end: int) -> int:
        """Return where a turn ends that the template ends at `end`: behind the end token there, if it has no other."""
        if self._ends_with(self._ends, text, end):
            return end
        return end + len(next((token for token in self._ends if text.startswith(token, end)), ""))

    def _found_missing(self, tools: bool) -> str | None:
        """Return the end token missing behind a last answer, "" if none is; None if the template does not show it."""
        tail = behind_the_last_answer(self._write, tools=tools)
        follows = first_of(self._ends, behind_an_answer(self._write, tools=tools) or "")
        if tail is None:
            return follows
        if first_of(self._ends, tail):
            return ""
        return follows or ("" if first_of(self._specials, tail) else self._added)

    def _ends_with(self, tokens: tuple[str, ...], text: str, end: int) -> bool:
        return text[max(end - _LOOK_BACK, 0) : end].rstrip().endswith(tokens)


def chat_rows(
    messages: Messages, turns: list[int] | None, every_turn: bool, render: Render, marks: Marks, ends: TurnEnds
) -> list[Row]:
    """Render a conversation as the fewest rows in which each turn stands as it is generated.

    The first row is the whole conversation. A turn counts there if the row begins with the turn's prompt, followed by
    the turn as the template writes it when it is the last one. Templates that drop earlier reasoning write some turns
    differently once others follow. The last of these gets a row that ends with it, in which more of them may count; and
    so on. Kimi K2 Thinking's writes even the messages before an answer differently once the answer is there; that
    answer is put behind its prompt; a RefusalError says that it does not begin with it.

    `turns` counts messages from 0; None counts the whole text. With `every_turn`, which says that these are all of the
    assistant's, {% generation %} blocks may choose instead. `render` returns the text of the first messages and the
    spans of these blocks. Of several starts of a turn in a row, the first with fitting tokens is meant.
    """
    count = len(messages)
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    written = _row_render((answers if turns is None else turns)[-1:], render, marks)
    text, generated = written(count)
    if not text:
        return [(text, [], count, [])]
    if turns is None:
        text = ends.closed(text, messages[-1])
        return [(text, [([0], len(text))], count, [])]
    if marks.blocks and every_turn:
        behind_other = {_starts(text, turn, render, marks)[1] for turn in turns if turn}
        text = ends.closed(text, messages[-1])
        spans = [([start], ends.within(text, end)) for start, end in generated]
        return [(text, spans, count, [start for start, _ in generated if start in behind_other])]
    rows: list[Row] = []
    # Without a turn that counts, the row is returned all the same: its source is named in a message.
    while turns or not rows:
        others: list[int] = []
        if turns and count == turns[-1] + 1:
            text = ends.closed(text, messages[turns[-1]])
            if not _starts(text, turns[-1], render, marks)[0]:
                text = _behind_its_prompt(text, turns[-1], render, marks)
        span_of = {turn: _span(text, (count, others), turn, (render, written), marks, ends) for turn in turns}
        counted = [(turn, span) for turn, span in span_of.items() if span is not None]
        if counted or not turns:
            rows.append((text, [span for _, span in counted], count, others))
        turns = [turn for turn in turns if span_of[turn] is None]
        if turns:
            count = turns[-1] + 1
            written = _row_render(turns[-1:], render, marks)
            text = written(count)[0]
    return rows[::-1]


def _row_render(last: list[int], render: Render, marks: Marks) -> Render:
    """Return the render function for a row that ends with this turn: its enable_thinking gives a prompt that begins the
    row.

    Most templates write the same row with both values. Qwen3.8's writes another system message with each, so its prompt
    without thinking begins no row with thinking.
    """
    other = not marks.thinking
    for turn in filter(None, last):
        text = render(turn + 1)[0]
        prompt = render(turn, prompt=True)[0]
        begins = text.startswith(prompt)
        if begins and (prompt.endswith(tuple(marks.added)) or not _may_merge(text, len(prompt), marks)):
            break
        otherwise = render(turn + 1, thinking=other)[0]
        other_prompt = render(turn, prompt=True, thinking=other)[0]
        # An answer is longer behind its prompt where the template opens reasoning that is not there.
        shorter = len(otherwise) - len(other_prompt) < len(text) - len(prompt)
        if otherwise != text and otherwise.startswith(other_prompt) and (shorter or not begins):
            return partial(render, thinking=other)
    return render


def _span(
    text: str, row: tuple[int, list[int]], turn: int, renders: tuple[Render, Render], marks: Marks, ends: TurnEnds
) -> tuple[list[int], int] | None:
    """Return where a turn starts and ends in a row, of so many messages; None if it is written otherwise there.

    The two functions render with the default value of enable_thinking, and with the row's. The start behind a prompt
    with the other value goes to the list in `row`, too.
    """
    count, others = row
    render, written = renders
    starts, other = _starts(text, turn, render, marks)
    if not starts:
        return None
    end = len(text)
    if count > turn + 1:
        behind = _end(text, written(turn + 1)[0], marks)
        if behind is None or behind <= starts[0]:
            return None
        end = ends.within(text, behind)
    others += [] if other is None else [other]
    return starts, end


def _starts(text: str, turn: int, render: Render, marks: Marks) -> tuple[list[int], int | None]:
    """Return where a turn may start in a text, and which of that is behind the other prompt, if one is."""
    if turn == 0:
        raise RefusalError(
            "message 1: the conversation begins with an assistant turn, so there is no prompt to leave out; put a user "
            'message before it, or "weight": 0 on it to leave it out of the loss.'
        )
    prompt = render(turn, prompt=True)[0]
    starts = [len(prompt)] if text.startswith(prompt) else []
    if not starts or _may_merge(text, len(prompt), marks):
        other = render(turn, prompt=True, thinking=not marks.thinking)[0]
        marks.other = other[len(prompt) :] if other.startswith(prompt) else None
        if other != prompt and text.startswith(other):
            return [*starts, len(other)], len(other)
    return starts, None


def _may_merge(text: str, start: int, marks: Marks) -> bool:
    """Whether the answer's first token could merge with its prompt, so that the other prompt is meant."""
    if marks.other == "" or text.startswith(tuple(marks.added), start):
        return False
    return marks.other is None or text.startswith(marks.other, start)


def _end(text: str, alone: str, marks: Marks) -> int | None:
    """Return where a turn ends in a row that goes on; None if the row does not begin with the turn as it is `alone`.

    A special token that ends a conversation is missing after a turn within it, or another end token stands there.
    """
    without_closing = alone
    while not text.startswith(without_closing):
        closing = next((token for token in marks.specials if token and without_closing.endswith(token)), None)
        if closing is None:
            return None
        without_closing = without_closing[: -len(closing)]
    if without_closing == alone or without_closing.rstrip().endswith(tuple(marks.specials)):
        return len(without_closing)
    other = next((token for token in marks.ends if text.startswith(token, len(without_closing))), None)
    return None if other is None else len(without_closing) + len(other)


def _behind_its_prompt(text: str, turn: int, render: Render, marks: Marks) -> str:
    """Return the prompt of a turn, followed by the turn as it ends `text`; RefusalError if it is not found there."""
    before = render(turn)[0]
    for thinking in (None, not marks.thinking):
        prompt = render(turn, prompt=True, thinking=thinking)[0]
        opening = prompt.removeprefix(before)
        if opening != prompt and opening and opening in text:
            return prompt + text[text.rindex(opening) + len(opening) :]
    raise RefusalError(_not_a_prompt(turn, render(turn, prompt=True)[0], text))


def _not_a_prompt(turn: int, prompt: str, text: str) -> str:
    different = (index for index, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1])
    at = next(different, min(len(prompt), len(text)))
    before, after = (whole[max(at - 20, 0) : at + 20] for whole in (prompt, text))
    return (
        f"message {turn + 1}: the chat template writes the conversation before this answer differently from the prompt "
        f"that the answer is generated from ({before!r} became {after!r}), so it would be trained on in a context that "
        'the model never meets. Put "weight": 0 on this message to leave it out of the loss, or use --no-mask-prompt '
        "to train on every token."
    )
