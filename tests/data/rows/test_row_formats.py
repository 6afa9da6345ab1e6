"""Rows of OpenAI's, ShareGPT's and Alpaca's formats are read as the conversations that they mean."""

import json

import pytest

from deltatune.data import load_datasets
from deltatune.data.chats.template_probes import MAPPING, TEXT, with_arguments
from deltatune.data.rows.row_formats import Features, RowFormats, join_text_parts, tools_of
from deltatune.data.text import TextEncoder
from deltatune.errors import UserError

CALL = {"name": "find", "arguments": '{"what": "a fox", "deep": [1, {"x": null}]}'}
MEANT = {"name": "find", "arguments": {"what": "a fox", "deep": [1, {"x": None}]}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def messages_of(row, **features):
    return RowFormats(Features(**features)).messages(row, "file:1")


def spoken(*pairs):
    return [{"from": speaker, "value": value} for speaker, value in pairs]


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_sharegpt_rows_are_conversations():
    pairs = [("system", "be brief"), ("human", "a question"), ("gpt", "an answer"), ("tool", "found")]
    meant = said(("system", "be brief"), ("user", "a question"), ("assistant", "an answer"), ("tool", "found"))
    assert messages_of({"conversations": spoken(*pairs)}) == meant
    assert messages_of({"conversations": spoken(*pairs[1:]), "system": "be brief"}) == meant
    # A key of the user's own may hold them as well, and the usual key may hold OpenAI's messages.
    assert messages_of({"talk": spoken(*pairs)}, chat="talk") == meant
    assert messages_of({"conversations": meant}) == meant
    speakers = [("user", "user"), ("assistant", "assistant"), ("model", "assistant"), ("function_response", "tool")]
    for speaker, role in [*speakers, ("observation", "tool"), ("function", "tool")]:
        assert messages_of({"conversations": spoken((speaker, "x"))}) == said((role, "x"))


def test_calls_of_tools_in_sharegpt_rows_and_weights():
    entries = [{"from": "function_call", "value": json.dumps(MEANT)}, {"from": "gpt", "value": "so", "weight": 0}]
    called, answer = messages_of({"conversations": entries})
    assert called["role"] == "assistant"
    assert called["tool_calls"] == [{"type": "function", "function": MEANT}]
    assert answer == {"role": "assistant", "content": "so", "weight": 0}


def test_alpaca_rows_are_a_prompt_and_its_completion():
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "Below is an instruction ..."}
    assert messages_of(row) == said(("user", "Add.\n\n1 and 2"), ("assistant", "3"))
    for empty in ("", None):
        assert messages_of(row | {"input": empty}) == said(("user", "Add."), ("assistant", "3"))
    del row["input"]
    assert messages_of(row | {"system": "s"}) == said(("system", "s"), ("user", "Add."), ("assistant", "3"))


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
        {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": MEANT}]},
        {"content": None, "tool_calls": [CALL]},
        {"content": None, "function_call": CALL},
    ],
)
def test_arguments_of_tools_are_what_the_template_takes(message):
    given = {"role": "assistant"} | message
    before = json.dumps(given)
    read = messages_of({"messages": [given]})
    for form, meant in ((MAPPING, MEANT), (TEXT, MEANT | {"arguments": json.dumps(MEANT["arguments"])})):
        (taken,) = with_arguments(read, form)
        assert [call["function"] for call in taken["tool_calls"]] == [meant]
    assert json.dumps(given) == before
    (empty,) = messages_of({"messages": [given | {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]})
    assert empty["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


def test_tools_may_be_json_in_a_string():
    assert tools_of({"tools": json.dumps([TOOL])}, "file:1") == tools_of({"tools": [TOOL]}, "file:1") == [TOOL]
    assert tools_of({}, "file:1") is tools_of({"tools": None}, "file:1") is None


def test_parts_of_text_are_one_text(tokenizer):
    parts = [{"type": "text", "text": "a ques"}, {"type": "text", "text": "tion", "image": None}]
    rows = [
        {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "an answer"}]}
        for content in (parts, "a question")
    ]
    one, other = (TextEncoder(tokenizer, Features(), None)(row, "file:1")[0] for row in rows)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert "{" not in tokenizer.decode(one.tokens)
    assert join_text_parts(said(("tool", [])), "file:1") == said(("tool", ""))


MISTAKES = {
    "an unknown speaker": ({"conversations": spoken(("narrator", "x"))}, 'expected "from" to be one of human'),
    "a call that is not JSON": ({"conversations": spoken(("function_call", "find"))}, "expected JSON, got str 'find'"),
    "a call without a name": ({"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}]}, "tool call 1: expected"),
    "calls that are no list": ({"messages": [{"role": "a", "tool_calls": "find"}]}, "'tool_calls': expected a list"),
    "arguments that are not JSON": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}]},
        "message 1: tool call 1: 'arguments': expected JSON, got str '{a'",
    ),
    "arguments that are a list": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "message 1: tool call 1: 'arguments': expected an object, or a string that holds one, got list",
    ),
    "an empty output": ({"instruction": "a", "output": " "}, "message 2: empty answer"),
    "an instruction that is a number": ({"instruction": 1, "output": "b"}, "'instruction': expected a string, got int"),
    "an empty conversation": ({"conversations": []}, "empty conversation"),
    "an image": (
        {"messages": said(("user", [{"type": "image", "image": "a.png"}]))},
        "this row has images, and the model was loaded without its vision tower",
    ),
    "tools with a number of too many digits": (
        {"prompt": "a", "completion": "b", "tools": f"[{'1' * 5000}]"}, "'tools': expected JSON, got str '[111",
    ),
    "tools that are not JSON": ({"prompt": "a", "completion": "b", "tools": "[{"}, "'tools': expected JSON, got str '"),
}  # fmt: skip


@pytest.mark.bad_input("a row of data with {name}")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(tokenizer, name):
    row, message = MISTAKES[name]
    with pytest.raises(UserError) as caught:
        TextEncoder(tokenizer, Features(), None)(row, "file:1")
    assert str(caught.value).startswith("file:1: ")
    assert message in str(caught.value)


def test_the_formats_are_said_once(tokenizer, folder):
    talk = {"conversations": spoken(("human", "a question"), ("gpt", "an answer"))}
    alpaca = {"instruction": "a", "output": "b"}
    config = folder(train=[talk, talk, alpaca])
    splits = load_datasets(config, tokenizer)
    assert splits.notes == [
        f"{config.data}/train.jsonl: 2 rows in ShareGPT's format: human is the user, gpt the assistant.",
        f"{config.data}/train.jsonl: 1 row in Alpaca's format: instruction and input are the prompt, output is the "
        "completion.",
        "No validation set: training goes on without validation.",
    ]
    assert splits.rule == "Loss on completions only, every assistant turn only; --no-mask-prompt counts every token."
