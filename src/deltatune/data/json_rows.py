"""Opens a .json file of rows: one array of them, or one row a line as in a JSONL file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UserError
from .json_text import parsed
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
    found: list[Any] = parsed(content, path, expected="an array of objects")[0]  # type: ignore[index]

    def rows() -> Rows:
        return ((f"{path} row {number}", row) for number, row in enumerate(found, 1))

    return DataTable(str(path), len(found), rows, rows, lambda: file_digest(path))
