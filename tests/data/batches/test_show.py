import io

import pytest
from rich.console import Console

from deltatune.data import BatchOrder, load_datasets, show_batch
from deltatune.data.batches.show import printable

ROWS = [
    {"prompt": "a [b]question[/b]", "completion": "an \x1b[31manswer ü😀"},
    {"prompt": "one", "completion": "two\nlines"},
]


def shown(tokenizer, config, *, terminal: bool, **console) -> str:
    splits = load_datasets(config, tokenizer)
    order = BatchOrder(splits.train, config.batch_size, config.max_seq_length, packed=config.pack)
    options = {"force_terminal": terminal, "color_system": "standard" if terminal else None} | console
    console = Console(file=io.StringIO(), width=200, **options)
    show_batch(next(order), tokenizer, console)
    return console.file.getvalue()


def test_plain_text_marks_target_tokens(tokenizer, folder):
    config = folder(train=ROWS, batch_size=2)
    text = shown(tokenizer, config, terminal=False)
    assert "First batch: 2 rows of 64 positions. What counts in the loss stands in ⟦ ⟧." in text
    assert f"{config.data}/train.jsonl:1: " in text
    assert "<|im_start|>user\\n\na [b]question[/b]<|im_end|>\\n\n" in text
    assert "⟦an \\x1b[31manswer ü😀⟧⟦<|im_end|>⟧⟦\\n\n⟧" in text
    assert "⟦two\\n\nlines⟧⟦<|im_end|>⟧" in text
    assert "\x1b" not in text


def test_counts_of_tokens(tokenizer, folder):
    text = shown(tokenizer, folder(train=ROWS[1:]), terminal=False)
    example = load_datasets(folder(train=ROWS[1:]), tokenizer).train[0]
    assert f"train.jsonl:1: {len(example.tokens)} tokens, {example.targets.sum()} count in the loss" in text


def test_a_terminal_gets_colours_and_no_escape_of_the_datas(tokenizer, folder):
    text = shown(tokenizer, folder(train=ROWS, batch_size=2), terminal=True)
    assert "⟦" not in text
    assert "\x1b[1;32m" in text
    assert "\x1b[31m" not in text
    assert "\\x1b[31manswer" in text


@pytest.mark.parametrize("console", [{"color_system": None}, {"no_color": True}], ids=["TERM=dumb", "NO_COLOR"])
def test_a_terminal_without_colours_gets_brackets(console, tokenizer, folder):
    text = shown(tokenizer, folder(train=ROWS, batch_size=2), terminal=True, **console)
    assert "⟦two\\n\nlines⟧" in text.replace("\x1b[0m", "")


def test_packed_rows_show_each_document(tokenizer, folder):
    text = shown(tokenizer, folder(train=ROWS, pack=True), terminal=False)
    assert "First batch: 1 row of 64 positions." in text
    assert text.index("row 1: ") < text.index("train.jsonl:1: ")
    assert text.count("row 1: ") == 2
    assert "⟦an \\x1b[31manswer ü😀⟧" in text
    assert "⟦two\\n\nlines⟧" in text


@pytest.mark.parametrize(
    ("text", "escaped"),
    [("a\tb\r", "a\\tb\\r"), ("\x00\x9b", "\\x00\\x9b"), ("\u202e\u2028", "\\u202e\\u2028"), ("é 漢", "é 漢")],
)
def test_control_and_direction_characters_are_escaped(text, escaped):
    assert printable(text) == escaped
