"""Tells the user of columns that say something about an answer which imitating it does not use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...errors import UserError

# Whether an answer is a good one: the column of TRL, and that of LLaMA-Factory.
_JUDGED = ("label", "kto_tag")
_ALIKE = "good and bad answers are imitated alike; remove the bad ones"
_PAIRS = "only the answer beside them is imitated; --loss dpo learns from pairs of prompt, chosen and rejected"
_JUDGEMENT = "if it tells good answers from bad ones, --loss kto learns from it, and without it both are imitated"
_SOUND = "sound is not read"
_COLUMNS = {
    **dict.fromkeys(_JUDGED, _JUDGEMENT),
    **dict.fromkeys(("score", "reward", "rating"), _ALIKE),
    **dict.fromkeys(("chosen", "rejected"), _PAIRS),
    **dict.fromkeys(("audio", "audios"), _SOUND),
    "weight": "every row counts alike",
    "system": "it is read beside conversations and instruction alone; make it the first message",
}
TOOLS, MARKED_TURNS = "tools", "marked turns"
# What notes say that rows have, by what RowFormats.unread calls it.
MEANINGS = {name: f"{name!r}: {meaning}" for name, meaning in _COLUMNS.items()} | {
    TOOLS: f"{TOOLS!r}, which the model's chat template leaves out, so they are not learnt",
    MARKED_TURNS: "turns that are marked not to count, which --no-mask-prompt counts all the same",
}


def refuse_judged(row: Mapping[str, Any], read: Collection[str], source: str) -> None:
    """Refuse a row whose answer is marked as a bad one: imitation would learn it like a good one.

    Args:
        row: the row.
        read: the columns that are read as parts of the conversation.
        source: what messages to the user call the row.

    Raises:
        UserError: the row says that its answer is bad.
    """
    for name in _JUDGED:
        value = None if name in read else row.get(name)
        # A cell of a CSV file is text. Numbers may be classes, which a note tells of.
        if value is False or (isinstance(value, str) and value.strip().lower() == "false"):
            raise UserError(
                f"{source}: {name!r} is false: this is a bad answer, and it would be imitated. To learn from good and "
                'bad answers, give --loss kto and lines of {"prompt": ..., "completion": ..., "label": true or '
                "false}; to imitate the good ones, remove this row."
            )


def unread(row: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Return the columns of a row that have a meaning and are not read, beside those in `read`."""
    present = [name for name in _COLUMNS if name in row and name not in read and row[name] not in (None, "", [])]
    return [name for name in present if not (name in _JUDGED and _is_true(row[name]))]


def _is_true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.strip().lower() == "true")
