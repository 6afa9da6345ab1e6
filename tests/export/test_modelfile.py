"""The Modelfile beside a GGUF file: what Ollama writes with it is what the chat template writes, or it says nothing."""

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
    """What Ollama writes: Go's templates, as far as a Modelfile of ours uses them."""
    cases, opening = re.fullmatch(
        r"\{\{ range .Messages \}\}((?:\{\{ if eq .Role .*?\{\{ end \}\})+)\{\{ end \}\}(.*)", template, re.DOTALL
    ).group(1, 2)
    found = dict(re.findall(r'\{\{ if eq .Role "(\w+)" \}\}(.*?)\{\{ end \}\}', cases, re.DOTALL))
    text = "".join(found[m["role"]].replace("{{ .Content }}", m["content"]) for m in messages) + opening
    return text.replace('{{ "{{" }}', "{{")


def conversation(count, system=True):
    messages = [{"role": "system", "content": "Be kind."}] * system
    for number in range(count):
        messages += [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": f"{number}."}]
    return messages[:-1]


@pytest.mark.parametrize("name", ["chatml", "thinking off", *sorted(path.name for path in TEMPLATES.iterdir())])
def test_ollama_writes_what_the_template_writes(tokenizer, name):
    options = {"enable_thinking": False} if name == "thinking off" else None
    text = (TEMPLATES / name).read_text(encoding="utf-8") if (TEMPLATES / name).is_file() else CHATML
    tokenizer.chat_template, tokenizer.has_chat_template = text, True
    found = turns(tokenizer, options)
    assert found is not None or name not in ("chatml", "thinking off", "qwen3_5.jinja")
    if found is None:
        return
    for count in (1, 2, 4):
        for system in (True, False):
            messages = conversation(count, system)
            expected = conversation_text(tokenizer, messages, "", options)
            assert as_ollama(found.template(), messages) == expected.removeprefix(tokenizer.bos_token or "")


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages | length > 3 %}long{% endif %}" + CHATML,
        CHATML.replace("m.content", "m.content | lower"),
        CHATML.replace("m.content", "m.content if m.role != 'system' else ''"),
        "{{ raise_exception('no') }}",
        "one {{ messages[0].content }}",
    ],
)
def test_a_template_that_is_more_is_left_to_ollama_and_said(tokenizer, tmp_path, template):
    tokenizer.chat_template = template
    assert turns(tokenizer) is None
    said = write_modelfile(tmp_path / "m", tmp_path / "x.gguf", tokenizer)
    assert "compare what it answers" in said[-1]
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
