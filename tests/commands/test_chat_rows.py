"""Rows of chats, as programs and people write them, as the command shows them: target tokens and refusals."""

import json
from pathlib import Path

import pytest

from console import called

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
def shown(tiny_checkpoint, tmp_path):
    """shown(rows, *flags, template=None) -> the output of --show-batch, or the exit code and the error."""

    def show(rows, *flags, template=None):
        options = {} if template is None else {"chat_template": template}
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = ["--model", tiny_checkpoint("qwen3", **options), "--data", tmp_path, "--adapter-path", "none", *flags]
        done = called("train", *options, "--batch-size", len(rows), "--show-batch")
        return done.stdout if done.returncode == 0 else (done.returncode, done.stderr)

    return show


def batch(text):
    assert isinstance(text, str), text
    return text[text.index("<|im_start|>") :]


EMPTY = {
    "calls": {"tool_calls": []},
    "a call": {"function_call": None},
    "reasoning": {"reasoning_content": "", "thinking": None, "reasoning": ""},
    "a name": {"name": None, "tool_call_id": "", "refusal": None, "annotations": [], "audio": {}},
    "a mark": {"weight": None, "train": ""},
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_field_is_absent(shown, name):
    dumped = [QUESTION | EMPTY[name], ANSWER | EMPTY[name]]
    row = {
        "messages": dumped,
        "tools": [],
        "functions": None,
        "chat_template_kwargs": {},
        "prompt": "",
        "completion": "",
    }
    plain = batch(shown([{"messages": [QUESTION, ANSWER]}], template=STRICT))
    assert batch(shown([row], template=STRICT)) == plain
    assert batch(shown([row | {"tools": "", "chat_template_kwargs": ""}], template=STRICT)) == plain


def test_a_call_with_empty_fields_is_one_without_them(shown):
    plain = {"role": "assistant", "tool_calls": [CALL]}
    dumped = plain | {"content": None, "tool_calls": [CALL | {"index": None}], "function_call": None}
    texts = [batch(shown([{"messages": [QUESTION, call]}], template=STRICT)) for call in (plain, dumped)]
    assert texts[0] == texts[1]
    assert "find(" in texts[0]


SILENT = {
    "null": {"messages": [QUESTION, ANSWER | {"content": None}]},
    "an empty text": {"messages": [QUESTION, ANSWER | {"content": ""}]},
    "blanks": {"messages": [QUESTION, ANSWER | {"content": " \n"}]},
    "an empty part": {"messages": [QUESTION, ANSWER | {"content": [{"type": "text", "text": ""}]}]},
    "a second answer": {"messages": [QUESTION, ANSWER, QUESTION, ANSWER | {"content": ""}]},
    "ShareGPT's": {"conversations": [{"from": "human", "value": "the dog"}, {"from": "gpt", "value": None}]},
    "Alpaca's": {"instruction": "the dog", "output": ""},
    "a completion": {"prompt": "the dog", "completion": " "},
    "a completion in messages": {"prompt": [QUESTION], "completion": [ANSWER | {"content": ""}]},
}


@pytest.mark.bad_input("an answer that says nothing: {name}")
@pytest.mark.parametrize("name", SILENT)
def test_an_empty_answer_is_refused_whatever_the_format(shown, name):
    for flags in ([], ["--no-mask-prompt"]):
        code, said = shown([SILENT[name]], *flags)
        assert code == 2
        assert "train.jsonl:1: " in said
        assert "empty answer" in said or "no message has content" in said


def test_an_empty_answer_that_does_not_count_is_no_matter(shown):
    assert batch(shown([{"messages": [QUESTION, ANSWER | {"content": "", "weight": 0}, QUESTION, ANSWER]}]))


def test_a_prompt_and_a_completion_may_be_messages(shown):
    before = [{"role": "system", "content": "over"}, QUESTION, ANSWER | {"content": "jumps"}, QUESTION]
    whole = {"messages": [*before[:2], before[2] | {"weight": 0}, before[3], ANSWER]}
    assert batch(shown([{"prompt": before, "completion": [ANSWER]}])) == batch(shown([whole]))
    # A call of a tool and its result may stand in the completion.
    calls = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "a dog"}, ANSWER]
    row = {"prompt": [QUESTION], "completion": calls, "tools": [TOOL]}
    whole = {"messages": [QUESTION, *calls], "tools": [TOOL]}
    assert batch(shown([row], template=STRICT)) == batch(shown([whole], template=STRICT))


@pytest.mark.bad_input("a completion of messages that says the prompt again")
def test_a_completion_that_repeats_the_prompt_is_refused(shown):
    code, said = shown([{"prompt": [QUESTION], "completion": [QUESTION | {"name": ""}, ANSWER]}])
    assert code == 2
    assert "train.jsonl:1: completion repeats the prompt" in said


def test_a_row_has_the_thinking_of_the_prompt_that_begins_it(shown):
    """Qwen3.8's prompt with reasoning begins no answer without, and its system message differs."""
    template = (Path(__file__).parents[1] / "data" / "templates" / "qwen3_8.jinja").read_text(encoding="utf-8")
    rows = [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, ANSWER | {"reasoning_content": "jumps"}]}]
    for flags in ([], ["--chat-template-config", '{"enable_thinking": false}'], ["--no-mask-prompt"]):
        plain, reasoned = (batch(shown([row], *flags, template=template)) for row in rows)
        assert "Reasoning effort" not in plain
        assert "Reasoning effort" in reasoned
        if "--no-mask-prompt" not in flags:
            assert "⟦a fox" in plain.replace("⟧⟦", "")
            assert "⟦jumps" in reasoned.replace("⟧⟦", "")
        assert batch(shown(rows, *flags, template=template))


TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
DEVELOPER = [{"role": "developer", "content": "only in French"}, QUESTION, ANSWER]
LOST = {
    "developer": (
        {"messages": DEVELOPER},
        (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8"),
        "1 developer message is in no token, because the model's chat template does not write it; use the role "
        "'system'.",
    ),
    "beside": (
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "content": "let me look", "tool_calls": [CALL]},
                {"role": "tool", "content": "sun", "tool_call_id": "call00000", "name": "find"},
                ANSWER,
            ]
        },
        STRICT,
        "1 answer has text beside a call of a tool, which the model's chat template does not write, so it is not "
        "learnt; put the text into a message of its own before the call.",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_texts_that_the_template_does_not_write_are_noted(tiny_checkpoint, tmp_path, name):
    row, template, note = LOST[name]
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    flags = ["--model", tiny_checkpoint("qwen3", chat_template=template), "--data", tmp_path, "--batch-size", 1]
    for command in (["train", *flags, "--adapter-path", "none", "--show-batch"], ["eval", *flags]):
        done = called(*command)
        assert done.returncode == 0, done.stderr
        assert note in " ".join((done.stdout + done.stderr).split())
        assert "French" not in done.stdout.partition("<|im_start|>")[2]
