"""Formats of data in the commands that read it: some of the trials that scripts/data_formats.py makes of a wheel."""

from pathlib import Path

import pytest
import yaml

import data_formats
from console import called

# One case for each way into the data: Arrow files in training, a stream, a mapping in YAML, an array.
TRIED = [
    ("JSONL", "show a batch"),
    ("Parquet", "train"),
    ("TSV", "show a streamed batch"),
    ("hf_dataset", "show a batch"),
    ("JSON array", "plan"),
]


@pytest.fixture(scope="module")
def cases(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    return {(case.form, case.command): case for case in data_formats.cases(folder, checkpoint)}, {}


@pytest.mark.parametrize("tried", TRIED, ids=" ".join)
def test_formats_of_data(cases, tried):
    known, shown = cases
    assert data_formats.problem(known[tried], called(*known[tried].arguments), shown) is None


def test_every_format_meets_every_command(cases):
    forms, commands = map(set, zip(*cases[0], strict=True))
    assert len(cases[0]) == len(forms) * len(commands)
    assert set(TRIED) <= set(cases[0])


def test_a_release_tries_every_format_before_it_is_published():
    file = Path(__file__).parent.parent.parent / ".github" / "workflows" / "release.yml"
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    assert {"run": "make data-formats"} in jobs["try"]["steps"]
    assert jobs["publish"]["needs"] == "try"
