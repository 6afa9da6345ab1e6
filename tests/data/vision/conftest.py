"""Fixtures for rows with images and videos; they use the `folder` of the test's own module."""

import json
from typing import Any

import pytest

from deltatune.data import Splits
from deltatune.data.datasets import load_datasets
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig


@pytest.fixture
def write(folder):
    def write_rows(*rows: dict[str, Any]) -> None:
        (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    return write_rows


@pytest.fixture
def read(folder, loaded, processors):
    def read_splits(**options: Any) -> Splits:
        return load_datasets(TrainConfig(data=str(folder), batch_size=1, **options), loaded.tokenizer, processors)

    return read_splits


@pytest.fixture
def refusal(folder, write, read):
    """refusal(good row, bad row) returns the message that refuses the second, which names file and line."""

    def message(good: dict[str, Any], bad: dict[str, Any]) -> str:
        write(good, bad)
        with pytest.raises(UserError) as caught:
            read()
        text = str(caught.value)
        assert text.startswith(f"{folder / 'train.jsonl'}:2: ")
        assert "\n" not in text
        return text

    return message
