"""A Modelfile's template is that of transformers for public chat templates, or is left out."""

from pathlib import Path

import pytest

from deltatune.data.prompts import conversation_text
from deltatune.errors import UserError
from deltatune.export.modelfile import turns

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.oracle
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "open_at", "arguments": {"day": "Monday"}}}
ASKED = [{"role": "user", "content": "When?"}]
ANSWERS = [
    [{"role": "assistant", "content": "<think>\nIt is 8.\n</think>\n\nAt 8."}],
    [{"role": "assistant", "content": " At 8.\n\n"}],
    [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "8", "name": "open_at"}],
    [{"role": "assistant", "content": "At 8."}, {"role": "user", "content": "\n And now? "}],
]


@pytest.mark.parametrize("name", NAMES)
def test_every_history_is_written_as_transformers_writes_it(tokenizer, name):
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    wording, differing = turns(tokenizer)
    assert (wording is None) == bool(differing)
    assert differing or not name.startswith(("qwen3", "deepseekv3"))
    for answer in ANSWERS if wording else []:
        for last in ([], ASKED):
            messages = [*ASKED, *answer, *last]
            try:
                expected = conversation_text(tokenizer, messages, "")
            except UserError:
                continue
            assert wording.text(messages) == expected.removeprefix(tokenizer.bos_token or "")
