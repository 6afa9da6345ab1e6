"""Rows in Arrow's formats give the tokens of the same rows in JSONL, although Arrow adds nulls to nested objects."""

import csv
import io
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from deltatune.data import load_datasets
from deltatune.data.datasets import first_image
from deltatune.data.rows.sources import as_written
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig


def tool(name, properties, **more):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def call(name, arguments):
    return [{"type": "function", "function": {"name": name, "arguments": arguments}}]


ROWS = [
    {
        "messages": [
            {"role": "user", "content": "weather in Rome?"},
            {"role": "assistant", "content": None, "tool_calls": call("weather", {"city": "Rome"})},
            {"role": "tool", "content": "sun"},
            {"role": "assistant", "content": "Sun.", "reasoning_content": "They say sun."},
        ],
        "tools": [tool("weather", {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, description="the weather")],
    },
    {
        "messages": [
            {"role": "user", "content": "add 2 and 3"},
            {"role": "assistant", "content": None, "tool_calls": call("add", {"a": 2, "b": {"c": 3}})},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "5.", "weight": 1},
        ],
        "tools": [tool("add", {"a": {"type": "number"}, "b": {"type": "object", "minimum": 0}}), tool("now", {})],
    },
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]},
]


@pytest.fixture
def qwen(tokenizers, tmp_path):
    from mlx_lm.tokenizer_utils import load

    inner = tokenizers("thinking")._tokenizer
    folder = tmp_path / "tokenizer"
    inner.save_pretrained(folder)
    template = Path(__file__).parents[1] / "templates" / "qwen3_5.jinja"
    (folder / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    return load(folder)


def write(form, folder, rows):
    folder.mkdir()
    data = datasets.Dataset.from_list(rows)
    if form == "parquet":
        data.to_parquet(str(folder / "train.parquet"))
    elif form == "save_to_disk":
        datasets.DatasetDict({"train": data}).save_to_disk(str(folder))
    elif form == "arrow":
        data.save_to_disk(str(folder / "saved"))
        (folder / "saved" / "data-00000-of-00001.arrow").rename(folder / "train.arrow")
    else:
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["parquet", "save_to_disk", "arrow", "jsonl of another name"])
def test_the_tokens_are_those_of_the_same_rows_in_jsonl(qwen, folder, tmp_path, monkeypatch, form, streaming):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    expected = load_datasets(folder(train=ROWS), qwen).train
    text = qwen.decode(np.concatenate([example.tokens for example in expected]).tolist())
    # The checks below would say nothing if the template wrote no arguments or schemas.
    assert "Rome" in text
    assert "minimum" in text
    config = folder(streaming=streaming, data=write(form, tmp_path / "set", ROWS))
    found = load_datasets(config, qwen).train
    assert [example.tokens.tolist() for example in found] == [example.tokens.tolist() for example in expected]
    assert [example.targets.tolist() for example in found] == [example.targets.tolist() for example in expected]


def test_nulls_that_a_line_of_json_holds_stay(qwen, folder):
    rows = [{"messages": [ROWS[0]["messages"][0], {**ROWS[0]["messages"][1], "tool_calls": call("f", {"city": None})}]}]
    (example,) = load_datasets(folder(train=rows), qwen).train
    assert "city" in qwen.decode(example.tokens.tolist())


def test_nulls_added_by_arrow_are_removed():
    text = datasets.Value("string")
    parts = {"type": text, "text": text, "image": text}
    features = {
        "messages": [{"role": text, "content": text, "name": text}],
        "parts": datasets.List(parts) if hasattr(datasets, "List") else [parts],
        "enum": [text],
        "count": datasets.Value("int64"),
    }
    row = {
        "messages": [{"role": "assistant", "content": None, "name": None}, {"role": None, "content": None}],
        "parts": [{"type": "text", "text": "a", "image": None}, None],
        "enum": ["a", None],
        "count": None,
    }
    written = {
        "messages": [{"role": "assistant"}, {}],
        "parts": [{"type": "text", "text": "a"}, None],
        "enum": ["a", None],
        "count": None,
    }
    assert as_written(row, features) == written
    # A stream may have no description of its columns.
    assert as_written(row, None) == written
    # A column that is no struct, such as one of images or of JSON, holds its own objects.
    assert as_written({"image": {"path": None}}, {"image": datasets.Image()}) == {"image": {"path": None}}


TEXTS = 101
ANSWER = {"role": "assistant", "content": "blue"}


def picture(shade=0):
    content = io.BytesIO()
    Image.new("RGB", (32, 32), (shade, 0, 200)).save(content, "PNG")
    return content.getvalue()


def asked(content="What colour?"):
    return [{"role": "user", "content": content}, ANSWER]


def part(value):
    return [{"type": "image", "image": value}, {"type": "text", "text": "What colour?"}]


TEXT = [{"type": "text", "text": "What colour?"}]
FILE = {"bytes": picture(), "path": None}
# For each shape of rows: one without an image, one with an image, and the library's types where it cannot guess them.
SHAPES = {
    "a column of images": (
        {"messages": asked(), "images": []},
        {"messages": asked("<image>What?"), "images": [FILE]},
        {"images": datasets.List(datasets.Image())},
    ),
    "a column of paths": ({"prompt": "a", "completion": "b", "image": None},
                          {"prompt": "a", "completion": "b", "image": "a.png"}, {}),
    "a part": ({"messages": asked(TEXT)[:1]}, {"messages": asked(part("a.png"))[:1]}, {}),
    "JSON in a text": ({"messages": json.dumps(asked())}, {"messages": json.dumps(asked(part("a.png")))}, {}),
    "JSON in a column of objects": (
        {"messages": asked()},
        {"messages": asked(part("a.png"))},
        {"messages": datasets.List(datasets.Json())},
    ),
    "a column of videos": ({"messages": asked(), "videos": []}, {"messages": asked(), "videos": ["a.mp4"]}, {}),
    "preferences": (
        {"prompt": "a", "chosen": json.dumps([ANSWER]), "rejected": "b"},
        {"prompt": json.dumps(asked(part("a.png"))[:1]), "chosen": json.dumps([ANSWER]), "rejected": "b"},
        {},
    ),
}  # fmt: skip
WRITERS = {
    "Parquet": lambda table, folder: table.to_parquet(str(folder / "train.parquet")),
    "save_to_disk": lambda table, folder: datasets.DatasetDict({"train": table}).save_to_disk(str(folder)),
    "several tables of Arrow": lambda table, folder: table.to_parquet(str(folder / "train.parquet"), batch_size=7),
}


@pytest.mark.parametrize(
    ("shape", "writer"),
    [
        pytest.param(shape, writer, marks=[pytest.mark.weekly] if writer != "Parquet" and shape != "a part" else [])
        for shape in SHAPES
        for writer in WRITERS
    ],
)
def test_an_image_behind_many_texts_is_found(shape, writer, tmp_path, monkeypatch):
    monkeypatch.setattr("deltatune.data.rows.sources._TABLE_ROWS", 50)
    plain, pictured, types = SHAPES[shape]
    rows = [plain] * TEXTS + [pictured] + [plain] * 3
    features = None
    if types:
        known = {"messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})}
        features = datasets.Features({**known, **types})
    WRITERS[writer](datasets.Dataset.from_list(rows, features=features), tmp_path)
    config = TrainConfig(data=str(tmp_path), loss="dpo" if shape == "preferences" else "sft")
    where = f"{tmp_path}/train.parquet row {TEXTS + 1}"
    if writer == "save_to_disk":
        where = f"{tmp_path} [train] row {TEXTS}"
    assert first_image(config) == (f"{where}, in a video" if "video" in shape else where)


def test_an_image_behind_many_texts_of_csv_is_found(tmp_path):
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion", "image"])
        writer.writerows([["a", "b", ""]] * TEXTS + [["a", "b", "a.png"]])
    assert first_image(TrainConfig(data=str(tmp_path))) == f"{tmp_path}/train.csv row {TEXTS + 1}"


@pytest.mark.parametrize("name", [r"\u0069mages", r"image\u0073"])
def test_an_image_under_an_escaped_key_is_found(name, tmp_path):
    (tmp_path / "train.jsonl").write_text(f'{{"prompt": "a", "completion": "b", "{name}": ["a.png"]}}\n')
    assert first_image(TrainConfig(data=str(tmp_path))) == f"{tmp_path / 'train.jsonl'}:1"


def test_text_alone_has_no_image(tmp_path):
    rows = [{"messages": asked('an "image" and images of "videos"'), "image": None}] * 3
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    assert first_image(TrainConfig(data=str(tmp_path))) is None


@pytest.mark.bad_input("rows with images for a model that was loaded without its vision tower")
def test_images_are_never_dropped(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": asked(), "images": ["a.png"]}))
    with pytest.raises(UserError, match=r"train.jsonl:1: this row has images, and the model was loaded without its"):
        load_datasets(TrainConfig(data=str(tmp_path), batch_size=1), tokenizer)
