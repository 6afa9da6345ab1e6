"""Rows in Arrow's formats give the tokens of the same rows in JSONL, although Arrow adds nulls to nested objects."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest

from deltatune.data import load_datasets
from deltatune.data.rows.sources import as_written


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
