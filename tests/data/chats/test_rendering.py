"""Chat templates that raise, loop, recurse or grow end in one message that names the row and the template's line."""

import ctypes
import os
import signal
import struct
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from deltatune.data.chats import rendering
from deltatune.data.chats.render_process import RenderLimits
from deltatune.data.chats.rendering import Renderer
from deltatune.data.rows.row_formats import Conversation, Features
from deltatune.data.text import TextEncoder
from deltatune.errors import UserError
from deltatune.machine import command_line

ROW = {"messages": [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]}
GROWN = "{% set ns = namespace(a=1, b=1) %}{% for i in range(50) %}{% set ns.a = [ns.a, ns.a] %}"
MISTAKES = {
    "raises": ("\n\n{{ raise_exception('not so') }}", "line 3, refuses this conversation: not so"),
    "syntax": ("\n{% if %}", "line 2, refuses this conversation: Expected an expression"),
    "division": ("{{ 1 / 0 }}", "line 1, refuses this conversation: division by zero"),
    "missing": ("{{ a.b.c }}", "line 1, refuses this conversation: 'a' is undefined"),
    "files": ("{% include '/etc/passwd' %}", "line 1, refuses this conversation: no loader"),
    "internals": ("{{ ''.__class__.__mro__ }}", "line 1, refuses this conversation: access to attribute '__class__'"),
    "recursion": ("\n{% macro f(x) %}\n{{ f(x) }}{% endmacro %}{{ f(1) }}", "line 3, calls itself without end"),
    "nested": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "calls itself without end, or is nested too deeply"),
}
# These meet a limit, in a process of their own: what a process took before counts in the memory that it may have.
ENDLESS = {
    "loop": (
        "{% for i in range(90000) %}\n{% for j in range(90000) %}{% set x = 1 %}{% endfor %}{% endfor %}",
        "line 2, ran for more than 0.4 seconds",
    ),
    "doubled text": (
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}\n{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "line 2, took more than 0.5 GB of memory",
    ),
    "one long text": ("\n{{ 'x' * 10000000000 }}", "line 2, took more than 0.5 GB of memory"),
    "a power": (
        "{% set n = namespace(v=9) %}\n{% if n.v ** (n.v ** n.v) %}{% endif %}",
        "line 2, ran for more than 0.4 seconds",
    ),
    # Python compares nested lists in one step of its own, which no error interrupts.
    "one step": (
        GROWN + "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{% if ns.a == ns.b %}{% endif %}",
        "ran for more than 0.8 seconds in one step",
    ),
    "much text": ("{{ messages[0].content[0] * 70000000 }}", "characters for this conversation"),
}


@pytest.fixture
def tight(monkeypatch):
    rendering._end_processes()
    monkeypatch.setattr(rendering, "LIMITS", RenderLimits(1, 1 << 29))
    yield
    rendering._end_processes()


@pytest.fixture
def written(tokenizers, monkeypatch):
    def make(template):
        tokenizer = tokenizers("plain")
        monkeypatch.setattr(tokenizer._tokenizer, "chat_template", template)
        return tokenizer

    return make


GOOD = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"


def check_refused(name, written, template, message):
    """Of a good row and one that meets the template's mistake, the second is named, and the next template works."""
    whole = name in ("syntax", "nested")
    bad = template if whole else "{% if messages[0].content == 'bad' %}" + template + "{% endif %}" + GOOD
    rows = [("file:1", ROW), ("file:2", {"messages": [{"role": "user", "content": "bad"}]})]
    encoded = TextEncoder(written(bad), Features(), False).stream(rows, 2)
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        list(encoded)
    text = str(caught.value)
    assert text.startswith("file:1: " if whole else "file:2: ")
    assert message in text
    assert "\n" not in text
    # The work is done elsewhere: this process neither loops nor fills its memory.
    assert time.process_time() - began < 1
    assert len(TextEncoder(written(GOOD), Features(), False)(ROW, "file:1")) == 1


@pytest.mark.bad_input("a chat template with a mistake: {name}")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_bad_template_ends_in_one_message_and_the_next_one_works(written, name):
    check_refused(name, written, *MISTAKES[name])


@pytest.mark.bad_input("a chat template without an end, or with a text that fills the memory")
def test_an_endless_template_ends_in_one_message_and_the_next_one_works(tight, written, monkeypatch):
    monkeypatch.setattr(rendering, "LIMITS", RenderLimits(0.4, 1 << 29))
    for name, (template, message) in ENDLESS.items():
        check_refused(name, written, template, message)


def test_rows_before_a_bad_line_come_first(tokenizer):
    def lines():
        yield "file:1", {"messages": [{"role": "assistant", "content": "first"}]}
        raise UserError("file:2: not JSON")

    with pytest.raises(UserError, match="file:1: message 1: the conversation begins with an assistant turn"):
        list(TextEncoder(tokenizer, Features(), None).stream(lines(), 2))


def open_to_nobody() -> Connection:
    reading, writing = os.pipe()
    os.close(reading)
    return Connection(writing, readable=False)


def test_a_process_that_ends_is_replaced(tokenizer, monkeypatch):
    encode = TextEncoder(tokenizer, Features(), None)
    before = encode(ROW, "file:1")
    (process,) = rendering._idle[-1:]
    os.kill(process._child.pid, signal.SIGKILL)
    process._child.wait()
    assert encode(ROW, "file:1")[0].tokens.tolist() == before[0].tokens.tolist()
    # One that had nothing to do for long may end between the look at it and the request.
    (process,) = rendering._idle[-1:]
    monkeypatch.setattr(rendering._Process, "running", True)
    process._child.send_signal(signal.SIGSTOP)
    process._requests.close()
    process._requests = open_to_nobody()
    process._child.send_signal(signal.SIGCONT)
    assert process._child.wait() == 0
    assert encode(ROW, "file:1")[0].tokens.tolist() == before[0].tokens.tolist()


def test_a_process_that_is_killed_over_a_conversation_is_said(tight, written):
    tokenizer = written("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}")
    conversation = Conversation(ROW["messages"], None, None, False, "file:1")
    rows = Renderer(tokenizer).chunks([conversation])
    # The process is started here, so that it can be named before it has answered.
    process, _ = rendering._take()
    rendering._idle.append(process)
    process._child.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, lambda: os.kill(process._child.pid, signal.SIGKILL)).start()
    ((_, error, _),) = next(rows)
    assert "ended over this conversation (SIGKILL)" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_step_that_takes_too_much_memory_is_stopped_where_no_limit_binds(tight, written, monkeypatch):
    """As on macOS, of which the function that tells a process's memory is pretended."""

    def proc_pid_rusage(process, flavour, usage):
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        # The footprint is the eighth of the numbers that follow an identifier of 16 bytes.
        struct.pack_into("<Q", (ctypes.c_char * 96).from_address(ctypes.addressof(usage._obj)), 72, pages * 4096)
        return int(flavour != 0)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(proc_pid_rusage=proc_pid_rusage))
    unlimited = "import resource\nresource.setrlimit = lambda *_: None\n"
    monkeypatch.setattr(command_line, "_START", unlimited + command_line._START)
    monkeypatch.setattr(rendering, "LIMITS", RenderLimits(1, 1 << 28))
    monkeypatch.setattr(rendering, "_OWN_MEMORY", 1 << 28)
    tokenizer = written("{% for n in [1, 2] %}{% if ('x' * 900000000).split('y') %}{% endif %}{% endfor %}")
    with pytest.raises(UserError, match=r"file:1: the model's chat template took more than 0\.25 GB .* in one step"):
        TextEncoder(tokenizer, Features(), None)(ROW, "file:1")


def test_the_number_of_processes_changes_nothing(tokenizer):
    answer = ROW["messages"][1]
    rows = [
        (f"file:{number}", {"messages": [{"role": "user", "content": f"{number}?"}, answer]})
        for number in range(1, 150)
    ]
    encode = TextEncoder(tokenizer, Features(), None)
    for count in (1, 100_000):
        streamed = list(encode.stream(rows, count))
        assert [example.source for (example,) in streamed] == [source for source, _ in rows]
        for (source, row), (example,) in zip(rows[::40], streamed[::40], strict=True):
            assert example.tokens.tolist() == tokenizer.apply_chat_template(row["messages"]), source


def test_a_tokenizer_that_writes_conversations_itself(tokenizer, monkeypatch):
    # mlx-lm gives some models a renderer in Python, such as DeepSeek V3.2.
    def by_hand(messages, add_generation_prompt=False, enable_thinking=False, **_):
        text = "".join(f"{message['role']}:\n{message['content']}<|im_end|>" for message in messages)
        return text + "assistant:\n" * add_generation_prompt

    monkeypatch.setattr(tokenizer, "_chat_template", by_hand)
    (example,) = TextEncoder(tokenizer, Features(), None)(ROW, "file:1")
    assert tokenizer.decode(example.tokens[example.targets]) == "an answer<|im_end|>"
    monkeypatch.setattr(tokenizer, "_chat_template", lambda *_, **__: {}["a"])
    with pytest.raises(UserError, match="file:1: the model's chat template refuses this conversation: missing key 'a'"):
        TextEncoder(tokenizer, Features(), None)(ROW, "file:1")
