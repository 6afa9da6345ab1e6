"""Opens data that is read in order and never held whole: a JSONL file, or a data set that Hugging Face streams.

A stream is read some rows at a time. Each reading returns the place after it, from which another process continues
with the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import UserError, first_line
from .arrow_rows import as_written
from .sources import load_hugging_face, names_of, parsed

# A place in a stream, as JSON values; None is its beginning.
Place = Any


class JsonLines:
    """A JSONL file as a stream. A place is the number of bytes and of lines before it.

    Args:
        path: The file.

    Raises:
        UserError: The file cannot be read; while rows are read, it names the file and line of a bad one.
    """

    def __init__(self, path: Path):
        self._path, self.name = path, str(path)
        try:
            path.open("rb").close()
        except OSError as error:
            raise UserError(_unreadable(path, error)) from error

    def read(self, place: Place, count: int) -> tuple[list[tuple[str, Any]], Place]:
        """Return up to `count` rows from a place, each with its source, and the place after them.

        There are fewer than `count` rows only at the end of the data.
        """
        offset, number = place or (0, 0)
        rows: list[tuple[str, Any]] = []
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                while len(rows) < count and (raw := file.readline()):
                    offset, number = offset + len(raw), number + 1
                    row = parsed(raw, self._path, number)
                    if row is not None:
                        rows.append((f"{self._path}:{number}", row[0]))
        except OSError as error:
            raise UserError(_unreadable(self._path, error)) from error
        return rows, [offset, number]


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path}: cannot be read ({error.strerror}); expected a readable file."


@dataclass
class StreamedDataset:
    """A data set that the datasets library streams. A place is the library's own state, with the number of rows.

    Args:
        name: The stream's name in messages.
        begin: The number of the first row in messages.
        path: The data set's name on the hub, or its folder.
        split: The split.
        options: Further arguments of `datasets.load_dataset`.
    """

    name: str
    begin: int
    path: str
    split: str
    options: dict[str, Any]
    # The rows from the place at which the last reading ended, so that a stream is not opened again for each reading.
    _open: tuple[Place, Any, Iterator[Any]] | None = field(default=None, repr=False)

    def read(self, place: Place, count: int) -> tuple[list[tuple[str, Any]], Place]:
        """Return up to `count` rows from a place, as JsonLines.read does."""
        dataset, rows = self._at(place)
        self._open = None
        start = 0 if place is None else place["rows"]
        rows_read: list[Any] = []
        try:
            rows_read.extend(islice(rows, count))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.name} row {self.begin + start + len(rows_read)}: cannot be read: {first_line(error)}; the data "
                "are damaged, incomplete or out of reach."
            ) from error
        after = {"rows": start + len(rows_read), "state": dataset.state_dict()}
        self._open = (after, dataset, rows)
        read = enumerate((as_written(row, dataset.features) for row in rows_read), self.begin + start)
        return [(f"{self.name} row {number}", row) for number, row in read], after

    def _at(self, place: Place) -> tuple[Any, Iterator[Any]]:
        if self._open is not None and place is not None and self._open[0] == place:
            return self._open[1:]
        dataset = load_hugging_face(self.path, self.split, self.options, streaming=True)[self.split]
        if place is not None:
            dataset.load_state_dict(place["state"])
        return dataset, iter(dataset)


def hugging_face_streams(
    name: str, split: str | None = None, options: dict[str, Any] | None = None
) -> dict[str, StreamedDataset]:
    """Open the data sets of hugging_face() as streams; a UserError, too, where `split` is a part of one."""
    if split is not None and "[" in split:
        raise UserError(
            f"{name}: streaming reads whole splits, and {split} is a part of one; give train_split and valid_split, or "
            "val_batches: 0 for no validation."
        )
    splits = load_hugging_face(name, split, options or {}, streaming=True)
    names = names_of(name, splits, options or {})
    return {key: StreamedDataset(*names[key], name, key, options or {}) for key in splits}
