"""Opens the tables and streams that rows come from: JSONL files, and data sets on the Hugging Face hub or on disk.

Arrow stores nested objects in columns: every object of a column gets the keys of all of them, and null under those that
it did not have. A row written as JSON must give the same tokens before and after, so these keys are left out again.

A stream is read some rows at a time and never held whole. Each reading returns the place after it, from which another
process continues with the same rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import UserError, first_line
from ...machine.environment import expanded
from ...options.values import unique_keys

_COLUMNS = ("image", "images", "video", "videos")
_MEDIA = '^(image|video)|"(image|video)'


def as_written(row: dict[str, Any], features: Any) -> dict[str, Any]:
    """Return a row of the datasets library without the nulls in its nested objects.

    A null in the source looks the same as one added by Arrow, and goes too. Members of a list stay, since Arrow adds
    none. Values stored as JSON keep their nulls. `features` is the library's description of the columns, if it has one.
    """
    return {key: _value(value, features and features.get(key)) for key, value in row.items()}


def _value(value: Any, feature: Any) -> Any:
    if isinstance(value, dict) and (feature is None or isinstance(feature, dict)):
        return {key: _value(part, feature and feature.get(key)) for key, part in value.items() if part is not None}
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        # A list is described by a class of the library, or by a list of one member.
        member = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
        return [_value(part, member) for part in value]
    return value


def may_hold_media(table: Any) -> bool:
    """Return whether a row of a pyarrow table may hold an image or a video, in a column of its own or in a message.

    In a message it is a part, with a text that begins with its type, or JSON that may hold one.
    """
    import pyarrow.compute as compute

    def holds(name: str, column: Any) -> bool:
        if name in _COLUMNS:
            # Of a list, the members.
            return len(compute.list_flatten(column) if hasattr(column.type, "value_field") else column.drop_null()) > 0
        matches = (compute.match_substring_regex(texts, _MEDIA) for texts in _texts(column.combine_chunks()))
        return any(compute.any(match).as_py() for match in matches)

    return any(map(holds, table.column_names, table.columns))


def _texts(array: Any) -> Iterator[Any]:
    """Yield the arrays of texts within an array of pyarrow."""
    import pyarrow
    from pyarrow import types

    if isinstance(array.type, pyarrow.BaseExtensionType):
        yield from _texts(array.storage)
    elif types.is_dictionary(array.type):
        yield from _texts(array.dictionary)
    elif types.is_string(array.type) or types.is_large_string(array.type):
        yield array
    elif array.type.num_fields:
        inner = array.flatten()
        for part in inner if isinstance(inner, list) else [inner]:
            yield from _texts(part)


Rows = Iterator[tuple[str, Any]]
# A place in a stream, as JSON values; None is its beginning.
Place = Any

# Files of tables of text, and of tables with a row for each row of data.
_CELLS = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")
_TABLES = (*_CELLS, ".parquet", ".arrow", ".json", ".jsonl", ".jsonl.gz")
# The separators of a CSV file in the place of commas.
_SEPARATORS = (";", "\t", "|")
# Of the arguments of load_dataset, those that are none of load_dataset_builder.
_LATER = ("split", "streaming", "keep_in_memory", "num_proc", "save_infos", "verification_mode")
# How many rows of a Hugging Face data set are read as one table of Arrow.
_TABLE_ROWS = 10_000
# A line of JSON with an image or video has one of these: the key or type as it is, or with an escaped letter.
_MEDIA_MARKS = (b'"image', b'"video', b"\\u006", b"\\u007")


@dataclass(frozen=True)
class DataTable:
    """The rows of one split, under its name in messages; `rows` yields (source, row) for all of them.

    `count` may be a little too large, since blank lines are counted. `candidates` yields the rows with a possible image
    or video, found without parsing the others. `digest` returns a digest of the rows; None says that their tokens are
    not kept.
    """

    name: str
    count: int
    rows: Callable[[], Rows]
    candidates: Callable[[], Rows] = lambda: iter(())
    digest: Callable[[], bytes] | None = None


def jsonl(path: Path) -> DataTable:
    """Open a JSONL file. Its rows are the lines in order, without blank ones.

    A UserError says that it cannot be read and, while rows are read, names the line of a bad one.
    """
    with _readable(path), path.open("rb") as file:
        count = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")) + 1
    return DataTable(
        str(path), count, lambda: _lines(path), lambda: _lines(path, _MEDIA_MARKS), lambda: _file_digest(path)
    )


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within the context, a file that cannot be read is a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a readable file.") from error


def in_memory(name: str, rows: Any) -> DataTable:
    """Open rows that are in memory: a data set of the datasets library, or a list; messages call them `name`."""
    if hasattr(rows, "with_format"):
        undecoded = rows.with_format(None)
        leave_undecoded(undecoded.features)
        return _table(name, undecoded, 0)

    def numbered() -> Rows:
        return ((f"{name}[{number}]", row) for number, row in enumerate(rows))

    return DataTable(name, len(rows), numbered, numbered, None)


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _digest).digest()


def _digest() -> Any:
    return hashlib.blake2b(digest_size=20)


def _lines(path: Path, containing: tuple[bytes, ...] = (b"",)) -> Rows:
    return (row for row, _ in _places(path, (0, 0), containing))


def _places(
    path: Path, place: Sequence[int], containing: tuple[bytes, ...] = (b"",)
) -> Iterator[tuple[tuple[str, Any], Place]]:
    """Yield the rows from a place on, each with the place after it; only lines that hold one of these parts."""
    offset, number = place
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            offset += len(raw)
            number += 1
            row = parsed(raw, path, number) if any(part in raw for part in containing) else None
            if row is not None:
                yield (f"{path}:{number}", row[0]), [offset, number]


def is_saved_dataset(folder: Path) -> bool:
    """Whether the folder was written by `save_to_disk` of the datasets library."""
    return any((folder / file).exists() for file in ("dataset_dict.json", "state.json"))


def is_format(name: str) -> bool:
    """Whether the datasets library takes this name for a format, such as csv, rather than for a folder."""
    return name.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{name}") is not None


def hugging_face(
    name: str, split: str | None = None, options: dict[str, Any] | None = None, *, streaming: bool = False
) -> dict[str, Any]:
    """Return the table, or stream, of each split of a data set on the hub, or of a folder or file of `datasets`.

    `split` is one split, and of tables also a slice such as "train[:80%]"; None opens all. `options` are further
    arguments of `datasets.load_dataset`. A UserError says that there is no such data set, split or option, or that
    reading it could run code.
    """
    options = options or {}
    if streaming and split is not None and "[" in split:
        raise UserError(
            f"{name}: streaming reads whole splits, and {split} is a part of one; give train_split and valid_split, or "
            "val_batches: 0 for no validation."
        )
    loaded = load_hugging_face(name, split, options, streaming=streaming)
    names = names_of(name, loaded, options)
    if streaming:
        return {key: StreamedDataset(*names[key], name, key, options) for key in loaded}
    return {key: _table(names[key][0], rows, names[key][1]) for key, rows in loaded.items()}


def names_of(name: str, splits: Iterable[str], options: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the name of each split in messages, and the number of its first row.

    The rows of a file are counted as lines are, from 1, and those of a data set as the library counts them.
    """
    path = expanded(name)
    if path.is_file():
        return dict.fromkeys(splits, (name, 1))
    names = {split: (f"{name} [{split}]", 0) for split in splits}
    if path.is_dir() and not is_saved_dataset(path):
        files = _files(str(path.absolute()), options)[1]
        alone = {split: files[split][0] for split in splits if len(files.get(split, ())) == 1}
        names |= {split: (file, 1) for split, file in alone.items() if file.endswith(_TABLES)}
    return names


def load_hugging_face(
    name: str, split: str | None, options: dict[str, Any], *, streaming: bool = False
) -> dict[str, Any]:
    """Return the datasets library's own data set of each split, as hugging_face() opens it, to be read or streamed."""
    import datasets

    if "trust_remote_code" in options:
        raise UserError(
            f"hf_dataset {name}: trust_remote_code is refused: deltatune never runs code of a data set; remove it."
        )
    file = expanded(name)
    if file.is_file():
        options = options | {"data_files": file.name}
    path = str(file.parent.absolute()) if file.is_file() else _library_path(name, options)
    verbosity = datasets.logging.get_verbosity()
    bars = not datasets.are_progress_bars_disabled()
    try:
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        # The library logs a damaged file before it raises; the message below says it once.
        datasets.logging.set_verbosity(logging.CRITICAL)
        if is_saved_dataset(Path(path)) and (split is None or streaming):
            loaded = datasets.load_from_disk(path)
        else:
            how = options | cell_options(path, options) | ({"streaming": True} if streaming else {})
            loaded = datasets.load_dataset(path, split=split, **how)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(_not_opened(name, split, error)) from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
    if isinstance(loaded, datasets.Dataset | datasets.IterableDataset):
        loaded = {split or "train": loaded}
    for part in loaded.values():
        leave_undecoded(part.info.features)
    if streaming:
        return {
            key: part.to_iterable_dataset() if isinstance(part, datasets.Dataset) else part
            for key, part in loaded.items()
        }
    return dict(loaded)


def _library_path(name: str, options: dict[str, Any]) -> str:
    """Return the path or name for the datasets library: the full path of a folder, so that it is not read as a name.

    A UserError refuses the name of a format without files, since the library would take those of the current folder,
    and of a format that can run code.
    """
    folder = expanded(name)
    has_files = "data_files" in options or "data_dir" in options
    if folder.is_dir() and not (has_files and is_format(name)):
        return str(folder.absolute())
    if name == "pandas":
        raise UserError(
            "hf_dataset pandas: refused: it unpickles files, and a pickle can run code; use parquet or JSON."
        )
    if is_format(name) and not has_files:
        raise UserError(
            f"{name}: no such folder; to the datasets library this is the name of a format. Give the folder of your "
            f"files, or in the YAML file hf_dataset: {{path: {name}, config: {{data_files: FILE}}}}."
        )
    return name


def _not_opened(name: str, split: str | None, error: BaseException) -> str:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    where = f"{name} ({split})" if split else name
    if "Unknown split" in str(error) or "Unrecognized instruction" in str(error):
        return f"{where}: no such split: {first_line(error)}"
    if isinstance(cause, PermissionError):
        return f"{cause.filename or where}: cannot be read ({cause.strerror}); expected a readable file."
    if isinstance(cause, UnicodeDecodeError):
        return f"{where}: not UTF-8 (byte {cause.object[cause.start]:#04x}); save the file as UTF-8."
    if expanded(name).is_dir():
        return (
            f"{where}: the datasets library cannot read this folder: {first_line(cause)}; check its files: one may be "
            "damaged or incomplete."
        )
    if expanded(name).is_file():
        return f"{where}: the datasets library cannot read this file: {first_line(cause)}; it may be damaged."
    return (
        f"{where}: no such data, neither a folder here nor a data set of the Hugging Face hub that can be reached: "
        f"{first_line(cause)}"
    )


def _table(name: str, dataset: Any, begin: int) -> DataTable:
    """Return the rows of a loaded data set as a table; they are counted from `begin`."""

    def rows_of(part: Any, first: int = begin) -> Rows:
        read = first - 1
        try:
            for read, row in enumerate(part, first):
                yield f"{name} row {read}", as_written(row, dataset.features)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{name} row {read + 1}: cannot be read: {first_line(error)}; the data are damaged or incomplete."
            ) from error

    def candidates() -> Rows:
        first = 0
        for table in _arrow_tables(dataset):
            if may_hold_media(table):
                yield from rows_of(dataset.select(range(first, first + len(table))), begin + first)
            first += len(table)

    return DataTable(name, len(dataset), lambda: rows_of(dataset), candidates, lambda: _arrow_digest(dataset))


def _arrow_tables(dataset: Any) -> Iterator[Any]:
    return dataset.with_format("arrow").iter(batch_size=_TABLE_ROWS)


def _arrow_digest(dataset: Any) -> bytes:
    digest = _digest()
    for table in _arrow_tables(dataset):
        digest.update(table.schema.serialize())
        for batch in table.combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.digest()


def leave_undecoded(features: Any) -> None:
    """Switch off, in place, the decoding of images and videos in columns of a data set, of which `features` tell."""
    import datasets

    if isinstance(features, datasets.Image | datasets.Video):
        features.decode = False
    elif isinstance(features, Mapping):
        for feature in features.values():
            leave_undecoded(feature)
    elif isinstance(features, list | tuple):
        for feature in features:
            leave_undecoded(feature)
    elif hasattr(features, "feature"):
        leave_undecoded(features.feature)


# The bytes of a file in which the bracket of an array is looked for.
_BEGINNING = 4096
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def json_file(path: Path) -> DataTable:
    """Open a file of an array or of lines; UserError where it cannot be read, is not UTF-8, or its array not JSON."""
    with _readable(path), path.open("rb") as file:
        if not file.read(_BEGINNING).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
            return jsonl(path)
        file.seek(0)
        content = file.read()
    objects: list[Any] = parsed(content, path, None)[0]  # type: ignore[index]

    def rows() -> Rows:
        return ((f"{path} row {number}", row) for number, row in enumerate(objects, 1))

    return DataTable(str(path), len(objects), rows, rows, lambda: _file_digest(path))


def parsed(raw: bytes, path: Path, line: int | None) -> tuple[Any] | None:
    """Return the value that a line of a file, or with None the whole file, holds, alone in a tuple; None for blanks.

    The bytes at the start of the file may begin with a byte order mark. A UserError says that they are not UTF-8, or
    not JSON, or hold half of a character or a key twice.
    """
    where = str(path) if line is None else f"{path}:{line}"
    first = line or 1
    expected = "an array of objects" if line is None else "one object a line"
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
        value = json.loads(text, object_pairs_hook=unique_keys)
        # JSON can hold half of a surrogate pair (\ud83d), which is not a character and has no tokens.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{first + error.lineno - 1}: not JSON: {error.msg} at column {error.colno}; expected {expected}."
        ) from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
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


def cell_options(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return further arguments of `datasets.load_dataset` for data in CSV files; none for data of another format.

    Without them pandas guesses a column's type: "007" becomes 7, "1.50" becomes 1.5, and "NA" becomes null. An empty
    cell is null still. A header in one column that holds a semicolon, a tab or a vertical bar is separated there,
    unless the options name a separator. Splits with other columns are refused by a UserError; an error of the datasets
    library or pandas passes through.
    """
    import datasets
    import pandas

    config, files_of_splits = _files(path, options)
    chosen: dict[str, Any] = {}
    files = [of_split[0] for of_split in files_of_splits.values()]
    # An archive may hold several files, or others than CSV.
    plain = hasattr(config, "pd_read_csv_kwargs") and all(file.endswith(_CELLS) for file in files)
    if not (files and plain) or "features" in options:
        return {}
    reading = config.pd_read_csv_kwargs | {"chunksize": None, "nrows": 0}

    def columns_of(file: str) -> list[str]:
        return [str(name) for name in pandas.read_csv(file, **(reading | chosen)).columns]

    columns = columns_of(files[0])
    if len(columns) == 1 and config.sep == "," and not options.keys() & {"sep", "delimiter"}:
        chosen = {"sep": next((separator for separator in _SEPARATORS if separator in columns[0]), ",")}
        columns = columns_of(files[0])
    if reading.get("header") == "infer" and reading.get("names") is None:
        # pandas would call the second "prompt" prompt.1, which nobody reads.
        first_line_alone = reading | chosen | {"header": None, "nrows": 1, "dtype": str}
        cells = Counter(pandas.read_csv(files[0], **first_line_alone).iloc[0].dropna())
        if repeated := [cell for cell, times in cells.items() if times > 1]:
            raise UserError(f"{files[0]}: {repeated[0]!r} heads two columns; rename or remove one of them.")
    for file in files[1:]:
        if (others := columns_of(file)) != columns:
            raise UserError(
                f"{file}: its columns are {', '.join(others)}, and those of {files[0]} {', '.join(columns)}; give both "
                "the same, with the same separator."
            )
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    return {**chosen, "features": features, "keep_default_na": False, "na_values": [""]} | {
        key: options[key] for key in ("keep_default_na", "na_values") if key in options
    }


def _files(path: str, options: dict[str, Any]) -> tuple[Any, dict[str, list[str]]]:
    """Return the config with which the datasets library reads files, and the files of each split."""
    import datasets

    builder = datasets.load_dataset_builder(path, **{key: options[key] for key in options if key not in _LATER})
    files: Any = builder.config.data_files or {}
    return builder.config, {str(split): list(map(str, of_split)) for split, of_split in files.items()}


class JsonLines:
    """A JSONL file as a stream. A place is the number of bytes and of lines before it."""

    def __init__(self, path: Path):
        self._path = path
        self.name = str(path)
        with _readable(path):
            path.open("rb").close()

    def read(self, place: Place, count: int) -> tuple[list[tuple[str, Any]], Place]:
        """Return up to `count` rows from a place, each with its source, and the place after them.

        There are fewer than `count` rows only at the end of the data.
        """
        with _readable(self._path):
            read = list(islice(_places(self._path, place or (0, 0)), count))
        return [row for row, _ in read], read[-1][1] if read else place


@dataclass
class StreamedDataset:
    """A split of a data set, on the hub or in a folder, that the datasets library streams.

    A place is the library's own state, with the number of rows; messages count rows from `begin`.
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
