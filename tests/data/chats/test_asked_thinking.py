"""Data without reasoning is learnt behind the prompt that closes it, and the trained model is asked so."""

import json

import pytest

from deltatune.data import load_datasets
from deltatune.data.prompts import Question, prompt_tokens
from deltatune.errors import UserError
from deltatune.models.load import Loaded
from deltatune.train.evaluation.samples import Samples

QUESTION = {"role": "user", "content": "a question"}
ANSWER = {"role": "assistant", "content": "an answer"}
THOUGHT = ANSWER | {"reasoning_content": "so"}
PLAIN, REASONED = {"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, THOUGHT]}
CLOSED = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("rows", "given", "asked", "note"),
    [
        ([PLAIN], None, CLOSED, "The answers follow the prompt with enable_thinking false, so samples"),
        ([PLAIN], {"date": "today"}, {"date": "today"} | CLOSED, "The answers follow the prompt with"),
        ([PLAIN], CLOSED, CLOSED, None),
        ([PLAIN], {"enable_thinking": True}, {"enable_thinking": True}, "1 of 1 answers follows the prompt with"),
        ([REASONED], None, None, None),
        ([REASONED], CLOSED, CLOSED, "1 of 1 answers follows the prompt with enable_thinking true; samples"),
        ([PLAIN, REASONED, REASONED], None, None, "1 of 3 answers follows the prompt with enable_thinking false"),
        ([PLAIN | {"chat_template_kwargs": CLOSED}], None, CLOSED, "The answers follow the prompt with"),
        ([PLAIN | {"chat_template_kwargs": '{"enable_thinking": false}'}], None, CLOSED, "The answers follow"),
    ],
)
def test_the_model_is_asked_as_its_answers_were_learnt(tokenizers, folder, rows, given, asked, note):
    tokenizer, config = tokenizers("thinking"), folder(train=rows, chat_template_config=given)
    # The second start takes the tokens from the cache, and must not forget.
    for splits in (load_datasets(config, tokenizer), load_datasets(config, tokenizer)):
        assert splits.template_options == asked
        assert [one.startswith(note or "") for one in splits.notes if "the prompt with enable" in one] == [True] * bool(
            note
        )
    if len(rows) == 1 and (asked is None or given is None):
        example, prompt = splits.train[0], prompt_tokens(tokenizer, Question("a question"), template_options=asked)
        assert example.tokens[: len(prompt)].tolist() == prompt
        assert example.targets.tolist() == [False] * len(prompt) + [True] * (len(example.tokens) - len(prompt))


def test_samples_ask_so(tokenizers, folder, checkpoint, monkeypatch, tmp_path):
    tokenizer = tokenizers("thinking")
    monkeypatch.setattr("deltatune.train.evaluation.samples.check_prompt", lambda *_: None)
    file = tmp_path / "asked.jsonl"
    rows = [{"prompt": "a question"}, {"prompt": "a question", "chat_template_kwargs": {"enable_thinking": True}}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for options in (None, CLOSED):
        config = folder(sample_prompts=["a question", str(file)], chat_template_config=options)
        first, second, opened = Samples(Loaded({}, tokenizer, {}, tmp_path), config).prompts
        expected = [prompt_tokens(tokenizer, Question("a question"), template_options=each) for each in (options, {})]
        assert [first.tokens, second.tokens, opened.tokens] == [expected[0], *expected]


def test_the_templates_own_blocks_are_learnt_behind_the_same_prompt(tokenizers, folder, monkeypatch):
    tokenizer = tokenizers("thinking")
    template = tokenizer.chat_template
    written = "{{ message['content'] + '<|im_end|>\n' }}"
    assert written in template
    marked = template.replace(
        written,
        "{% if message['role'] == 'assistant' %}{% generation %}" + written + "{% endgeneration %}"
        "{% else %}" + written + "{% endif %}",
    )
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", marked)
    assert load_datasets(folder(train=[PLAIN]), tokenizer).template_options == CLOSED


@pytest.mark.bad_input("variables of the chat template that are {what}")
@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        ("a list", [1], "expected a JSON object, got"),
        ("not JSON", "{", "expected JSON, got"),
        ("of another type", {"enable_thinking": "no"}, "enable_thinking: expected true or false, got 'no'"),
        ("deltatune's own", {"tokenize": True}, "'tokenize' is set by this command"),
        ("the tools", {"tools": []}, "'tools' is set by this command"),
    ],
)
def test_bad_variables_are_one_message(tokenizers, folder, what, value, message):
    with pytest.raises(UserError, match=r"train\.jsonl:1: 'chat_template_kwargs': " + message.replace("[", r"\[")):
        load_datasets(folder(train=[PLAIN | {"chat_template_kwargs": value}]), tokenizers("thinking"))
    if isinstance(value, dict):
        with pytest.raises(UserError, match="chat_template_config: " + message):
            folder(chat_template_config=value)
