"""Reads the marks of turns, refuses keys and tells of columns that are not read: they would be lost silently."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...errors import UserError
from ...options.values import nearest

# The keys of a part of a message that is text.
TEXT_KEYS = ("type", "text")

# Marks that leave a turn of a conversation out of the loss.
WEIGHT = "weight"
# OpenAI and Mistral; LLaMA-Factory; axolotl, twice; ms-swift and xtuner. A false or 0 leaves the turn out.
_LEARNT = (WEIGHT, "loss_weight", "train", "training", "loss")
# torchtune: a true leaves the turn out.
_MASKED = "masked"
# axolotl's marks of parts of a turn.
_PARTS = ("train_detail", "training_detail")
MARKS = (*_LEARNT, _MASKED, *_PARTS)
# Whether an answer is a good one: the column of TRL, and that of LLaMA-Factory.
_JUDGED = ("label", "kto_tag")
_ALIKE = "good and bad answers are imitated alike; remove the bad ones"
_PAIRS = "only the answer beside them is imitated; --loss dpo learns from pairs of prompt, chosen and rejected"
_JUDGEMENT = "if it tells good answers from bad ones, --loss kto learns from it, and without it both are imitated"
_SOUND = "sound is not read"
_VARIABLE = "it is read within chat_template_kwargs alone"
_PART_OPTION = "it is read in the part of an image alone"
_AUDIO = ("audio", "audios")
_OBJECTS = "objects"
_COLUMNS = {
    **dict.fromkeys(_JUDGED, _JUDGEMENT),
    **dict.fromkeys(("score", "reward", "rating"), _ALIKE),
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "rejected_messages"), _PAIRS),
    **dict.fromkeys(_AUDIO, _SOUND),
    **dict.fromkeys(("documents", "enable_thinking", "reasoning_effort"), _VARIABLE),
    **dict.fromkeys(("min_pixels", "max_pixels", "resized_height", "resized_width"), _PART_OPTION),
    _OBJECTS: "boxes are learnt only where they stand in the text",
    "weight": "every row counts alike",
    "system": "it is read beside conversations and instruction alone; make it the first message",
}
TOOLS = "tools"
MARKED_TURNS = "marked turns"
MARKS_IN_TEXT = "marks in text"
# Notes on columns and marks, by their keys in RowFormats.unread.
MEANINGS = {name: f"{name!r}: {meaning}" for name, meaning in _COLUMNS.items()} | {
    MARKED_TURNS: "turns that are marked not to count, which --no-mask-prompt counts all the same",
    MARKS_IN_TEXT: "<image> or <video> in a text, and no image or video left for it, so it is learnt as text",
}
# Marks that ms-swift writes in a text in place of the next box or name of "objects", and of the next sound.
_MARKS = {_OBJECTS: ("<bbox>", "<ref-object>"), **dict.fromkeys(_AUDIO, ("<audio>",))}
MEDIA = ("image", "images", "video", "videos", *_AUDIO)


def is_absent(value: Any) -> bool:
    """Whether a value is none: null, or an empty text, list or object, as programs write for keys that they leave."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def refuse_unknown_keys(part: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise a UserError for a filled key of a part of a message, or of an image's object, that is not `known`."""
    for key in part:
        if key not in known and not is_absent(part[key]):
            raise UserError(
                f"{where}: unknown key {str(key)[:60]!r}{nearest(str(key), list(known))}: it is not read; expected "
                f"{', '.join(known)}. Remove it."
            )


def refuse_judged(row: Mapping[str, Any], read: Collection[str], source: str) -> None:
    """Refuse, with a UserError, a row that marks its answer as a bad one, in a column beside those in `read`."""
    for name in _JUDGED:
        # A cell of a CSV file is text. Numbers may be classes, which a note tells of.
        if name not in read and _written(row.get(name)) == "false":
            raise UserError(
                f"{source}: {name!r} is false: this is a bad answer, and it would be imitated. To learn from good and "
                'bad answers, give --loss kto and lines of {"prompt": ..., "completion": ..., "label": true or '
                "false}; to imitate the good ones, remove this row."
            )


def refuse_unread_marks(row: Mapping[str, Any], messages: Iterable[Mapping[str, Any]], source: str) -> None:
    """Refuse, with a UserError, marks in a row's texts for the values of a column that is not read, and media of a
    message.

    Such marks would be learnt as text.
    """
    for number, message in enumerate(messages, 1):
        for name, marks in _MARKS.items():
            mark = next((mark for mark in marks if mark in text_of(message.get("content"))), None)
            if mark and not _is_empty(row.get(name)):
                raise UserError(
                    f"{source}: message {number}: {mark} stands for a value of {name!r}, which is not read, so the "
                    "mark would be learnt as text; write the value into the text, or leave the column out."
                )
        for name in MEDIA:
            if not _is_empty(message.get(name)):
                raise UserError(
                    f"{source}: message {number}: {name!r} is not read in a message; give it beside the messages, or "
                    "as a part of the message's content."
                )


def text_of(content: Any) -> str:
    """Return the text of a message's content, which may stand in parts around pictures."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))


def _is_empty(value: Any) -> bool:
    """Whether a value is absent, or an object of nothing but absent ones, as Arrow fills in for rows without it."""
    return is_absent(value) or (isinstance(value, Mapping) and all(_is_empty(part) for part in value.values()))


def unread(row: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Return the columns of a row that have a meaning and are not read, beside those in `read`."""
    present = [name for name in _COLUMNS if name in row and name not in read and not _is_empty(row[name])]
    return [name for name in present if not (name in _JUDGED and _written(row[name]) == "true")]


def _written(value: Any) -> str:
    return str(value).strip().lower()


def counts(message: Mapping[str, Any], number: int, source: str) -> bool:
    """Return whether a message of the assistant, `number` of its conversation, counts in the loss: no mark denies it.

    A mark with a value that says neither, or of parts of a turn, is refused by a UserError.
    """
    marks = {name: message[name] for name in MARKS if message.get(name) is not None}
    for name, value in marks.items():
        where = f"{source}: message {number}"
        if name in _PARTS:
            raise UserError(
                f"{where}: {name!r} marks parts of a turn, which are not told apart; mark whole messages "
                f'with "{WEIGHT}": 0.'
            )
        if value not in (0, 1):
            expected = "0 or 1" if "weight" in name else "true or false"
            raise UserError(f'{where}: expected "{name}" {expected}, got {value!r}.')
    return all(bool(value) != (name == _MASKED) for name, value in marks.items())


def unmarked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the assistant that does not count, whatever its own marks say."""
    return {name: value for name, value in message.items() if name not in MARKS} | {WEIGHT: 0}
