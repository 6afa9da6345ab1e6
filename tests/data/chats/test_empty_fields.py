"""Rows of chats as programs write them: empty fields are absent, and a prompt and its completion may be messages."""

import pytest

from deltatune.data.rows.row_formats import Features
from deltatune.data.text import TextEncoder
from deltatune.errors import UserError

QUESTION, ANSWER = {"role": "user", "content": "the dog"}, {"role": "assistant", "content": "a fox"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": '{"what": "dog"}'}}
TOOL = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": {"type": "object"}}}
# As in Llama 3.1's and LFM2.5's, the presence of a key decides.
STRICT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.thinking is defined %}<think>{{ message.thinking }}</think>{% endif %}"
    "{% if 'tool_calls' in message %}"
    "{% if message.tool_calls|length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{{ message.tool_calls[0].function.name }}({{ message.tool_calls[0].function.arguments|tojson }})"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def shown(tokenizers, monkeypatch):
    """shown(row, mask_prompt=None) -> the text of the row's tokens, and that of its target tokens."""
    tokenizer = tokenizers("plain")
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", STRICT)

    def show(row, mask_prompt=None):
        (example,) = TextEncoder(tokenizer, Features(), mask_prompt)(row, "file:1")
        return [tokenizer.decode(tokens) for tokens in (example.tokens, example.tokens[example.targets])]

    return show


EMPTY = {
    "calls": {"tool_calls": []},
    "a call": {"function_call": None},
    "reasoning": {"reasoning_content": "", "thinking": None, "reasoning": ""},
    "a name": {"name": None, "tool_call_id": "", "refusal": None, "annotations": [], "audio": {}},
    "a mark": {"weight": None, "train": ""},
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_field_is_absent(shown, name):
    row = {"messages": [QUESTION | EMPTY[name], ANSWER | EMPTY[name]], "prompt": "", "completion": ""}
    plain = shown({"messages": [QUESTION, ANSWER]})
    assert shown(row | {"tools": [], "functions": None, "chat_template_kwargs": {}}) == plain
    assert shown(row | {"tools": "", "chat_template_kwargs": ""}) == plain


def test_a_call_with_empty_fields_is_one_without_them(shown):
    plain = {"role": "assistant", "tool_calls": [CALL]}
    dumped = plain | {"content": None, "tool_calls": [CALL | {"index": None}], "function_call": None}
    texts = [shown({"messages": [QUESTION, call]}) for call in (plain, dumped)]
    assert texts[0] == texts[1]
    assert "find(" in texts[0][1]


def test_an_empty_answer_is_refused_where_it_counts(shown):
    silent = ANSWER | {"content": ""}
    with pytest.raises(UserError, match="message 2: empty answer"):
        shown({"messages": [QUESTION, silent]}, mask_prompt=False)
    assert shown({"messages": [QUESTION, silent | {"weight": 0}, QUESTION, ANSWER]})


def test_a_prompt_and_a_completion_may_be_messages(shown):
    before = [{"role": "system", "content": "over"}, QUESTION, ANSWER | {"content": "jumps"}, QUESTION]
    whole = {"messages": [*before[:2], before[2] | {"weight": 0}, before[3], ANSWER]}
    assert shown({"prompt": before, "completion": [ANSWER]}) == shown(whole)
    # A call of a tool and its result may stand in the completion.
    calls = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "a dog"}, ANSWER]
    row, whole = {"prompt": [QUESTION], "completion": calls}, {"messages": [QUESTION, *calls]}
    assert shown(row | {"tools": [TOOL]}) == shown(whole | {"tools": [TOOL]})
