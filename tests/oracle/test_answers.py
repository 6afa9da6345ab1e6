"""A generated answer becomes the message that a public chat template, rendered by transformers, writes as it."""

from pathlib import Path

import pytest
import trl

from deltatune.data.chats.answer_parser import AnswerParser
from deltatune.demo.text_demo import MODEL
from deltatune.models.load import load

pytestmark = pytest.mark.oracle
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = [
    path.stem
    for path in sorted(TEMPLATES.glob("*.jinja"))
    if not path.stem.endswith("_training") and "think" in path.read_text(encoding="utf-8")
]
THOUGHT, CONTENT = "I count:\n\n1, 2.", "Two.\n\n    two()"
QUESTION = {"role": "user", "content": "how many?"}
# Gemma 4's template writes no reasoning of an answer that calls no tool; this is as the model writes it.
GEMMA_4 = f"<|channel>thought\n{THOUGHT}\n<channel|>{CONTENT}"
KEYS = ("reasoning_content", "thinking")


@pytest.fixture(scope="module")
def tokenizer():
    return load(MODEL).tokenizer


def answered(tokenizer, thinking):
    """Every message with reasoning that the template writes behind its prompt, and how it is generated."""
    for key in KEYS:
        message = {"role": "assistant", key: THOUGHT, "content": CONTENT}
        options = {"tokenize": False, "enable_thinking": thinking}
        whole = tokenizer.apply_chat_template([QUESTION, message], **options)
        prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, **options)
        if THOUGHT in whole and whole.startswith(prompt):
            yield key, whole[len(prompt) : whole.index(CONTENT) + len(CONTENT)]


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_and_content_are_told_apart(tokenizer, name):
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    parser = AnswerParser(tokenizer, {"enable_thinking": True})
    found = dict(answered(tokenizer, True))
    if name.startswith("gemma4") and name != "gemma4_v2":
        found = {"reasoning_content": GEMMA_4}
    families = ("qwen3_5", "qwen3_6", "qwen3_8", "nemotron", "lfm2_2", "glm4", "gptoss", "muse_glimmer")
    assert found or not (name.startswith(families) or name == "qwen3")
    for answer in found.values():
        told = parser.message(answer)
        assert [told.pop(key) for key in KEYS if key in told] == [THOUGHT]
        assert told == {"role": "assistant", "content": CONTENT}
    told = parser.message(CONTENT)
    assert CONTENT in (told.get("reasoning_content"), told["content"].partition("<think>\n")[2], told["content"])


def test_reasoning_in_several_messages_of_gpt_oss_is_not_refused(tokenizer):
    tokenizer.chat_template = (TEMPLATES / "gptoss.jinja").read_text(encoding="utf-8")
    said = "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
    told = AnswerParser(tokenizer).message(f"{said}<|start|>assistant<|channel|>final<|message|>2")
    assert (told["content"], set(told.values()) - {"assistant", "2"}) == ("2", {"One.\n\nTwo."})
    history = [QUESTION, told, QUESTION]
    assert "<|channel|>final<|message|>2<|end|>" in tokenizer.apply_chat_template(history, tokenize=False)
