"""With public chat templates, each part of a row is in its tokens or counted by its kind."""

import random
from collections import Counter
from pathlib import Path

import pytest

from deltatune.data.rows.row_formats import Features
from deltatune.data.text import TextEncoder
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.models.load import load
from spoken_rows import in_no_token, spoken_row

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.oracle
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = [path.stem for path in sorted(TEMPLATES.glob("*.jinja"))]
# What the templates lose, and so must be counted for some row.
SEEN = {
    "qwen3": {"developer messages"},
    "qwen2_5": {"developer messages"},
    "deepseekv3_training": {"developer messages"},
    "glm4moe": {"developer messages"},
    "phi3": {"developer messages", "tools"},
    "cohere2": {"developer messages"},
    "gptoss": {"system messages", "calls after the first"},
    "llama3_1": {"text beside a call"},
}
# Templates whose prompt begins no answer, that take lists of parts alone, or that want a BOS token.
REFUSED = {
    "deepseek_r1_distill", "idefics3", "idefics3_training", "llama3", "llava_next", "llava_next_training", "smolvlm",
    "smolvlm_training",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return load(MODEL).tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_each_part_is_in_the_tokens_or_counted(tokenizer, name):
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    chance, kinds, read = random.Random(1), Counter(), 0
    for number in range(40):
        row, parts = spoken_row(chance)
        encode = TextEncoder(tokenizer, Features(), None)
        try:
            examples = encode(row, f"row {number}")
        except UserError:
            continue
        text = "\n".join(tokenizer.decode(example.tokens) for example in examples)
        assert encode.unwritten.counts == in_no_token(parts, text.lower()), row
        kinds += encode.unwritten.counts
        read += 1
    assert read or name in REFUSED
    assert set(kinds) >= SEEN.get(name, set())
