import dataclasses
import io
import json

import datasets
import pytest
from rich.console import Console

from deltatune.data import load_datasets, reader
from deltatune.data.rows.sources import DataTable
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig

TEXT = [{"text": f"a line of text, number {number}"} for number in range(4)]
PAIR = {"prompt": "a question", "completion": "an answer"}
CHAT = {"messages": [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]}


def test_the_splits_that_the_run_needs(tokenizer, folder):
    config = folder(train=TEXT, valid=TEXT[:2], test=["not JSON, and not read"])
    splits = load_datasets(config, tokenizer)
    assert [len(splits.train), len(splits.valid), len(splits.test)] == [4, 2, 0]
    assert splits.notes == []
    assert splits.train[3].source == f"{config.data}/train.jsonl:4"
    config = folder(test=TEXT[:3])
    config = dataclasses.replace(config, train=False, test=True)
    splits = load_datasets(config, tokenizer)
    assert [len(splits.train), len(splits.valid), len(splits.test)] == [0, 0, 3]


def test_rows_are_held_out_where_nothing_else_validates(tokenizer, folder):
    rows = [{"text": f"line {number}"} for number in range(40)]
    everything = load_datasets(folder(train=rows, val_split=0), tokenizer)
    assert everything.notes == ["No validation set: training goes on without validation."]
    splits = load_datasets(folder(train=rows), tokenizer)
    assert [len(splits.train), len(splits.valid)] == [36, 4]
    assert splits.notes == [
        "Validation: 4 of 40 training rows, drawn by the seed, are held out, since the data have no validation set; "
        "--val-split 0 trains on all."
    ]

    def sources(splits):
        return [example.source for example in [*splits.train, *splits.valid]]

    assert sorted(sources(splits)) == sorted(sources(everything))
    assert sources(load_datasets(folder(train=rows), tokenizer)) == sources(splits)
    assert sources(load_datasets(folder(train=rows, seed=1), tokenizer)) != sources(splits)
    half = load_datasets(folder(train=rows, val_split=0.5), tokenizer)
    assert [len(half.train), len(half.valid)] == [20, 20]
    # Too few rows are left for a batch, so that the default trains on all.
    assert len(load_datasets(folder(train=rows, batch_size=37), tokenizer).valid) == 0
    assert len(load_datasets(folder(train=rows, val_batches=0), tokenizer).train) == 40


def test_examples_of_one_conversation_are_held_out_together(tokenizers, folder):
    answer = {"role": "assistant", "content": "an answer", "reasoning_content": "so"}
    rows = [{"messages": [{"role": "user", "content": "a question"}, answer] * 2}] * 20
    splits = load_datasets(folder(train=rows, val_split=0.25), tokenizers("thinking"))
    assert [len(splits.train), len(splits.valid)] == [30, 10]
    assert not {example.row for example in splits.train} & {example.row for example in splits.valid}


@pytest.mark.bad_input("val_split beside a validation set")
def test_a_share_beside_a_validation_set_is_refused(tokenizer, folder):
    with pytest.raises(UserError, match=r"val_split: .*valid.jsonl holds validation data already; leave val_split out"):
        load_datasets(folder(train=TEXT, valid=TEXT, val_split=0.5), tokenizer)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_a_file_is_the_training_data(tokenizer, folder, tmp_path, kind):
    rows = datasets.Dataset.from_list(TEXT * 5)
    file = tmp_path / f"lines.{kind}"
    if kind in ("jsonl", "json"):
        lines = [json.dumps(row) for row in rows]
        file.write_text("\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]")
    elif kind == "parquet":
        rows.to_parquet(file)
    else:
        rows.to_csv(file, sep="," if kind == "csv" else "\t")
    config = folder(train=TEXT, data=str(file))
    splits = load_datasets(config, tokenizer)
    assert [len(splits.train), len(splits.valid)] == [18, 2]
    assert all(example.source.startswith(str(file)) for example in splits.train)
    config = dataclasses.replace(config, train=False, test=True)
    assert len(load_datasets(config, tokenizer).test) == 20
    config = dataclasses.replace(config, train=True)
    with pytest.raises(UserError, match="test needs a test set, and a file holds one set; give a folder with both"):
        load_datasets(config, tokenizer)


@pytest.mark.bad_input("{what}")
@pytest.mark.parametrize(
    ("what", "name", "content", "message"),
    [
        ("a damaged file as data", "a.parquet", "PAR1", ": the datasets library cannot read this file: .* damaged"),
        # Rows are counted from one.
        (
            "a row of a CSV file that cannot be read",
            "a.csv",
            "prompt,completion\na,\n",
            " row 1: 'completion' is empty",
        ),
        ("a file of an unknown kind as data", "a.docx", "a", ": expected a .jsonl, .json, .csv, .tsv or .parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tokenizer, folder, tmp_path, what, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"/{name}{message}"):
        load_datasets(folder(data=str(tmp_path / name)), tokenizer)


COUNTS = "--no-mask-prompt counts every token."
ALL = f"Loss on completions only, every assistant turn only, every token of text lines; {COUNTS}"


@pytest.mark.parametrize(
    ("rows", "mask_prompt", "rule"),
    [
        (TEXT, None, "Loss on every token."),
        (TEXT, False, "Loss on every token."),
        ([PAIR], None, f"Loss on completions only; {COUNTS}"),
        ([CHAT], True, f"Loss on every assistant turn only; {COUNTS}"),
        ([CHAT, PAIR], False, "Loss on every token, prompts included (--no-mask-prompt)."),
        ([CHAT, PAIR, *TEXT], None, ALL),
    ],
)
def test_the_rule_is_said(tokenizer, folder, rows, mask_prompt, rule):
    assert load_datasets(folder(train=rows, valid=rows, mask_prompt=mask_prompt), tokenizer).rule == rule


def test_long_examples_are_cut_and_counted(tokenizer, folder):
    long = {"text": "word " * 40}
    config = folder(train=[long, *TEXT, long], valid=TEXT, max_seq_length=32)
    splits = load_datasets(config, tokenizer)
    assert [len(example.tokens) for example in splits.train if example.source[-1] in "16"] == [32, 32]
    whole = load_datasets(folder(train=[long], max_seq_length=4096), tokenizer).train[0].tokens
    assert splits.train[0].tokens.tolist() == whole[:32].tolist()
    assert splits.notes == [
        f"{config.data}/train.jsonl: 2 of 6 examples are longer than max_seq_length 32 (the longest has {len(whole)} "
        "tokens) and were truncated; --overlong skip leaves them out."
    ]


def test_long_examples_are_skipped_and_counted(tokenizer, folder):
    config = folder(train=[{"text": "word " * 40}, *TEXT], valid=TEXT, max_seq_length=32, overlong="skip")
    splits = load_datasets(config, tokenizer)
    assert [example.source[-1] for example in splits.train] == ["2", "3", "4", "5"]
    assert "1 of 5 examples is longer" in splits.notes[0]
    assert "was skipped; --overlong truncate cuts them" in splits.notes[0]
    with pytest.raises(UserError, match=r"train\.jsonl: no example left to train on"):
        load_datasets(folder(train=[{"text": "word " * 40}], max_seq_length=32, overlong="skip"), tokenizer)


def test_a_prompt_that_fills_the_limit_leaves_nothing_to_learn(tokenizer, folder):
    long = {"prompt": "word " * 40, "completion": "yes"}
    with pytest.raises(UserError, match=r"train.jsonl:2: the prompt alone takes .* max_seq_length 32.*--overlong skip"):
        load_datasets(folder(train=[PAIR, long], max_seq_length=32), tokenizer)
    splits = load_datasets(folder(train=[PAIR, long], max_seq_length=32, overlong="skip"), tokenizer)
    assert len(splits.train) == 1


def test_too_little_for_a_batch(tokenizer, folder):
    with pytest.raises(UserError, match=r"4 examples, fewer than batch_size 5 .*batch_size 4 or less"):
        load_datasets(folder(train=TEXT, batch_size=5), tokenizer)
    # A data set that packing makes smaller than a batch is completed with blank rows.
    packed = load_datasets(folder(train=TEXT, batch_size=2, pack=True), tokenizer)
    assert any("1 packed row of 2,048 positions, fewer than batch_size 2" in note for note in packed.notes)
    assert len(load_datasets(folder(train=TEXT, valid=TEXT[:1], batch_size=4), tokenizer).valid) == 1


def test_a_missing_file(tokenizer, folder):
    with pytest.raises(UserError, match=r"/train\.jsonl: no such data; it is needed to train"):
        load_datasets(folder(valid=TEXT), tokenizer)
    config = dataclasses.replace(folder(train=TEXT), train=False, test=True)
    with pytest.raises(UserError, match=r"/test\.jsonl: no such data; it is needed to test; --data may also name"):
        load_datasets(config, tokenizer)


def test_no_such_folder(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    (tmp_path / "empty" / "notes.txt").write_text("not meant for training")
    messages = {
        "nowhere": "no such file or folder, and no name of",
        "empty": "no train.jsonl in this folder",
        "a\\b": r"no such file or folder, .* A path has / here, not \\\.",
        "../../../../../../../../dev/null": "no such file or folder",
    }
    messages = {str(tmp_path / name): message for name, message in messages.items()}
    messages |= {".": "no train.jsonl in this folder", "/": "this is the root of all folders"}
    messages["https://huggingface.co/datasets/a/b/viewer"] = "give the name on the hub, a/b"
    for name, message in messages.items():
        with pytest.raises(UserError, match=message):
            load_datasets(TrainConfig(data=name), tokenizer)


def test_a_long_conversation_in_several_rows_loses_the_turns_that_one_row_loses(tokenizers, folder):
    answer = {"role": "assistant", "content": "an answer", "reasoning_content": "so"}
    messages = [{"role": "user", "content": "a question"}, answer] * 4
    whole = load_datasets(folder(train=[{"messages": messages}]), tokenizers("thinking")).train
    limit = len(whole[1].tokens)
    config = folder(train=[{"messages": messages}, CHAT], max_seq_length=limit)
    splits = load_datasets(config, tokenizers("thinking"))
    assert [len(example.tokens) for example in splits.train[:2]] == [len(example.tokens) for example in whole[:2]]
    assert len(splits.train) == 3
    assert splits.notes[1:3] == [
        f"{config.data}/train.jsonl: 2 of 5 examples are longer than max_seq_length {limit} (the longest has "
        f"{len(whole[3].tokens)} tokens) and were truncated; --overlong skip leaves them out.",
        f"{config.data}/train.jsonl: 2 of them were left out, not truncated: the turns that are learnt there begin "
        "beyond the limit.",
    ]
    with pytest.raises(UserError, match=r"train.jsonl:1 \(messages 1 to 2\): the prompt alone takes"):
        load_datasets(folder(train=[{"messages": messages}], max_seq_length=4), tokenizers("thinking"))


@pytest.mark.bad_input("an empty train.jsonl")
def test_an_empty_validation_set_is_called_empty(tokenizer, folder):
    config = folder(train=TEXT, valid=b"\n\n")
    assert load_datasets(config, tokenizer).notes == [
        f"{config.data}/valid.jsonl: no example left to validate on: training goes on without validation."
    ]
    for content in (b"", b"\n  \n"):
        with pytest.raises(UserError, match=r"train\.jsonl: no example left to train on; expected at least one"):
            load_datasets(folder(train=content, valid=TEXT), tokenizer)


def test_turns_that_count_are_an_option(tokenizer, folder):
    messages = CHAT["messages"] * 2
    splits = load_datasets(folder(train=[{"messages": messages}], chat_turns="last"), tokenizer)
    assert splits.rule == "Loss on the last assistant turn only; --no-mask-prompt counts every token."
    assert tokenizer.decode(splits.train[0].tokens[splits.train[0].targets]) == "an answer<|im_end|>\n"


def test_a_bar_names_a_split_in_brackets(monkeypatch):
    """To rich, [train] would be a style."""
    out = io.StringIO()
    monkeypatch.setattr(reader, "_PROGRESS_ROWS", 0)
    monkeypatch.setattr(reader, "Console", lambda **_: Console(file=out, force_terminal=True, width=200))
    table = DataTable("my-data [train]", 1, lambda: iter(()), lambda: iter(()), lambda: b"")
    assert reader._with_progress(iter([[1]]), table) == [[1]]
    assert "Tokenising my-data [train]" in out.getvalue()
