from __future__ import annotations

import pytest

from deltatune.data.chat import tokenize_chat
from deltatune.errors import UserError

QUESTION = {"role": "user", "content": "a question"}
ANSWER = {"role": "assistant", "content": "an answer"}
FURTHER = {"role": "user", "content": "another question"}
SECOND = {"role": "assistant", "content": "the second"}
CONVERSATION = [QUESTION, ANSWER, FURTHER, SECOND]


def counted(tokenizer, messages, tools=None, **options) -> list[str]:
    """Return the pieces of text whose tokens count in the loss."""
    tokens, targets = tokenize_chat(
        tokenizer, messages, tools, **({"completions_only": True, "source": "file:1"} | options)
    )
    assert len(tokens) == len(targets)
    pieces, open_piece = [], False
    for token, counts in zip(tokens, targets, strict=True):
        if counts and not open_piece:
            pieces.append([])
        if counts:
            pieces[-1].append(token)
        open_piece = bool(counts)
    return [tokenizer.decode(piece) for piece in pieces]


def test_every_assistant_turn_counts(tokenizer):
    assert counted(tokenizer, CONVERSATION) == ["an answer<|im_end|>\n", "the second<|im_end|>\n"]


def test_a_turn_that_is_not_the_last_message(tokenizer):
    assert counted(tokenizer, CONVERSATION[:3]) == ["an answer<|im_end|>\n"]


def test_every_token_counts_when_asked(tokenizer):
    tokens, targets = tokenize_chat(tokenizer, CONVERSATION, None, completions_only=False, source="file:1")
    assert targets.all()
    assert tokens == tokenizer.apply_chat_template(CONVERSATION)


def test_weight_0_leaves_a_turn_out_and_changes_no_token(tokenizer, tokenizers):
    messages = [QUESTION, ANSWER | {"weight": 0}, FURTHER, SECOND | {"weight": 1}]
    assert counted(tokenizer, messages) == ["the second<|im_end|>\n"]
    assert counted(tokenizers("generation"), messages) == ["the second<|im_end|>\n"]
    assert counted(tokenizer, [QUESTION, ANSWER | {"weight": None}]) == ["an answer<|im_end|>\n"]
    with pytest.raises(UserError, match=r'file:1: message 2: expected "weight" 0 or 1, got 0.5'):
        counted(tokenizer, [QUESTION, ANSWER | {"weight": 0.5}])


def test_the_templates_own_generation_blocks_decide(tokenizers):
    assert counted(tokenizers("generation"), CONVERSATION) == ["an answer<|im_end|>", "the second<|im_end|>"]


def test_turns_in_a_row_and_tool_results(tokenizer):
    result = {"role": "tool", "content": "42"}
    assert counted(tokenizer, [QUESTION, ANSWER, result, SECOND]) == ["an answer<|im_end|>\n", "the second<|im_end|>\n"]
    assert counted(tokenizer, [QUESTION, ANSWER, SECOND]) == ["an answer<|im_end|>\n", "the second<|im_end|>\n"]


def test_a_token_that_closes_the_conversation_alone(tokenizers):
    assert counted(tokenizers("closing"), CONVERSATION) == [
        "an answer<|im_end|>\n",
        "the second<|im_end|>\n<|endoftext|>",
    ]


def test_reasoning_counts_and_its_opening_tag_does_not(tokenizers):
    messages = [QUESTION, ANSWER | {"reasoning_content": "so"}]
    assert counted(tokenizers("thinking"), messages) == ["so\n</think>\n\nan answer<|im_end|>\n"]


def test_an_answer_without_reasoning_follows_the_prompt_without_thinking(tokenizers):
    # The tokens of "<think>\n" are no prefix of those of "<think>\n\n</think>", whose line breaks are one token.
    tokenizer = tokenizers("thinking")
    prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([QUESTION, ANSWER])
    assert whole[: len(prompt)] != prompt
    assert counted(tokenizer, [QUESTION, ANSWER]) == ["an answer<|im_end|>\n"]


def test_rewritten_history_is_named_and_the_remedies_work(tokenizers):
    tokenizer = tokenizers("thinking")
    with pytest.raises(UserError, match=r"file:1: message 2: .*differently once the rest follows.*<think>") as caught:
        counted(tokenizer, CONVERSATION)
    assert '"weight": 0' in str(caught.value)
    assert "--no-mask-prompt" in str(caught.value)
    assert counted(tokenizer, [QUESTION, ANSWER | {"weight": 0}, FURTHER, SECOND]) == ["the second<|im_end|>\n"]
    assert len(counted(tokenizer, CONVERSATION, completions_only=False)) == 1


def test_a_turn_rewritten_after_an_unchanged_prompt_is_named(tokenizers):
    # Qwen3's template writes no thinking in the prompt; the last turn has a block, which it loses later.
    tokenizer = tokenizers("thinking")
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace("assistant\n<think>\n' }}", "assistant\n' }}")
    try:
        with pytest.raises(UserError, match=r"file:1: message 2: .*differently once the rest follows"):
            counted(tokenizer, CONVERSATION)
    finally:
        tokenizer.chat_template = template


def test_an_answer_that_merges_with_its_prompt_is_named(tokenizer):
    with pytest.raises(UserError, match=r"file:1: message 2: .*merges into one token.*remove white space"):
        counted(tokenizer, [QUESTION, {"role": "assistant", "content": "\nan answer"}])


def test_an_answer_to_nothing_is_named(tokenizer):
    with pytest.raises(UserError, match="file:1: message 1: the conversation begins with an assistant turn"):
        counted(tokenizer, CONVERSATION[1:])


def test_what_the_template_refuses_is_named(tokenizers):
    with pytest.raises(UserError, match=r"file:1: the model's chat template refuses.*roles must alternate"):
        counted(tokenizers("strict"), [QUESTION, FURTHER])
    with pytest.raises(UserError, match="file:1: the model's chat template refuses"):
        counted(tokenizers("strict"), [{"role": "user", "content": ["parts"]}])


def test_no_template_is_said(tokenizers):
    with pytest.raises(UserError, match=r'no chat template.*\{"text": ...\}'):
        counted(tokenizers("none"), CONVERSATION)
