"""The refusals of `deltatune generate` before it loads a model, and those that are only possible afterwards."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from added_ends import FIRST, LAST, with_first_token
from console import called, deltatune, started
from deltatune.commands import generate
from deltatune.commands.generate import GenerateOptions
from deltatune.data.chats.answers import AnswerParser
from deltatune.data.prompts import Question, prompt_tokens, text_tokens
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.models.load import load
from deltatune.options.config import TrainConfig
from deltatune.train.evaluation.samples import Samples

RECURSION = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
PROMPT = ["generate", "--model", "/none", "--prompt"]


@pytest.mark.bad_input("`generate {flag} {value}`")
@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--temp", "-0.5", "expected a number of 0 or more, got -0.5"),
        ("--temp", "nan", "expected a number of 0 or more, got nan"),
        ("--temp", "inf", "expected a number of 0 or more, got inf"),
        ("--top-p", "0", "expected a number above 0 and up to 1, got 0.0"),
        ("--top-p", "1.5", "expected a number above 0 and up to 1, got 1.5"),
        ("--min-p", "-1", "expected a number from 0 to 1, got -1.0"),
        ("--min-p", "2", "expected a number from 0 to 1, got 2.0"),
        ("--top-k", "-1", "expected a whole number of 0 or more, got -1"),
        ("--max-tokens", "0", "expected a whole number of 1 or more, got 0"),
        ("--seed", "-1", "expected a whole number from 0 to 18446744073709551615, got -1"),
        ("--fps", "0", "expected a number above 0, got 0.0"),
        ("--video-max-frames", "1", "expected a whole number of 2 or more, got 1"),
        ("--image", "/none.png", "no such file"),
        ("--system-prompt", "\udcff", r"expected text in UTF-8"),
        ("--chat-template-config", "{", "not JSON"),
        ("--chat-template-config", "[" * 100_000, "not JSON"),
        ("--chat-template-config", "[1]", "expected a JSON object"),
        ("--chat-template-config", '{"tokenize": true}', "'tokenize' is set by this command; leave it out"),
    ],
    ids=lambda value: value[:20] if value.isascii() else "not-ascii",
)
def test_options_are_refused_before_the_model_is_looked_for(run, flag, value, message):
    code, out, err = run(*PROMPT, "hello", f"{flag}={value}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"deltatune: {flag}")
    assert message in err


@pytest.mark.bad_input("`generate` with {what}")
@pytest.mark.parametrize(
    ("what", "prompt", "given", "message"),
    [
        ("an empty prompt", "", b"", "--prompt: expected text in UTF-8 that is not empty, got ''"),
        ("a prompt of spaces", " \n", b"", "--prompt: expected text"),
        ("an empty standard input", "-", b" \n", "--prompt -: standard input is empty"),
        (
            "a standard input that is not UTF-8",
            "-",
            "é".encode("latin-1"),
            "--prompt -: byte 0 of standard input is not",
        ),
        ("a standard input in UTF-16", "-", "hello".encode("utf-16"), "--prompt -: byte 0 of standard"),
        ("a closed standard input", "-", None, "--prompt -: standard input is closed"),
        ("a prompt that is not UTF-8", "\udcff", b"", "--prompt: expected text in UTF-8"),
    ],
)
def test_prompts_are_refused_before_the_model_is_looked_for(run, monkeypatch, what, prompt, given, message):
    stdin = None if given is None else io.TextIOWrapper(io.BytesIO(given), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = run(*PROMPT, prompt)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_prompt_from_standard_input_is_utf8_whatever_the_terminal_is(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffé".encode()), encoding="ascii"))
    assert generate._prompt("-") == "é"


TYPED = r"\nabla \theta \\n" + "\n\tprint('\\n')"
# Refuses everything but TYPED, so that the exit code says what the template was given.
AS_TYPED = f"{{% if messages[0].content != {TYPED!r} %}}{{{{ raise_exception('changed') }}}}{{% endif %}}ok"


def test_a_prompt_from_standard_input_is_taken_as_typed(tmp_path, monkeypatch):
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "chat_template.jinja").write_text(AS_TYPED)
    options = ["--model", model, "--max-tokens", 1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TYPED.encode())))
    assert called("generate", *options, "--prompt", "-").returncode == 0
    assert called("generate", *options, "--prompt", f"{TYPED}.").returncode == 2


@pytest.mark.parametrize("behind", [False, True])
def test_no_end_stands_behind_a_prompt(tiny_checkpoint, tmp_path, behind):
    """Some tokenizers add an end behind each text, and a first token before it; a text may have that one already."""
    folder = with_first_token(tiny_checkpoint("qwen3_5"), tmp_path / "model", before=True, behind=behind)
    loaded = load(folder)
    tokenizer = loaded.tokenizer
    expected = [tokenizer.bos_token_id, *tokenizer.encode("a dog", add_special_tokens=False)]
    for text in ("a dog", f"{FIRST}a dog"):
        assert prompt_tokens(tokenizer, Question(text), chat_template=False) == expected
    config = TrainConfig(sample_prompts=["a dog"], max_seq_length=64)
    assert [prompt.tokens for prompt in Samples(loaded, config, plain_text=True).prompts] == [expected]
    end = tokenizer.encode(f"a dog{LAST}", add_special_tokens=False)
    assert text_tokens(tokenizer, f"a dog{LAST}") == [tokenizer.bos_token_id, *end]


@pytest.mark.bad_input("`generate {flag} {value}`")
@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--top-k", "512", "--top-k: expected at most 511, since the model has 512 tokens; got 512"),
        ("--extra-eos-token", "<|nope|>", "'<|nope|>' is no token of this model, and no token's number"),
        ("--extra-eos-token", "512", "'512' is no token of this model, and no token's number"),
        ("--chat-template-config", '{"tools": 3}', "chat template refuses this conversation"),
    ],
)
def test_option_that_depends_on_the_model_is_refused_by_name(complaint, flag, value, message):
    assert message in complaint("generate", "--model", MODEL, "--prompt", "hi", flag, value, "--temp", "1")


TOOLS = [{"type": "function", "function": {"name": "open", "parameters": {"type": "object", "properties": {}}}}]


def test_tools_stand_in_the_prompt_of_generate_and_of_chat(tiny_checkpoint, tmp_path):
    template = (Path(__file__).parents[1] / "data" / "templates" / "qwen3_5.jinja").read_text(encoding="utf-8")
    model, file = tiny_checkpoint("qwen3", chat_template=template), tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    asked = [{"role": "user", "content": "when?"}]
    tokenizer = load(model).tokenizer
    prompt = tokenizer.apply_chat_template(asked, tools=TOOLS, add_generation_prompt=True)
    options = ["--model", model, "--max-tokens", 1, "--tools", file]
    assert f"[{len(prompt)} prompt tokens" in called("generate", *options, "--prompt", "when?").stdout
    talked = deltatune("chat", *options, input="when?\nand then?\n")
    assert (talked.returncode, talked.stderr, len(talked.stdout.splitlines())) == (0, "", 3)
    # The history of a conversation holds an answer as it does without tools.
    variables = {"enable_thinking": True, "tools": TOOLS}
    message = AnswerParser(tokenizer, variables).message("as asked\n</think>\n\nat nine")
    assert message == {"role": "assistant", "reasoning_content": "as asked", "content": "at nine"}


NO_TOOLS = {
    "a missing file": (None, r"--tools tools.json: cannot be read \(.*\); give a JSON file"),
    "no JSON": ("[{", r"--tools tools.json: 'tools': expected JSON, got str '\[\{'"),
    "one tool alone": (json.dumps(TOOLS[0]), r"--tools tools.json: 'tools': expected a list, got dict"),
    "a model without tools": (json.dumps(TOOLS), "--tools: the model has no chat template that describes tools"),
}


@pytest.mark.bad_input("`--tools`: {what}")
@pytest.mark.parametrize("what", NO_TOOLS)
def test_tools_that_cannot_be_asked_with(run, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    content, message = NO_TOOLS[what]
    if content is not None:
        Path("tools.json").write_text(content)
    code, out, err = run("generate", "--model", MODEL, "--prompt", "hi", "--tools", "tools.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


@pytest.mark.bad_input("`generate --ignore-chat-template {flag} {value}`")
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--system-prompt", "be brief"),
        ("--prefill-response", "Yes"),
        ("--chat-template-config", "{}"),
        ("--tools", "f.json"),
    ],
)
def test_texts_that_only_a_template_places_are_refused_without_one(run, flag, value):
    code, out, err = run("generate", "--model", MODEL, "--prompt", "hi", "--ignore-chat-template", flag, value)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"deltatune: {flag}: ")


@pytest.mark.bad_input("a chat template that raises on the prompt of `generate`")
@pytest.mark.parametrize(
    "body", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ none.x.y }}", RECURSION]
)
def test_a_template_that_raises_is_one_message(body):
    tokenizer = load(MODEL).tokenizer
    tokenizer.chat_template = body
    with pytest.raises(
        UserError, match=r"the model's chat template, line 1, (refuses this conversation|calls itself without end)"
    ):
        prompt_tokens(tokenizer, Question("hello"))


def test_empty_texts_that_mean_something_are_taken():
    """An empty system prompt replaces the one that some templates write by themselves."""
    options = GenerateOptions("m", "p", system_prompt="", prefill_response="", image=["a"])
    assert (options.system_prompt, options.prefill_response, options.image) == ("", "", ("a",))


def test_a_reader_that_leaves_is_one_message():
    command = [sys.executable, "-m", "deltatune", "generate", "--model", str(MODEL), "--prompt", "hi", "-m", "400"]
    with started(command) as process:
        process.stdout.close()
        assert process.stderr.read() == "deltatune: nobody reads the output any more.\n"
        assert process.wait() == 2
