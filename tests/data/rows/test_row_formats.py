"""Rows of OpenAI's, ShareGPT's and Alpaca's formats are read as the conversations that they mean."""

import json

import pytest

from deltatune.data import load_datasets
from deltatune.data.chats.template_probes import MAPPING, TEXT, with_arguments
from deltatune.data.rows.row_formats import Features, RowFormats, tools_of
from deltatune.data.text import TextEncoder
from deltatune.errors import UserError

CALL = {"name": "find", "arguments": '{"what": "a fox", "deep": [1, {"x": null}]}'}
MEANT = {"name": "find", "arguments": {"what": "a fox", "deep": [1, {"x": None}]}}
FUNCTION = {"name": "find", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


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
    with pytest.raises(UserError, match=r"file:1: 'tools': expected JSON, got str '\[111"):
        tools_of({"tools": f"[{'1' * 5000}]"}, "file:1")


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


def refused(*names, **features):
    with pytest.raises(UserError) as caught:
        RowFormats(Features(**features)).messages(dict.fromkeys(names, "a"), "file:1")
    return str(caught.value)


@pytest.mark.bad_input("a row of data whose columns have other names")
@pytest.mark.parametrize(
    ("names", "flags"),
    [
        (["question", "answer"], "--prompt-column question --completion-column answer"),
        (["id", "Question", "Answer"], "--prompt-column Question --completion-column Answer"),
        (["Prompt", "Completion"], "--prompt-column Prompt --completion-column Completion"),
        (["prompt", "response"], "--completion-column response"),
        (["instruction", "response"], "--prompt-column instruction --completion-column response"),
        (["dialogue"], "--chat-column dialogue"),
        (["content", "question"], "--text-column content"),
    ],
)
def test_columns_of_other_names_are_answered_with_the_flags_that_read_them(names, flags):
    message = refused(*names)
    assert message.endswith(f". To read these columns, give {flags}.")
    assert "did you mean" not in message


def test_unknown_columns_name_the_nearest_and_no_flag():
    assert refused("mesages").endswith("got 'mesages' (did you mean 'messages'?).")
    assert refused("a", "b").endswith("got 'a', 'b'.")


@pytest.mark.bad_input("a file with one object around its rows")
def test_rows_within_an_object_are_asked_for_alone():
    with pytest.raises(UserError, match=r"got 'data'\. If 'data' holds the rows, write its list alone into the file"):
        RowFormats(Features()).messages({"data": [{"prompt": "a", "completion": "b"}]}, "a.json:1")


def test_pairs_of_answers_are_answered_with_the_loss_that_learns_from_them():
    assert refused("prompt", "chosen", "rejected").endswith("of two answers is better, give --loss dpo.")


def test_the_flags_read_the_columns(tokenizer, folder, tmp_path):
    usual = load_datasets(folder(train=[{"prompt": "long", "completion": "short"}]), tokenizer).train
    row = {"question": "long", "answer": "short", "text": "else"}
    named = load_datasets(folder(train=[row], prompt_feature="question", completion_feature="answer"), tokenizer).train
    assert named[0].tokens.tolist() == usual[0].tokens.tolist()
    # Inside hf_dataset, mlx_lm.lora's keys go before the options of the run.
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps(row))
    named = {"prompt_feature": "question", "train_split": "train", "valid_split": "train"}
    entry = {"path": str(tmp_path / "set")} | named
    config = folder(data=None, hf_dataset=entry, prompt_feature="else", completion_feature="answer")
    read = load_datasets(config, tokenizer).train
    assert read[0].tokens.tolist() == usual[0].tokens.tolist()


def test_messages_may_be_json_in_a_cell(tokenizer, folder):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = [{"messages": messages}, {"messages": json.dumps(messages)}, {"conversations": f" {json.dumps(turns)}"}]
    expected, *others = load_datasets(folder(train=rows), tokenizer).train
    assert all(example.tokens.tolist() == expected.tokens.tolist() for example in others)
    with pytest.raises(UserError, match=r"train.jsonl:1: 'messages': expected JSON, got str .*Expecting"):
        load_datasets(folder(train=[{"messages": "[{'role': 'user'}]"}]), tokenizer)


@pytest.mark.bad_input("column names for a loss that learns from preferences")
def test_preferences_have_names_of_their_own(tokenizer, folder):
    config = folder(train=[{"prompt": "a", "chosen": "b", "rejected": "c"}], loss="dpo", prompt_feature="question")
    with pytest.raises(UserError, match=r"train.jsonl: --loss dpo reads prompt, chosen, .* under these names"):
        load_datasets(config, tokenizer)


PAIR = {"prompt": "a question", "completion": "an answer"}
ALPACA = {"instruction": "a question", "output": "an answer"}
SAID = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "left"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "kept"},
]
SPOKEN = [{"from": {"user": "human"}.get(one["role"], "gpt"), "value": one["content"]} for one in SAID]


def counted(tokenizer, row, **options):
    (example,) = TextEncoder(tokenizer, Features(), None, **options)(row, "file:1")
    return tokenizer.decode(example.tokens[example.targets])


@pytest.mark.bad_input("data with answers that are marked as bad ones, imitated")
@pytest.mark.parametrize("value", [False, "false", " False "])
@pytest.mark.parametrize(
    ("row", "name"),
    [(PAIR, "label"), ({"messages": SAID}, "label"), ({"conversations": SPOKEN}, "kto_tag"), (ALPACA, "kto_tag")],
)
def test_a_bad_answer_is_not_imitated(tokenizer, row, name, value):
    with pytest.raises(UserError) as caught:
        counted(tokenizer, row | {name: value})
    assert str(caught.value).startswith(f"file:1: {name!r} is false: this is a bad answer, and it would be imitated.")
    assert "--loss kto" in str(caught.value)
    for good in (True, "true", None):
        assert counted(tokenizer, row | {name: good}) == counted(tokenizer, row)


def test_a_label_may_be_what_is_learnt(tokenizer):
    row = {"review": "a question", "label": "false"}
    (example,) = TextEncoder(tokenizer, Features(prompt="review", completion="label"), None)(row, "file:1")
    assert "false" in tokenizer.decode(example.tokens[example.targets])
    assert TextEncoder(tokenizer, Features(), None)({"text": "a text", "label": False}, "file:1")


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0}, {"loss_weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"masked": True},
        {"train": True, "weight": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_marked_turn_does_not_count(tokenizer, mark):
    kept = {name: True for name in mark if name != "masked"}
    for key, talk in (("messages", SAID), ("conversations", SPOKEN)):
        marked = [talk[0], talk[1] | mark, talk[2], talk[3] | kept]
        learnt = counted(tokenizer, {key: marked})
        assert "kept" in learnt
        assert "left" not in learnt
        assert "left" in counted(tokenizer, {key: talk})


@pytest.mark.bad_input("a message whose mark for training is {mark}")
@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"weight": 0.5}, 'message 2: expected "weight" 0 or 1, got 0.5.'),
        ({"train": "no"}, "message 2: expected \"train\" true or false, got 'no'."),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}, "marks parts of a turn"),
    ],
    ids=["half", "a word", "of a part of it"],
)
def test_a_mark_that_cannot_be_heeded_is_refused(tokenizer, mark, message):
    with pytest.raises(UserError, match="file:1: message 2: ") as caught:
        counted(tokenizer, {"messages": [SAID[0], SAID[1] | mark, *SAID[2:]]})
    assert message in str(caught.value)


NOTED = {
    "score": (PAIR | {"score": 0.1}, "'score': good and bad answers are imitated alike; remove the bad ones"),
    "label": (PAIR | {"label": 0}, "'label': if it tells good answers from bad ones, --loss kto learns from it"),
    "rejected": ({"messages": SAID, "chosen": SAID[3:], "rejected": SAID[1:2]}, "'rejected': only the answer beside"),
    "system": (PAIR | {"system": "be brief"}, "'system': it is read beside conversations and instruction alone"),
    "weight": (ALPACA | {"weight": 0.2}, "'weight': every row counts alike"),
    "audio": (PAIR | {"audio": "a.wav"}, "'audio': sound is not read"),
    "tools": (PAIR | {"tools": [TOOL]}, "'tools', which the model's chat template"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTED)
def test_unread_columns_are_noted(tokenizer, folder, name):
    row, meaning = NOTED[name]
    config = folder(train=[row, PAIR, PAIR | {name: None}])
    for _ in range(2):  # The second start reads kept tokens.
        notes = load_datasets(config, tokenizer).notes
        assert any(note.startswith(f"{config.data}/train.jsonl: 1 row has {meaning}") for note in notes), notes


def test_columns_that_are_read_are_not_noted(tokenizer, folder):
    config = folder(train=[ALPACA | {"system": "s", "label": True}, {"conversations": SPOKEN, "system": "s"}])
    assert not any(" row has " in note or " rows have " in note for note in load_datasets(config, tokenizer).notes)


def test_marks_that_an_option_overrides_are_noted(tokenizer, folder):
    marked = {"messages": [SAID[0], SAID[1] | {"weight": 0}, *SAID[2:]]}
    notes = load_datasets(folder(train=[marked, PAIR], mask_prompt=False), tokenizer).notes
    assert any("1 row has turns that are marked not to count, which --no-mask-prompt counts" in one for one in notes)


def test_earlier_turns_of_alpaca_rows_come_first(tokenizer):
    row = ALPACA | {"system": "be brief", "history": [["an earlier one", "its answer"]]}
    (example,) = TextEncoder(tokenizer, Features(), None)(row, "file:1")
    whole, learnt = tokenizer.decode(example.tokens), tokenizer.decode(example.tokens[example.targets])
    parts = ["be brief", "an earlier one", "its answer", "a question", "an answer"]
    assert [whole.index(part) for part in parts] == sorted(whole.index(part) for part in parts)
    assert "an answer" in learnt
    assert "its answer" not in learnt
    with pytest.raises(UserError, match="'history' 1: expected \\[question, answer\\]"):
        counted(tokenizer, ALPACA | {"history": ["an earlier one"]})


def test_functions_are_tools_of_an_older_form():
    assert tools_of({"functions": [FUNCTION]}, "file:1") == [{"type": "function", "function": FUNCTION}]
    assert tools_of({"functions": json.dumps([FUNCTION]), "tools": None}, "file:1") == tools_of(
        {"functions": [FUNCTION]}, ""
    )


@pytest.mark.bad_input("calls of tools for a chat template that does not write them")
def test_calls_that_the_template_does_not_write_are_refused(tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {}}}]}
    with pytest.raises(UserError, match="message 2: the model's chat template does not write calls of tools"):
        counted(tokenizer, {"messages": [SAID[0], call]})
