"""Opens a .json file of rows: one array of them, or one row a line as in a JSONL file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from .sources import DataTable, Rows, file_digest, jsonl

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def json_file(path: Path) -> DataTable:
    """Open a .json file.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or holds an array that is not JSON.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a readable file.") from error
    if not content.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
        return jsonl(path)
    found = _array(content, path)

    def rows() -> Rows:
        return ((f"{path} row {number}", row) for number, row in enumerate(found, 1))

    return DataTable(str(path), len(found), rows, rows, lambda: file_digest(path))


def _array(content: bytes, path: Path) -> list[Any]:
    """Return the members of the array in a file."""
    try:
        rows = json.loads(content.decode("utf-8-sig"))
        # JSON can hold half of a surrogate pair (\ud83d), which is not a character and has no tokens.
        json.dumps(rows, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}; expected an array of objects."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start}); save the file as UTF-8.") from error
    except UnicodeEncodeError as error:
        raise UserError(f"{path}: a \\u escape is only half of a character; write both halves.") from error
    except RecursionError as error:
        raise UserError(f"{path}: the JSON is nested too deeply; expected an array of flat objects.") from error
    return rows
