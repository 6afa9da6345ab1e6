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
# For each kind of data, its name in the list of checks, a good row, and the loss.
GOOD = {
    "text": ("a row of data with", {"text": "a dog"}, "sft"),
    "pairs": ("a pair of answers:", {"prompt": "a", "chosen": " b", "rejected": " c"}, "dpo"),
    "labels": ("an answer with a label:", {"prompt": "a", "completion": " b", "label": True}, "kto"),
    "images": ("a row with an image:", {"messages": MESSAGE}, "sft"),
}
CASES = [(GOOD[kind][0], kind, name) for kind in GOOD for name in TABLE[kind]]


@pytest.mark.bad_input("{what} {name}")
@pytest.mark.parametrize(("what", "kind", "name"), CASES)
def test_a_bad_row_behind_a_good_one_is_one_message(request, folder, tokenizer, tmp_path, what, kind, name):
    tools = [tokenizer]
    if kind == "images":
        tools = [request.getfixturevalue("loaded").tokenizer, request.getfixturevalue("processors")]
        pixels = np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8)
        for file in ("0.png", "1.png", "a.png", "b.png"):
            Image.fromarray(pixels).save(tmp_path / file)
    row, message = TABLE[kind][name]
    _, good, loss = GOOD[kind]
    config = folder(train=[good, row], loss=loss)
    with pytest.raises(UserError) as caught:
        load_datasets(config, *tools)
    text = str(caught.value)
    assert text.startswith(f"{config.data}/train.jsonl:2: ")
    assert re.search(message, text), text
    assert "\n" not in text
    assert len(text) < 600
