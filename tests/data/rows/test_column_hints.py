"""The message on a row of no known format, and the columns to read in its place."""

import json

import pytest

from deltatune.data import load_datasets
from deltatune.data.rows.row_formats import Features, RowFormats
from deltatune.errors import UserError


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
        (["Prompt", "my answer", "Answer "], "--prompt-column Prompt --completion-column 'Answer '"),
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
