"""Rows that cannot be learnt from are refused in one message, which names file and line."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from deltatune.data import load_datasets
from deltatune.errors import UserError

TABLE = yaml.safe_load(Path(__file__).with_name("bad_rows.yaml").read_text(encoding="utf-8"))
MESSAGE = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "an answer"}
# For each kind of data, a good row, and the loss.
GOOD = {
    "text": ({"text": "a dog"}, "sft"),
    "pairs": ({"prompt": "a", "chosen": " b", "rejected": " c"}, "dpo"),
    "labels": ({"prompt": "a", "completion": " b", "label": True}, "kto"),
    "images": ({"messages": MESSAGE}, "sft"),
}


@pytest.fixture
def refused(folder):
    """refused(kind, name, tokenizer, processors) checks the message on a bad row behind a good one."""

    def check(kind, name, *tools):
        row, message = TABLE[kind][name]
        good, loss = GOOD[kind]
        config = folder(train=[good, row], loss=loss)
        with pytest.raises(UserError) as caught:
            load_datasets(config, *tools)
        text = str(caught.value)
        assert text.startswith(f"{config.data}/train.jsonl:2: ")
        assert re.search(message, text), text
        assert "\n" not in text
        assert len(text) < 600

    return check


@pytest.mark.bad_input("a row of data with {name}")
@pytest.mark.parametrize("name", TABLE["text"])
def test_rows_of_text(refused, tokenizer, name):
    refused("text", name, tokenizer)


@pytest.mark.bad_input("a pair of answers: {name}")
@pytest.mark.parametrize("name", TABLE["pairs"])
def test_pairs_of_answers(refused, tokenizer, name):
    refused("pairs", name, tokenizer)


@pytest.mark.bad_input("an answer with a label: {name}")
@pytest.mark.parametrize("name", TABLE["labels"])
def test_answers_with_a_label(refused, tokenizer, name):
    refused("labels", name, tokenizer)


@pytest.mark.bad_input("a row with an image: {name}")
@pytest.mark.parametrize("name", TABLE["images"])
def test_rows_with_images(refused, loaded, processors, tmp_path, name):
    pixels = np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8)
    for file in ("0.png", "1.png", "a.png", "b.png"):
        Image.fromarray(pixels).save(tmp_path / file)
    refused("images", name, loaded.tokenizer, processors)
