"""A row's mark of its answer, or a message's of its turn, is heeded, refused or noted, and never passed over."""

import json

import pytest

from deltatune.data import load_datasets
from deltatune.data.rows.row_formats import tools_of
from deltatune.data.text import Features, TextEncoder
from deltatune.errors import UserError

PAIR = {"prompt": "a question", "completion": "an answer"}
ALPACA = {"instruction": "a question", "output": "an answer"}
SAID = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "left"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "kept"},
]
SPOKEN = [{"from": {"user": "human"}.get(one["role"], "gpt"), "value": one["content"]} for one in SAID]
TOOL = {"name": "find", "parameters": {"type": "object", "properties": {}}}


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
    "tools": (PAIR | {"tools": [{"type": "function", "function": TOOL}]}, "'tools', which the model's chat template"),
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
    assert tools_of({"functions": [TOOL]}, "file:1") == [{"type": "function", "function": TOOL}]
    assert tools_of({"functions": json.dumps([TOOL]), "tools": None}, "file:1") == tools_of({"functions": [TOOL]}, "")


@pytest.mark.bad_input("calls of tools for a chat template that does not write them")
def test_calls_that_the_template_does_not_write_are_refused(tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {}}}]}
    with pytest.raises(UserError, match="message 2: the model's chat template does not write calls of tools"):
        counted(tokenizer, {"messages": [SAID[0], call]})
