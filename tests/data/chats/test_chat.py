"""Which tokens of a conversation count in the loss, and which roles its messages may have."""

import json

import pytest

from deltatune.data import load_datasets
from deltatune.data.prompts import Question, prompt_tokens
from deltatune.data.rows.row_formats import Features
from deltatune.data.text import ROLES, TextEncoder, check_template
from deltatune.errors import UserError
from deltatune.models.load import Loaded
from deltatune.options.config import TrainConfig
from deltatune.train.evaluation.samples import Samples

QUESTION = {"role": "user", "content": "a question"}
ANSWER = {"role": "assistant", "content": "an answer"}
FURTHER = {"role": "user", "content": "another question"}
SECOND = {"role": "assistant", "content": "the second"}
CONVERSATION = [QUESTION, ANSWER, FURTHER, SECOND]
THOUGHT = {"reasoning_content": "so"}


def rows_of(tokenizer, messages, *, mask_prompt=None, last_turn=False):
    encode = TextEncoder(tokenizer, Features(), mask_prompt, last_turn=last_turn)
    return encode({"messages": messages}, "file:1")


def counted(tokenizer, messages, **options) -> list[list[str]]:
    rows = []
    for example in rows_of(tokenizer, messages, **options):
        pieces, open_piece = [], False
        for token, counts in zip(example.tokens, example.targets, strict=True):
            if counts and not open_piece:
                pieces.append([])
            if counts:
                pieces[-1].append(token)
            open_piece = bool(counts)
        rows.append([tokenizer.decode(piece) for piece in pieces])
    return rows


BOTH = [["an answer<|im_end|>\n", "the second<|im_end|>\n"]]
COUNTED = {
    "every turn": ("plain", CONVERSATION, BOTH),
    "a question at the end": ("plain", CONVERSATION[:3], [BOTH[0][:1]]),
    "a result of a tool": ("plain", [QUESTION, ANSWER, {"role": "tool", "content": "42"}, SECOND], BOTH),
    "turns in a row": ("plain", [QUESTION, ANSWER, SECOND], BOTH),
    "blocks of the template": ("generation", CONVERSATION, [["an answer<|im_end|>", "the second<|im_end|>"]]),
    "a token that closes the conversation": (
        "closing", CONVERSATION, [["an answer<|im_end|>\n", "the second<|im_end|>\n<|endoftext|>"]],
    ),
    "reasoning, and not its opening tag": (
        "thinking", [QUESTION, ANSWER | THOUGHT], [["so\n</think>\n\nan answer<|im_end|>\n"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_the_turns_of_the_assistant_count(tokenizers, name):
    template, messages, expected = COUNTED[name]
    assert counted(tokenizers(template), messages) == expected


def test_the_last_turn_alone_counts_when_asked(tokenizer, tokenizers):
    for template in ("plain", "closing", "thinking"):
        ((answer,),) = counted(tokenizers(template), CONVERSATION, last_turn=True)
        assert answer.startswith("the second<|im_end|>\n")
    assert counted(tokenizers("generation"), CONVERSATION, last_turn=True) == [["the second<|im_end|>\n"]]
    assert counted(tokenizer, CONVERSATION[:3], last_turn=True) == [["an answer<|im_end|>\n"]]
    # Of the turns that may count, the last one does.
    weighted = [QUESTION, ANSWER, FURTHER, SECOND | {"weight": 0}]
    assert counted(tokenizer, weighted, last_turn=True) == [["an answer<|im_end|>\n"]]


def test_weight_0_leaves_a_turn_out_and_changes_no_token(tokenizer, tokenizers):
    messages = [QUESTION, ANSWER | {"weight": 0}, FURTHER, SECOND | {"weight": 1}]
    assert counted(tokenizer, messages) == [["the second<|im_end|>\n"]]
    assert counted(tokenizers("generation"), messages) == [["the second<|im_end|>\n"]]
    assert counted(tokenizers("thinking"), messages) == [["the second<|im_end|>\n"]]
    assert counted(tokenizer, [QUESTION, ANSWER | {"weight": None}]) == [["an answer<|im_end|>\n"]]
    with pytest.raises(UserError, match=r'file:1: message 2: expected "weight" 0 or 1, got 0.5'):
        counted(tokenizer, [QUESTION, ANSWER | {"weight": 0.5}])


def test_an_end_token_that_differs_within_a_conversation(tokenizers, monkeypatch):
    # OLMo 3 ends the last answer with one end token and those before it with another.
    tokenizer = tokenizers("plain")
    last = "('<|endoftext|>' if loop.last and message['role'] == 'assistant' else '<|im_end|>\n')"
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", tokenizer.chat_template.replace("'<|im_end|>\n'", last))
    ends = set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    monkeypatch.setattr(tokenizer, "_eos_token_ids", ends)
    assert counted(tokenizer, CONVERSATION) == [["an answer<|im_end|>", "the second<|endoftext|>"]]
    # Where generation does not stop at it, the earlier answer is learnt with the end at which it does.
    monkeypatch.setattr(tokenizer, "_eos_token_ids", ends - {tokenizer.convert_tokens_to_ids("<|im_end|>")})
    tokenizer._tokenizer.eos_token = "<|endoftext|>"
    try:
        assert counted(tokenizer, CONVERSATION) == [["an answer<|endoftext|>"], ["the second<|endoftext|>"]]
    finally:
        tokenizer._tokenizer.eos_token = "<|im_end|>"


def test_an_answer_that_does_not_begin_with_its_prompt_is_named(tokenizer, monkeypatch):
    other = tokenizer.chat_template.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>robot\n' }}")
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", other)
    with pytest.raises(UserError, match=r"file:1: message 4: .*differently from the prompt.*'.*robot.*' became "):
        counted(tokenizer, CONVERSATION)


@pytest.mark.bad_input("an answer that merges with its prompt")
def test_an_answer_that_merges_with_its_prompt_is_named(tokenizer):
    with pytest.raises(UserError, match=r"file:1: .*merges into one token.*remove white space"):
        counted(tokenizer, [QUESTION, {"role": "assistant", "content": "\nan answer"}])


@pytest.mark.bad_input("a conversation that begins with an answer")
def test_an_answer_to_nothing_is_named(tokenizer):
    with pytest.raises(UserError, match="file:1: message 1: the conversation begins with an assistant turn"):
        counted(tokenizer, CONVERSATION[1:])


@pytest.mark.bad_input("a chat for a tokenizer without chat template")
def test_no_template_is_said(tokenizers):
    with pytest.raises(UserError, match=r'no chat template.*\{"text": ...\}'):
        counted(tokenizers("none"), CONVERSATION)


TEMPLATE = "{% for m in messages %}{% if m.role == 'observer' %}?{% endif %}{{ m.role }}{{ m.content }}{% endfor %}"


def said(*roles):
    return [{"role": role, "content": "x"} for role in roles]


@pytest.mark.bad_input("a row of data with the role `usr`")
def test_a_mistyped_role_is_refused(tokenizer):
    encode = TextEncoder(tokenizer, Features(), TrainConfig.mask_prompt)
    message = r"a.jsonl:3: message 2: unknown role 'usr' \(did you mean 'user'\?\); expected system, developer, user, "
    with pytest.raises(UserError, match=message):
        encode({"messages": said("system", "usr", "assistant")}, "a.jsonl:3")
    assert encode({"messages": said("system", "user", "assistant", "function", "assistant")}, "a.jsonl:3")


def test_common_roles_and_those_of_the_template_are_known():
    check_template(said(*ROLES, "observer"), TEMPLATE, "row 1")
    for role in ("observe", "m", "OBSERVER"):
        with pytest.raises(UserError, match="row 1: message 1: unknown role"):
            check_template(said(role), TEMPLATE, "row 1")
    check_template(said("anything"), None, "row 1")


REASONED_ANSWER = ANSWER | {"reasoning_content": "so"}
PLAIN, REASONED = {"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, REASONED_ANSWER]}
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
