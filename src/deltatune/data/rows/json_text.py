"""Reads JSON out of a file of rows: a line of it, or the whole file; a mistake is named by its line and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import UserError


def parsed(raw: bytes, path: Path, line: int | None = None, *, expected: str) -> tuple[Any] | None:
    """Return the value that bytes of a file hold, alone in a tuple, or None if they are blank.

    Args:
        raw: The bytes; at the start of the file they may begin with a byte order mark.
        path: The file.
        line: The number of the line that they are, or None if they are the whole file.
        expected: The expected JSON, for messages.

    Raises:
        UserError: They are not UTF-8, or not JSON, or hold half of a character.
    """
    where, first = (str(path), 1) if line is None else (f"{path}:{line}", line)
    try:
        text = raw.decode("utf-8-sig" if first == 1 else "utf-8")
    except UnicodeDecodeError as error:
        # The decoder's own bytes begin behind a byte order mark.
        before = error.object[: error.start].decode().split("\n")
        raise UserError(
            f"{path}:{first + len(before) - 1}: not UTF-8 (byte {error.object[error.start]:#04x} at column "
            f"{len(before[-1]) + 1}); save the file as UTF-8."
        ) from error
    # Behind a line break, the parser would count columns from the start of the next line.
    text = text.rstrip()
    if not text:
        return None
    try:
        value = json.loads(text)
        # JSON can hold half of a surrogate pair (\ud83d), which is not a character and has no tokens.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{first + error.lineno - 1}: not JSON: {error.msg} at column {error.colno}; expected {expected}."
        ) from error
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: a \\u escape is only half of a character ({error.reason}); write both halves."
        ) from error
    except RecursionError as error:
        raise UserError(f"{where}: the JSON is nested too deeply; expected {expected}.") from error
    except ValueError as error:
        # Python refuses whole numbers of more than 4,300 digits.
        raise UserError(f"{where}: not JSON that can be read: {error}; write such a number as text.") from error
    return (value,)
