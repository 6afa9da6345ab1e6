"""`deltatune chat` through the console script: in a pipe, on a terminal, with the base beside an adapter."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from console import SCRIPT, called
from deltatune.answering.dialogue import Dialogue
from deltatune.commands.chat import Chat, ChatOptions, chat
from deltatune.demo.assets import MODEL
from deltatune.errors import UserError
from deltatune.models.load import load
from deltatune.train.evaluation import inference
from terminal import on_terminal

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    (folder / "train.jsonl").write_text((json.dumps({"prompt": "a b", "completion": "z z z z"}) + "\n") * 4)
    flags = ["--data", folder, "--adapter-path", folder / "adapters", "--iters", 6, "--learning-rate", 0.02]
    done = called("train", "--model", MODEL, *flags)
    assert done.returncode == 0, done.stderr
    return folder / "adapters"


def talk(*arguments, typed):
    command = [SCRIPT, "chat", "--model", MODEL, "-m", "6", *map(str, arguments)]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_base_and_adapter_answer_as_generate_does(adapter):
    asked = ["generate", "--model", MODEL, "--prompt", "two mochas please", "-m", 6, "--verbose", "false"]
    base = called(*asked).stdout.rstrip("\n").split("\n")
    adapted = called(*asked, "--adapter-path", adapter).stdout.rstrip("\n").split("\n")
    assert base != adapted
    said = talk("--adapter-path", adapter, "--compare", typed="two mochas please\nc\nr\n\ntwo mochas please\nh")
    opening = (
        f"{MODEL}, {adapter}. q ends the conversation, r forgets it, h prints this, c asks the base too, or no more."
    )
    assert said == [
        opening,
        "base:",
        *base,
        "adapter:",
        *adapted,
        "The adapter answers alone.",
        "What was said is forgotten.",
        *adapted,
        opening.partition(". ")[2],
    ]


def test_a_terminal_gets_a_prompt_and_q_ends_it(tmp_path):
    seen = on_terminal(
        "chat", "--model", MODEL, "-m", 2, columns=80, cwd=tmp_path, typed="two mochas please\nq\nmore\n"
    )
    assert seen.code == 0, seen.text
    assert seen.raw.count(">> ") == 2


class Typed(io.StringIO):
    """What somebody types, who presses Ctrl-C in place of a last question."""

    def readline(self):
        line = super().readline()
        if not line:
            raise KeyboardInterrupt
        return line


def test_ctrl_c_ends_the_answer_then_the_conversation(monkeypatch, capsys):
    asked = []

    def stream(loaded, prompt, max_tokens, sampling):
        asked.append(loaded.tokenizer.decode(prompt))
        yield SimpleNamespace(text="one", logprobs=None)
        raise KeyboardInterrupt

    monkeypatch.setattr(inference, "stream", stream)
    monkeypatch.setattr(sys, "stdin", Typed("first\nsecond\n"))
    chat(ChatOptions(str(MODEL)))
    assert capsys.readouterr().out.splitlines()[1:] == ["one ...", "one ..."]
    # What was said of an answer is remembered.
    assert "first" in asked[1]
    assert asked[1].index("first") < asked[1].index("one") < asked[1].index("second")


REASONED = [
    ("qwen3", True, "<think>\nI see.\n</think>\n\n  Yes.", {"reasoning_content": "I see.", "content": "  Yes."}),
    ("qwen3", True, "<think>\nI see. And", {"reasoning_content": "I see. And", "content": ""}),
    ("qwen3", False, "Yes.", {"content": "Yes."}),
    ("qwen3_8", True, "I see.\n</think>\nYes.", {"reasoning_content": "I see.", "content": "Yes."}),
    ("kimi_k2_thinking", True, "<think>I see.</think>Yes.", {"reasoning_content": "I see.", "content": "Yes."}),
    ("glm_4_5", True, "\n<think></think>\nYes.", {"content": "Yes."}),
]


@pytest.mark.parametrize(("family", "thinking", "answer", "said"), REASONED)
def test_an_answer_goes_into_the_history_as_its_template_writes_it(monkeypatch, family, thinking, answer, said):
    monkeypatch.setattr(inference, "stream", lambda *_: iter([SimpleNamespace(text=answer, logprobs=None)]))
    loaded = load(MODEL)
    loaded.tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    talk = Dialogue(inference.Inference(loaded), template_options={"enable_thinking": thinking})
    list(talk.ask("first"))
    assert talk.messages == [{"role": "user", "content": "first"}, {"role": "assistant", **said}]


@pytest.mark.bad_input("questions that are not UTF-8, on the standard input of chat")
def test_questions_in_another_encoding_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(UserError, match=r"chat: standard input is not utf-8 \(.*\); give text in that encoding"):
        Chat._read(None)
