"""Names rows of data that are in memory, in the place of the folder that the option `data` names otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class DataInMemory(str):
    """The name of rows in memory, for messages and saved options, with the rows.

    `splits` holds, by the name of a split, the words with which messages name its rows, and the rows: a list, or a data
    set of the datasets library.
    """

    splits: dict[str, tuple[str, Any]]

    @classmethod
    def of(cls, data: Iterable[Any] | Mapping[str, Iterable[Any]]) -> DataInMemory:
        """Take training rows, or a mapping such as {"train": rows, "valid": rows}."""
        made = cls("data in memory")
        splits = {"train": ("data", data)}
        if isinstance(data, Mapping):
            splits = {name: (f"data[{name!r}]", rows) for name, rows in data.items()}
        # A data set is read where it is; another iterator could be read only once.
        made.splits = {
            name: (label, rows if hasattr(rows, "__getitem__") else [*rows]) for name, (label, rows) in splits.items()
        }
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        # Saved options hold the name alone.
        return str(self)
