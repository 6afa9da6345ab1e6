import types
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.tuner import datasets as upstream

from deltatune.data import Example
from deltatune.data.rows.row_formats import Features
from deltatune.data.text import TextEncoder
from deltatune.errors import UserError

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
ROWS = {
    "text": {"text": "the quick brown fox\n\njumps, \u00fcber \U0001f600"},
    "text with its end": {"text": "the lazy dog<|im_end|>"},
    "completion": {"prompt": "what is the answer?", "completion": " forty two "},
    "completion with tools": {"prompt": "a question", "completion": "an answer", "tools": TOOLS},
    "chat": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": "an answer"},
            {"role": "user", "content": "and then?"},
            {"role": "assistant", "content": "the end"},
        ]
    },
}


def encoder(tokenizer, mask_prompt=None, **names) -> Callable[[Any, str], Example]:
    def encode(row, source):
        (example,) = TextEncoder(tokenizer, Features(**names), mask_prompt)(row, source)
        return example

    return encode


@pytest.mark.parametrize("template", ["plain", "generation", "thinking"])
@pytest.mark.parametrize("name", ROWS)
def test_tokens_are_mlx_lms(tokenizers, template, name):
    tokenizer, row = tokenizers(template), ROWS[name]
    theirs = upstream.create_dataset([row], tokenizer, types.SimpleNamespace(mask_prompt=False))
    tokens, offset = theirs.process(row)
    ours = encoder(tokenizer, False)(row, "file:1")
    assert ours.tokens.tolist() == tokens
    assert offset == 0
    assert ours.targets.tolist() == [False] + [True] * (len(tokens) - 1)


@pytest.mark.parametrize("name", [name for name in ROWS if "text" not in name])
def test_the_last_turn_starts_where_mlx_lms_does(tokenizer, name):
    row = ROWS[name]
    theirs = upstream.create_dataset([row], tokenizer, types.SimpleNamespace(mask_prompt=True))
    tokens, offset = theirs.process(row)
    ours = encoder(tokenizer, True)(row, "file:1")
    assert ours.tokens.tolist() == tokens
    assert ours.targets[offset:].all()
    assert not ours.targets[offset - 1]


def test_empty_after_the_template(tokenizers):
    tokenizer = tokenizers("empty")
    with pytest.raises(UserError, match="file:1: empty after the chat template"):
        encoder(tokenizer)(ROWS["chat"], "file:1")


def test_a_named_key_that_is_missing_is_not_passed_over(tokenizer):
    message = (
        r"""expected "question" and "completion", got 'qestion' \(did you mean 'question'\?\), 'completion', 'text'"""
    )
    with pytest.raises(UserError, match=message):
        encoder(tokenizer, prompt="question")({"qestion": "a", "completion": "b", "text": "c"}, "file:1")


def test_mask_prompt_has_no_meaning_for_text(tokenizer):
    with pytest.raises(
        UserError, match="file:1: --mask-prompt leaves prompts out of the loss, and a text line has none"
    ):
        encoder(tokenizer, True)(ROWS["text"], "file:1")
