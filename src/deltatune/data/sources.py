"""Where rows come from: JSONL files, and data sets on the Hugging Face hub or on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line

Rows = Iterator[tuple[str, Any]]

_TRIED_ROWS = 100


@dataclass(frozen=True)
class DataTable:
    """Rows of one split: `rows()` yields (source, row), `count` of them or a few less; `name` is for messages.

    `candidates()` yields those that may have an image or a video, found without reading the others closely.
    """

    name: str
    count: int
    rows: Callable[[], Rows]
    candidates: Callable[[], Rows]


def jsonl(path: Path) -> DataTable:
    """The lines of a JSONL file, in order; blank lines are passed over. UserError names file and line of a bad one."""
    try:
        with path.open("rb") as file:
            count = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")) + 1
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    return DataTable(str(path), count, lambda: _lines(path), lambda: _lines(path, (b'"image', b'"video')))


def _lines(path: Path, holding: tuple[bytes, ...] = (b"",)) -> Rows:
    """The rows of lines that hold one of some bytes."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not any(each in raw for each in holding):
                continue
            source = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{source}: not UTF-8 (byte {raw[error.start]:#04x} at column {error.start + 1}); "
                    "save the file as UTF-8."
                ) from error
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                # JSON can spell half a surrogate pair (\ud83d), which is no character and has no tokens.
                if "\\u" in line:
                    json.dumps(row, ensure_ascii=False).encode()
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{source}: not JSON: {error.msg} at column {error.colno}; expected one object a line."
                ) from error
            except UnicodeEncodeError as error:
                raise UserError(f"{source}: a \\u escape that is half of a character ({error.reason}).") from error
            except RecursionError as error:
                raise UserError(f"{source}: JSON nested too deeply.") from error
            yield source, row


def saved(folder: Path) -> bool:
    """Whether the folder was written by `save_to_disk` of the datasets library."""
    return any((folder / mark).exists() for mark in ("dataset_dict.json", "state.json"))


def hugging_face(name: str, split: str | None = None, options: dict[str, Any] | None = None) -> dict[str, DataTable]:
    """The splits of a data set by name: one of the hub, or a folder that `datasets` reads or has saved.

    split: one split, `datasets` slices allowed ("train[:80%]"), given as {split: table}; None gives all of them.
    options: further arguments of `datasets.load_dataset`. UserError where there is no such data set, split or option.
    """
    import datasets

    options = options or {}
    if "trust_remote_code" in options:
        raise UserError(f"hf_dataset {name}: trust_remote_code is refused: no code of a data set is ever run.")
    if name == "pandas":
        raise UserError(
            "hf_dataset pandas: refused: it unpickles files, and a pickle can run code; use parquet or JSON."
        )
    try:
        if split is None and saved(Path(name)):
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, split=split, **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{name}{f' ({split})' if split else ''}: no such data, neither a folder here nor a data set of the "
            f"Hugging Face hub that can be reached: {first_line(error)}"
        ) from error
    if isinstance(loaded, datasets.Dataset):
        loaded = {split or "train": loaded}
    return {key: _table(f"{name} [{key}]", dataset) for key, dataset in loaded.items()}


def _table(name: str, dataset: Any) -> DataTable:
    def rows() -> Rows:
        return ((f"{name} row {index}", row) for index, row in enumerate(dataset))

    # A data set has the same columns in every row, though they may be empty in some.
    return DataTable(name, len(dataset), rows, lambda: islice(rows(), _TRIED_ROWS))
