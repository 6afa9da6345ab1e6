"""Has the datasets library read each cell of a CSV file as the text that stands there, semicolons as commas."""

from __future__ import annotations

from typing import Any

from ...errors import UserError

_SEPARATORS = (";", "\t", "|")
# Of the arguments of load_dataset, those that are none of load_dataset_builder.
_LATER = ("split", "streaming", "keep_in_memory", "num_proc", "save_infos", "verification_mode")


def cell_options(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return further arguments of `datasets.load_dataset` for data in CSV files; none for data of another format.

    Without them pandas guesses a column's type: "007" becomes 7, "1.50" becomes 1.5, and "NA" becomes null. An empty
    cell is null still. A header in one column that holds a semicolon, a tab or a vertical bar is separated there,
    unless the options name a separator.

    Args:
        path: The first argument of load_dataset.
        options: Its further arguments.

    Raises:
        UserError: The splits have other columns.
        Exception: An error of the datasets library or pandas, where the data cannot be opened.
    """
    import datasets
    import pandas

    builder = datasets.load_dataset_builder(path, **{key: options[key] for key in options if key not in _LATER})
    config: Any = builder.config
    chosen: dict[str, Any] = {}
    files = [str(of_split[0]) for of_split in (config.data_files or {}).values()]
    # An archive may hold several files, or others than CSV.
    if not hasattr(config, "pd_read_csv_kwargs") or "features" in options or not _are_plain(files):
        return {}
    reading = config.pd_read_csv_kwargs | {"chunksize": None, "nrows": 0}

    def columns_of(file: str) -> list[str]:
        return [str(name) for name in pandas.read_csv(file, **(reading | chosen)).columns]

    columns = columns_of(files[0])
    if len(columns) == 1 and config.sep == "," and not options.keys() & {"sep", "delimiter"}:
        chosen = {"sep": next((separator for separator in _SEPARATORS if separator in columns[0]), ",")}
        columns = columns_of(files[0])
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


def _are_plain(files: list[str]) -> bool:
    return bool(files) and all(file.endswith((".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")) for file in files)
