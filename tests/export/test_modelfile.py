"""The Modelfile beside a GGUF file: Ollama's text with it is that of the chat template, or it has no template."""

import re
from pathlib import Path

import pytest

from deltatune.data.prompts import conversation_text
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.export.modelfile import turns, write_modelfile
from deltatune.models.load import load

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>{{ '{{' }}</think>"
    "{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load(MODEL).tokenizer


def as_ollama(template, messages):
    """Ollama's text: Go's templates, as far as a Modelfile of ours uses them."""
    cases, opening = re.fullmatch(
        r"\{\{ range .Messages \}\}((?:\{\{ if eq .Role .*?\{\{ end \}\})+)\{\{ end \}\}(.*)", template, re.DOTALL
    ).group(1, 2)
    found = dict(re.findall(r'\{\{ if eq .Role "(\w+)" \}\}(.*?)\{\{ end \}\}', cases, re.DOTALL))
    turns = [found.get(m["role"], "").replace("{{ .Content }}", m["content"]) for m in messages]
    return ("".join(turns) + opening).replace('{{ "{{" }}', "{{")


def conversation(count, system=True):
    messages = [{"role": "system", "content": "Be kind."}] * system
    for number in range(count):
        messages += [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": f"{number}."}]
    return messages[:-1]


CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "open_at", "arguments": {"day": "Monday"}}}
HISTORIES = [
    *(conversation(count, system) for count in (1, 2, 4) for system in (True, False)),
    [*conversation(1), {"role": "assistant", "content": "<think>\nIt is 2.\n</think>\n\n2."}, *conversation(1, False)],
    [*conversation(1), {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "at 8"}],
    [*conversation(1), *[{"role": "tool", "content": "at 8"}, {"role": "tool", "content": "at 9"}]],
    [*conversation(1), {"role": "assistant", "content": "  code\n"}, {"role": "user", "content": "\n  why? \n"}],
    [*conversation(2), {"role": "assistant", "content": "2."}, *conversation(1)],
]
REASONING, RESULTS, CALLS = "the reasoning of earlier answers", "results of tools", "calls of tools"
SPACE, LATER = "white space around a message", "a later system message"
MESSAGES = "messages"


@pytest.mark.parametrize("options", [None, {"enable_thinking": False}], ids=["chatml", "thinking off"])
def test_ollama_writes_the_text_of_the_template(tokenizer, options):
    tokenizer.chat_template = CHATML
    found, differing = turns(tokenizer, options)
    assert differing == []
    for messages in HISTORIES:
        expected = conversation_text(tokenizer, messages, "", options)
        assert as_ollama(found.template(), messages) == expected.removeprefix(tokenizer.bos_token or "")


CONTENT = "{{ m.content }}"
CALLED = CONTENT + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen3.jinja", {REASONING, RESULTS, CALLS}),
        ("qwen3_5.jinja", {REASONING, RESULTS, CALLS, SPACE}),
        ("qwen3_8.jinja", {RESULTS, CALLS, SPACE}),
        ("deepseek_v3_1.jinja", {REASONING, RESULTS, CALLS, LATER}),
        ("glm_4_5.jinja", {MESSAGES}),
        ("olmo3.jinja", {MESSAGES}),
        ("kimi_k2_thinking.jinja", {MESSAGES}),
        ("{% if messages | length > 3 %}long{% endif %}" + CHATML, {MESSAGES, RESULTS, SPACE, LATER}),
        (CHATML.replace("m.content", "m.content | lower"), {MESSAGES}),
        (CHATML.replace("m.content", "m.content if m.role != 'system' else ''"), {MESSAGES}),
        ("{{ raise_exception('no') }}", {MESSAGES}),
        ("one {{ messages[0].content }}", {MESSAGES}),
        (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), {REASONING}),
        (CHATML.replace("m.content", "m.content | trim"), {SPACE}),
        (CHATML.replace(CONTENT, CALLED), {CALLS}),
        (CHATML.replace(CONTENT, "{% if m.role == 'tool' and loop.last %}!{% endif %}" + CONTENT), {RESULTS}),
        (CHATML.replace(CONTENT, "{% if m.role != 'system' or loop.first %}" + CONTENT + "{% endif %}"), {LATER}),
    ],
)
def test_a_template_of_its_own_kind_is_left_to_ollama_and_named(tokenizer, tmp_path, template, expected):
    file = TEMPLATES / template
    tokenizer.chat_template = file.read_text(encoding="utf-8") if template.endswith(".jinja") else template
    found, differing = turns(tokenizer)
    assert (found, set(differing)) == (None, expected)
    note = write_modelfile(tmp_path / "m", tmp_path / "x.gguf", tokenizer)[-1]
    assert all(each in note for each in expected)
    assert "compare what it answers" in note
    text = (tmp_path / "m").read_text()
    assert text.startswith("FROM ./x.gguf\nPARAMETER stop ")
    assert "TEMPLATE" not in text


def test_a_modelfile_in_full(tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    write_modelfile(tmp_path / "m", tmp_path / "x.gguf", tokenizer, {"enable_thinking": False})
    text = (tmp_path / "m").read_text()
    assert text.startswith(
        'FROM ./x.gguf\nTEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}'
    )
    assert text.count('"""') == 2
    assert '\nPARAMETER stop "<|im_end|>"\n' in text


def test_a_model_without_a_chat_template(tokenizer, tmp_path):
    tokenizer.has_chat_template = False
    try:
        said = write_modelfile(tmp_path / "m", tmp_path / "x.gguf", tokenizer)
    finally:
        tokenizer.has_chat_template = True
    assert "no chat template" in said[-1]
    assert (tmp_path / "m").read_text() == "FROM ./x.gguf\n"


@pytest.mark.bad_input("a Modelfile that cannot be written")
def test_a_folder_that_is_none(tokenizer, tmp_path):
    with pytest.raises(UserError, match="the file cannot be written"):
        write_modelfile(tmp_path / "none" / "m", tmp_path / "x.gguf", tokenizer)
