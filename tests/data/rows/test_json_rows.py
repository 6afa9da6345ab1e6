"""Files that hold an array of rows in place of one row a line, and the messages on damaged ones."""

import json

import pytest

from deltatune.data import load_datasets
from deltatune.errors import UserError

ROWS = [{"text": "first row ü"}, {"prompt": "a", "completion": "b"}]


def read(folder, tokenizer, content, **options):
    config = folder(**options)
    with open(f"{config.data}/train.json", "wb") as file:
        file.write(content)
    return load_datasets(config, tokenizer).train


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_gives_the_tokens_of_the_same_lines(tokenizer, folder, tmp_path, indent):
    lines = load_datasets(folder(train=ROWS), tokenizer).train
    (tmp_path / "train.jsonl").unlink()
    for start in (b"", b"\xef\xbb\xbf"):
        content = start + json.dumps(ROWS, indent=indent, ensure_ascii=False).encode()
        found = read(folder, tokenizer, content)
        assert [example.tokens.tolist() for example in found] == [example.tokens.tolist() for example in lines]
        assert found[1].source == f"{tmp_path}/train.json row 2"


def test_a_json_file_may_hold_lines(tokenizer, folder, tmp_path):
    found = read(folder, tokenizer, "".join(json.dumps(row) + "\n" for row in ROWS).encode())
    assert found[1].source == f"{tmp_path}/train.json:2"


@pytest.mark.bad_input("a damaged file with an array of rows")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'[{"text": "a"},\n {"text": "b"}\n',
            r"train.json:2: not JSON: .* at column 15; expected an array of objects",
        ),
        (b'[{"text": "\xe4"}]', r"train.json:1: not UTF-8 \(byte 0xe4 at column 12\)"),
        (b'[\n{"text": "\xc3\xa4\xe4"}]', r"train.json:2: not UTF-8 \(byte 0xe4 at column 12\); save the file"),
        (b'[{"text": "\\ud83d"}]', "half of a character"),
        (b"[" * 100_000, "nested too deeply"),
        (b'[{"text": ' + b"1" * 5000 + b"}]", r"train.json: not JSON that can be read: .*\(4300 digits\)"),
        (b"[1]", r"train.json row 1: expected an object with"),
        (b"[]", "no example left to train on"),
    ],
)
def test_damaged_arrays(tokenizer, folder, content, message):
    with pytest.raises(UserError, match=message):
        read(folder, tokenizer, content)


@pytest.mark.bad_input("a split in two files, or an array that is to be streamed")
def test_two_files_and_streams(tokenizer, folder):
    with pytest.raises(UserError, match=r"train.json: streaming reads JSONL; .* into train.jsonl"):
        read(folder, tokenizer, json.dumps(ROWS).encode(), streaming=True)
    with pytest.raises(UserError, match=r"both train.jsonl and train.json hold the train split; keep one of them"):
        read(folder, tokenizer, json.dumps(ROWS).encode(), train=ROWS)


@pytest.fixture
def starting(tokenizer):
    """The tokenizer with a start token, which it puts before no text by itself."""
    tokenizer._tokenizer.bos_token = "<|endoftext|>"
    yield tokenizer
    tokenizer._tokenizer.bos_token = None


def test_texts_that_hold_the_start_token_already_are_noted_once(starting, folder):
    doubled = {"text": "<|endoftext|><|endoftext|>a text"}
    splits = load_datasets(folder(train=[doubled, {"text": "<|endoftext|>one"}], valid=[doubled]), starting)
    notes = [note for note in splits.notes if "twice" in note]
    assert len(notes) == 1
    assert "train.jsonl: 1 text begins with <|endoftext|> twice: the data hold it already" in notes[0]
    assert not [note for note in load_datasets(folder(train=ROWS, valid=ROWS), starting).notes if "twice" in note]
