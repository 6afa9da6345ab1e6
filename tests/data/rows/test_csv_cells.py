"""A cell of a CSV file is the text that stands there, in each split, and streamed; semicolons separate as commas do."""

import csv
import gzip

import pytest

from console import called
from deltatune.data.rows.sources import hugging_face
from deltatune.errors import UserError

# Without a guess, "007" is no 7, "NA" no null and "true" no truth; an empty cell alone is null.
CELLS = ["007", "1.50", "NA", "true", "2026-01-02", "1e5", "a, b; c", ""]
ROWS = [{"prompt": cell, "completion": "x"} for cell in CELLS]
READ = [{"prompt": cell or None, "completion": "x"} for cell in CELLS]


def write(path, separator=",", rows=ROWS, **options):
    with path.open("w", newline="", **options) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("separator", [",", ";", *(pytest.param(one, marks=pytest.mark.weekly) for one in "\t|")])
def test_cells_are_text(tmp_path, separator):
    for name in ("train", "validation"):
        write(tmp_path / f"{name}.csv", separator)
    for name, table in hugging_face(str(tmp_path)).items():
        # A row is named by its file, and counted as lines are.
        named = [(f"{tmp_path}/{name}.csv row {number}", row) for number, row in enumerate(READ, 1)]
        assert list(table.rows()) == named
        assert hugging_face(str(tmp_path), streaming=True)[name].read(None, 100)[0] == named


def test_files_that_are_named_or_packed(tmp_path):
    write(tmp_path / "my;file.csv", ";")
    with gzip.open(tmp_path / "packed.csv.gz", "wt") as file:
        file.write((tmp_path / "my;file.csv").read_text())
    write(tmp_path / "rows.tsv", "\t")
    for name, more in (("my;file.csv", {}), ("packed.csv.gz", {}), ("rows.tsv", {"sep": "\t"})):
        table = hugging_face("csv", "train", {"data_files": str(tmp_path / name), **more})["train"]
        assert [row for _, row in table.rows()] == READ, name
    # What the user names is what separates.
    file = {"data_files": str(tmp_path / "my;file.csv")}
    table = hugging_face("csv", "train", {**file, "sep": ",", "on_bad_lines": "skip"})["train"]
    assert list(next(table.rows())[1]) == ["prompt;completion"]
    table = hugging_face("csv", "train", {**file, "na_values": ["NA"]})["train"]
    assert [row["prompt"] for _, row in table.rows()][2] is None


@pytest.mark.bad_input("CSV files with other columns in each")
def test_files_of_several_columns(tmp_path):
    write(tmp_path / "train.csv")
    write(tmp_path / "validation.csv", rows=[{"text": "a"}])
    said = (
        rf"{tmp_path}/validation.csv: its columns are text, and those of {tmp_path}/train.csv prompt, completion; give"
    )
    with pytest.raises(UserError, match=said):
        hugging_face(str(tmp_path))
    write(tmp_path / "validation.csv", ";")
    with pytest.raises(UserError, match=r"its columns are prompt;completion, and those of"):
        hugging_face(str(tmp_path))


@pytest.mark.bad_input("a CSV file that is not UTF-8")
def test_other_encodings_are_named(tmp_path):
    (tmp_path / "old.csv").write_bytes("prompt,completion\na,\xe4\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"old.csv: not UTF-8 \(byte 0xe4\); save the file as UTF-8"):
        hugging_face(str(tmp_path / "old.csv"))


def test_labels_are_read_from_text(checkpoint, tmp_path):
    rows = [{"prompt": "the fox", "completion": "jumps", "label": label} for label in ("True", "false", "1", "0")]
    data = tmp_path / "data"
    data.mkdir()
    write(data / "train.csv", ";", rows)
    asked = "train", "--model", checkpoint, "--data", data, "--max-seq-length", 64, "--loss", "kto", "--show-batch"
    done = called(*asked)
    assert done.returncode == 0, done.stderr
    rows[0]["label"] = "maybe"
    write(data / "train.csv", ";", rows)
    done = called(*asked)
    assert done.returncode == 2
    assert "'label': expected true or false, got 'maybe'" in done.stderr
