import csv
import dataclasses
import gzip
import json
import ssl
from pathlib import Path
from unittest.mock import Mock
from urllib.error import HTTPError, URLError

import datasets
import huggingface_hub
import pytest

from deltatune.data import datasets as data_sets
from deltatune.data import load_datasets
from deltatune.data.rows.sources import hugging_face, jsonl
from deltatune.errors import UserError

ROWS = [{"text": f"row number {number}", "note": "aside"} for number in range(20)]


@pytest.fixture(autouse=True)
def out_of_reach(monkeypatch, tmp_path_factory):
    """Give the test a cache of its own, and keep it from reaching the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def lines(tmp_path, content: bytes):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    return [(source.removeprefix(f"{tmp_path}/"), row) for source, row in jsonl(path).rows()]


def test_lines_with_their_numbers(tmp_path):
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "\xc3\xbc \\ud83d\\ude00"}'
    assert lines(tmp_path, content) == [("train.jsonl:1", {"text": "a"}), ("train.jsonl:4", {"text": "ü 😀"})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'text': 'a'}", r"not JSON: .* at column 2; expected one object a line"),
        (b'{"text": "a"', "not JSON: Expecting ',' delimiter at column 13; "),
        (b'{"text": "\xc3\xa4\xe4"}', "not UTF-8 .byte 0xe4 at column 12."),
        (b'{"text": "a", "text": "b"}', "the key 'text' stands there twice"),
        (b'{"text": "a"} {"text": "b"}', "not JSON: Extra data at column 15"),
        (b'{"text": "\xe4"}', "not UTF-8 .byte 0xe4 at column 11.; save the file as UTF-8"),
        (b'{"text": "\\ud83d"}', "half of a character"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    with pytest.raises(UserError, match=rf"train.jsonl:3: .*{message}"):
        lines(tmp_path, b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    # Columns are counted behind a byte order mark.
    with pytest.raises(UserError, match=rf"train.jsonl:1: .*{message}"):
        lines(tmp_path, b"\xef\xbb\xbf" + line)


def parquet(folder, **splits):
    folder.mkdir()
    for name, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(str(folder / f"{name}.parquet"))
    return str(folder)


def test_a_folder_that_datasets_reads(tmp_path, tokenizer, folder):
    config = folder(data=parquet(tmp_path / "set", train=ROWS, validation=ROWS[:3], test=ROWS[:2]))
    splits = load_datasets(config, tokenizer)
    assert [len(splits.train), len(splits.valid), len(splits.test)] == [20, 3, 0]
    assert splits.train[4].source == f"{config.data}/train.parquet row 5"
    assert tokenizer.decode(splits.train[4].tokens) == "row number 4<|im_end|>"


def test_a_folder_that_datasets_saved(tmp_path, tokenizer, folder):
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "valid": rows.select([0, 1])}).save_to_disk(str(tmp_path / "saved"))
    splits = load_datasets(folder(data=str(tmp_path / "saved")), tokenizer)
    assert [len(splits.train), len(splits.valid)] == [20, 2]
    rows.save_to_disk(str(tmp_path / "single"))
    splits = load_datasets(folder(data=str(tmp_path / "single")), tokenizer)
    assert [len(splits.train), len(splits.valid)] == [18, 2]


def test_hf_dataset_with_keys_and_splits_as_mlx_lm_reads_them(tmp_path, tokenizer, folder):
    path = parquet(tmp_path / "set", train=ROWS, holdout=ROWS[:3])
    splits = load_datasets(
        folder(hf_dataset={"path": path, "completion_feature": "note", "prompt_feature": "text"}), tokenizer
    )
    assert [len(splits.train), len(splits.valid)] == [16, 2]
    assert tokenizer.decode(splits.train[0].tokens[splits.train[0].targets]) == "aside<|im_end|>\n"
    assert splits.train[0].source == f"{path} [train[:80%]] row 0"
    entry = {"name": path, "train_split": "train[:5]", "valid_split": "train[5:6]", "test_split": "train[6:]"}
    both = folder(test=None, hf_dataset=[entry, entry | {"train_split": "train[18:]", "text_feature": "note"}])
    both = dataclasses.replace(both, test=True)
    splits = load_datasets(both, tokenizer)
    assert [len(splits.train), len(splits.valid), len(splits.test)] == [7, 2, 28]
    assert [tokenizer.decode(splits.train[index].tokens) for index in (4, 5)] == [
        "row number 4<|im_end|>",
        "aside<|im_end|>",
    ]


def test_config_reaches_load_dataset(tmp_path, tokenizer, folder):
    (tmp_path / "odd.txt").write_text('{"text": "an odd place"}\n')
    entry = {
        "path": "json",
        "config": {"data_files": str(tmp_path / "odd.txt")},
        "train_split": "train",
        "valid_split": "train",
    }
    splits = load_datasets(folder(hf_dataset=entry), tokenizer)
    assert tokenizer.decode(splits.train[0].tokens) == "an odd place<|im_end|>"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("billsum", "hf_dataset: expected keys such as path"),
        ({"path": "a", "text_featur": "b"}, r"unknown key 'text_featur' \(did you mean 'text_feature'\?\)"),
        ({"text_feature": "b"}, "hf_dataset: expected path"),
        ({"path": "a", "name": "b"}, "a subset's name goes under config"),
        ({"path": 3}, "path: expected a string, got 3"),
        ({"path": "a", "text_feature": 3}, "text_feature: expected a string, got 3"),
        ({"path": "a", "config": "b"}, "config: expected a mapping"),
        ({"path": "a", "config": {"trust_remote_code": True}}, "trust_remote_code is refused"),
        ({"path": "pandas", "config": {"data_files": "a.pkl"}}, "a pickle can run code"),
        ([{"path": "nobody/nothing"}, {}], r"nobody/nothing \(train\[:80%\]\): no such data"),
    ],
)
def test_mistakes_in_hf_dataset(tokenizer, folder, entry, message):
    with pytest.raises(UserError, match=message):
        load_datasets(folder(hf_dataset=entry), tokenizer)


@pytest.mark.bad_input("the name of a split that does not exist")
def test_splits_that_are_missing(tmp_path, tokenizer, folder):
    path = parquet(tmp_path / "set", train=ROWS)
    with pytest.raises(
        UserError, match=r"\(valid\): no such split: Unknown split \"valid\"\. Should be one of \['train'\]"
    ):
        load_datasets(folder(hf_dataset={"path": path, "valid_split": "valid"}), tokenizer)
    config = dataclasses.replace(folder(hf_dataset={"path": path}), test=True)
    with pytest.raises(UserError, match="test_split is needed to test"):
        load_datasets(config, tokenizer)


@pytest.mark.bad_input("Parquet and Arrow files that are damaged or incomplete")
def test_damaged_files_are_called_damaged(tmp_path, tokenizer, folder, capfd):
    parquet(tmp_path / "whole", train=ROWS)
    content = (tmp_path / "whole" / "train.parquet").read_bytes()
    flipped = content[:10] + bytes([content[10] ^ 255]) + content[11:]
    for number, damaged in enumerate((b"", content[:-10], b"PAR1" + bytes(100) + b"PAR1", flipped)):
        path = tmp_path / f"damaged {number}"
        path.mkdir()
        (path / "train-0.parquet").write_bytes(damaged)
        with pytest.raises(UserError) as caught:
            hugging_face(str(path))
        assert str(caught.value).startswith(f"{path}: the datasets library cannot read this folder: ")
        assert "may be damaged or incomplete" in str(caught.value)
        assert "An error occurred" not in str(caught.value)
    assert "Failed to read" not in capfd.readouterr().err
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:50])
    with pytest.raises(UserError, match="saved: the datasets library cannot read this folder"):
        hugging_face(str(tmp_path / "saved"))


def test_a_log_has_no_progress_bars_of_the_library(tmp_path, capfd):
    (tmp_path / "faq.csv").write_text("prompt,completion\nwhen,at 9\n")
    assert list(hugging_face(str(tmp_path / "faq.csv"))) == ["train"]
    assert "examples" not in capfd.readouterr().err
    assert not datasets.are_progress_bars_disabled()


FORMATS = ("csv", "json", "parquet", "text", "imagefolder", "pandas")


def named_like_formats(folder):
    """Write a folder for each format, named like it, and other rows beside them, which a format's name would read."""
    for name in FORMATS:
        (folder / name).mkdir()
        (folder / name / "train.csv").write_text(f"text\nof {name}\nand again\n")
    (folder / "train.csv").write_text("text\na stranger's\n")
    (folder / "train.json").write_text('{"text": "another stranger\'s"}\n')


def test_a_folder_named_like_a_format_is_the_folder(tmp_path, tokenizer, folder, monkeypatch):
    named_like_formats(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, streaming in ((FORMATS[0], True), *((name, False) for name in FORMATS)):
        config = folder(data=name, streaming=streaming, val_batches=0)
        found = {tokenizer.decode(one.tokens) for one in load_datasets(config, tokenizer).train}
        assert found == {f"of {name}<|im_end|>", "and again<|im_end|>"}
    split = {"path": "csv", "train_split": "train", "valid_split": "train"}
    config = dataclasses.replace(config, data=None, streaming=False, hf_dataset=split)
    assert len(load_datasets(config, tokenizer).train) == 2
    # With files of its own, the name is that of the format, as everywhere in the datasets library.
    config.hf_dataset["config"] = {"data_files": "train.csv"}
    assert len(load_datasets(config, tokenizer).train) == 1


@pytest.mark.bad_input("the name of a format of the datasets library in place of a folder")
def test_the_name_of_a_format_does_not_read_the_current_folder(tmp_path, tokenizer, folder, monkeypatch, capsys):
    (tmp_path / "train.csv").write_text("text\na stranger's\n")
    monkeypatch.chdir(tmp_path)
    for options in ({"data": "csv"}, {"hf_dataset": {"path": "csv"}}):
        config = folder()
        vars(config).update(options)
        with pytest.raises(UserError, match=r"^csv: no such folder; to the datasets library this is the name of a fo"):
            load_datasets(config, tokenizer)
    assert capsys.readouterr().err == ""


TEXTS = [{"text": "first row ü"}, {"prompt": "a", "completion": "b"}]


def read(folder, tokenizer, content, **options):
    config = folder(**options)
    with open(f"{config.data}/train.json", "wb") as file:
        file.write(content)
    return load_datasets(config, tokenizer).train


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_gives_the_tokens_of_the_same_lines(tokenizer, folder, tmp_path, indent):
    lines = load_datasets(folder(train=TEXTS), tokenizer).train
    (tmp_path / "train.jsonl").unlink()
    for start in (b"", b"\xef\xbb\xbf"):
        content = start + json.dumps(TEXTS, indent=indent, ensure_ascii=False).encode()
        found = read(folder, tokenizer, content)
        assert [example.tokens.tolist() for example in found] == [example.tokens.tolist() for example in lines]
        assert found[1].source == f"{tmp_path}/train.json row 2"


def test_json_may_hold_lines_and_jsonl_an_array(tokenizer, folder, tmp_path):
    lines = read(folder, tokenizer, "".join(json.dumps(row) + "\n" for row in TEXTS).encode())
    assert lines[1].source == f"{tmp_path}/train.json:2"
    (tmp_path / "train.json").unlink()
    array = load_datasets(folder(train=json.dumps(TEXTS).encode()), tokenizer).train
    assert array[1].source == f"{tmp_path}/train.jsonl row 2"


@pytest.mark.bad_input("a data set of files that may not be read")
def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    refusal = PermissionError(13, "Permission denied", "a.csv")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=refusal))
    monkeypatch.setattr("deltatune.data.rows.sources.cell_options", Mock(return_value={}))
    with pytest.raises(UserError, match=r"^a.csv: cannot be read \(Permission denied\); expected a readable file"):
        hugging_face(str(tmp_path))


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
        read(folder, tokenizer, json.dumps(TEXTS).encode(), streaming=True)
    with pytest.raises(UserError, match=r"both train.jsonl and train.json hold the train split; keep one of them"):
        read(folder, tokenizer, json.dumps(TEXTS).encode(), train=TEXTS)


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
    assert not [note for note in load_datasets(folder(train=TEXTS, valid=TEXTS), starting).notes if "twice" in note]


# Without a guess, "007" is no 7, "NA" no null and "true" no truth; an empty cell alone is null.
CELLS = ["007", "1.50", "NA", "true", "2026-01-02", "1e5", "a, b; c", ""]
CELL_ROWS = [{"prompt": cell, "completion": "x"} for cell in CELLS]
READ = [{"prompt": cell or None, "completion": "x"} for cell in CELLS]


def write(path, separator=",", rows=CELL_ROWS, **options):
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


@pytest.mark.bad_input("a CSV file with a heading twice")
@pytest.mark.parametrize("separator", [",", ";"])
def test_a_heading_twice_is_refused(tmp_path, separator):
    lines = [["prompt", "", "prompt", "completion", ""], ["a", "", "b", "c", ""]]
    (tmp_path / "faq.csv").write_text("\n".join(map(separator.join, lines)), encoding="utf-8-sig")
    with pytest.raises(UserError, match=r"/faq.csv: 'prompt' heads two columns; rename or remove one"):
        hugging_face(str(tmp_path / "faq.csv"))


@pytest.mark.bad_input("a CSV file that is not UTF-8")
def test_other_encodings_are_named(tmp_path):
    (tmp_path / "old.csv").write_bytes("prompt,completion\na,\xe4\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"old.csv: not UTF-8 \(byte 0xe4\); save the file as UTF-8"):
        hugging_face(str(tmp_path / "old.csv"))


def test_labels_are_read_from_text(tokenizer, folder, tmp_path):
    rows = [{"prompt": "the fox", "completion": "jumps", "label": label} for label in ("True", "false", "1", "0")]
    write(tmp_path / "train.csv", ";", rows)
    train = load_datasets(folder(loss="kto"), tokenizer).train
    assert [one.desirable for one in train] == [True, False, True, False]
    write(tmp_path / "train.csv", ";", [rows[0] | {"label": "maybe"}, *rows])
    with pytest.raises(UserError, match="'label': expected true or false, got 'maybe'"):
        load_datasets(folder(loss="kto"), tokenizer)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """hub(answer) makes the hub answer, or fail with an exception; the list holds the requests."""
    asked: list[str] = []

    def use(answer):
        def urlopen(request, timeout):
            asked.append(request.full_url)
            raise answer

        monkeypatch.setattr(data_sets, "urlopen", urlopen)
        return asked

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    data_sets._answers.cache_clear()
    return use


@pytest.mark.bad_input("--data with a mistyped folder, while the hub cannot be reached")
def test_a_mistyped_folder_is_named_before_the_hub_is_asked(hub, folder, tokenizer, tmp_path, capsys):
    asked = hub(URLError(OSError("no route")))
    (tmp_path / "my-data").mkdir()
    config = folder(data="my-dta")
    for _ in range(2):
        with pytest.raises(UserError, match="my-dta: no such data, neither a folder here nor a data set of the"):
            load_datasets(config, tokenizer)
    assert len(asked) == 1
    assert asked[0].endswith("/api/datasets/my-dta")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("--data my-dta: there is no such folder here (did you mean 'my-data'?); asking the Hugging")
    assert "cannot be reached" in second
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("answer", "offline"),
    [
        (HTTPError("url", 401, "", None, None), False),
        (URLError(ssl.SSLError("no certificate")), False),
        (TimeoutError("timed out"), True),
    ],
)
def test_only_a_hub_that_does_not_answer_is_left_out(hub, answer, offline):
    hub(answer)
    with data_sets.hub_lookup("some/data"):
        assert datasets.config.HF_HUB_OFFLINE is offline


def test_a_current_folder_that_may_not_be_listed_keeps_nothing_from_being_asked(hub, monkeypatch, capsys):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    hub(HTTPError("url", 401, "", None, None))
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert data_sets._answers("some/data")
    assert "--data some/data: there is no such folder here; asking" in capsys.readouterr().err
