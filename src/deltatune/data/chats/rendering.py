"""Has conversations rendered in processes of their own, and starts and ends these processes."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import UserError
from ...machine.command_line import bare_program
from ...machine.environment import cores
from ...machine.host_memory import memory_of
from ...upstream import chat_template_code, hugging_face_tokenizer
from ..rows.row_formats import Conversation, PlainText
from .chat_rows import Marks
from .render_process import RenderLimits, Template
from .template_probes import Messages

# A process gets this many rows at once; one more process is worth its start for every so many rows.
_CHUNK = 64
_WORTH_A_PROCESS = 4000
LIMITS = RenderLimits()
# On macOS this process looks so often at the memory of another, which has some before it renders; the signal ends it.
_LOOK_SECONDS = 0.05
_OWN_MEMORY = 1 << 29
_TOO_LARGE = signal.SIGUSR1
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Item = PlainText | Conversation


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation, or the beginning of it with so many messages, as a chat template writes it.

    `turns` hold, for each part that counts in the loss, the characters at which it may start, of which the first with
    fitting tokens is meant, and at which it ends. `others` are those of the starts that are behind a prompt with the
    other value of enable_thinking. With `blocks` the parts are the template's {% generation %} blocks.
    """

    text: str
    turns: list[tuple[list[int], int]]
    messages: int
    others: list[int]
    blocks: bool


# The kind of a part that stands in no row of a conversation, and the number of its message; None for a tool.
Lost = tuple[str, int | None]


class Rendered(NamedTuple):
    """A text or conversation, with the rows of a conversation, or why there are none; `lost` stands in none of them."""

    item: Item
    rows: list[ChatRow] | UserError
    lost: Sequence[Lost] = ()


class Renderer:
    """Renders conversations with the chat template of a tokenizer, mlx-lm's TokenizerWrapper.

    `options` are the template's variables, which those of a conversation override; enable_thinking is there as mlx-lm
    sets it where it was not given.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self._inner = hugging_face_tokenizer(tokenizer)
        self.options = {"enable_thinking": tokenizer.has_thinking, **(options or {})}
        self._setups: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}
        self._code: dict[str, Template] = {}

    @property
    def writes_by_itself(self) -> bool:
        """Whether code of the tokenizer or of mlx-lm writes conversations, and no Jinja template."""
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        overridden = type(self._inner).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        return overridden or chat_template_code(self.tokenizer) is not None

    def template(self, tools: Any) -> str | None:
        """Return the Jinja template for conversations with these tools; None where code writes them."""
        return None if self.writes_by_itself else self._inner.get_chat_template(None, tools)

    def chunks(self, items: Iterable[Item], count: int = 1) -> Iterator[list[Rendered]]:
        """Yield the items in order, a chunk at a time, with the rows of each conversation or why there are none; texts
        have none.

        About so many items as `count` says decide in how many processes they are rendered.
        """
        chunks = _chunks(items)
        if self.writes_by_itself:
            yield from ([self._by_the_tokenizer(item) for item in chunk] for chunk in chunks)
            return
        processes = min(cores(), 1 + count // _WORTH_A_PROCESS)
        waiting: deque[Future[list[Rendered]]] = deque()
        with ThreadPoolExecutor(processes) as threads:
            try:
                while True:
                    for chunk in islice(chunks, 2 * processes - len(waiting)):
                        requests = [
                            {"template": self._setup(item.tools, item.options)} | _request(item)
                            for item in chunk
                            if isinstance(item, Conversation)
                        ]
                        waiting.append(threads.submit(self._chunk, chunk, requests))
                    if not waiting:
                        return
                    yield waiting.popleft().result()
            finally:
                threads.shutdown(wait=True, cancel_futures=True)

    def rows(self, conversation: Conversation) -> list[ChatRow]:
        """Return the rows of one conversation; UserError, naming its source, where the template does not render it."""
        ((_, rows, _),) = next(self.chunks([conversation]))
        if isinstance(rows, UserError):
            raise rows
        return rows

    def text(self, messages: Messages, tools: Any = None, options: Mapping[str, Any] | None = None) -> str:
        """Return the text of a conversation; UserError where the template does not render it.

        `options` holds arguments of transformers' apply_chat_template, and variables for the template.
        """
        return self._written({"messages": messages, "tools": tools, "options": options or {}})[0]

    def prompt(self, messages: Messages, tools: Any, options: Mapping[str, Any]) -> tuple[str, Sequence[Lost]]:
        """Return the text of a conversation that is to be answered, as text() does, and its parts that are lost."""
        asked = {"add_generation_prompt": True, **options}
        return self._written({"messages": messages, "tools": tools, "turns": [], "options": asked})

    def _written(self, request: dict[str, Any]) -> tuple[str, Sequence[Lost]]:
        if self.writes_by_itself:
            reply = self._own_code({}).answer(request)
        else:
            name = self._setup(request["tools"], {})
            (reply,) = _answers({name: self._setups[name]}, [{"template": name} | request])
        if "error" in reply:
            raise UserError(reply["error"])
        return reply["rows"][0][0], [(kind, message) for kind, message in reply.get("lost", ())]

    def _chunk(self, chunk: list[Item], requests: list[dict[str, Any]]) -> list[Rendered]:
        """Return a chunk with its rows. This runs in several threads at once."""
        names = {request["template"] for request in requests}
        replies = iter(_answers({name: self._setups[name] for name in names}, requests) if requests else [])
        return [
            self._rendered(item, next(replies)) if isinstance(item, Conversation) else Rendered(item, [])
            for item in chunk
        ]

    def _rendered(self, item: Conversation, reply: dict[str, Any]) -> Rendered:
        if "error" in reply:
            return Rendered(item, UserError(f"{item.source}: {reply['error']}"))
        setup = self._setups.get(reply.get("template", ""))
        blocks = setup is not None and setup["marks"]["blocks"] and item.every_turn and item.turns is not None
        rows = [ChatRow(text, turns, messages, others, blocks) for text, turns, messages, others in reply["rows"]]
        return Rendered(item, rows, [(kind, message) for kind, message in reply["lost"]])

    def _setup(self, tools: Any, options: Mapping[str, Any]) -> str:
        """Return the name of the setup (template, options, marks) that a process needs to render with these tools."""
        template = self._inner.get_chat_template(None, tools)
        options = {**self.options, **options}
        key = template + json.dumps(options, sort_keys=True)
        if key not in self._names:
            setup = {
                "template": template,
                "special_tokens": self._inner.special_tokens_map,
                "options": options,
                "marks": self._marks(_GENERATION_TAG.search(template) is not None, options),
                "thinking": self._thinking_tags(),
            }
            name = hashlib.blake2b(json.dumps(setup).encode(), digest_size=16).hexdigest()
            self._setups[name] = setup
            self._names[key] = name
        return self._names[key]

    def _marks(self, blocks: bool, options: Mapping[str, Any]) -> dict[str, Any]:
        ends = [self._inner.decode([token]) for token in self.tokenizer.eos_token_ids]
        return {
            "specials": sorted({*special_tokens(self._inner), *ends}),
            "ends": sorted(ends),
            "end": self._inner.eos_token or "",
            "added": sorted(token.content for token in self._inner.added_tokens_decoder.values()),
            "blocks": blocks,
            "thinking": bool(options["enable_thinking"]),
        }

    def _thinking_tags(self) -> list[str]:
        return [self.tokenizer.think_start, self.tokenizer.think_end] if self.tokenizer.has_thinking else []

    def _by_the_tokenizer(self, item: Item) -> Rendered:
        """Return the rows of a conversation that code of the tokenizer writes, without limits: it is not a template."""
        if not isinstance(item, Conversation):
            return Rendered(item, [])
        template = self._own_code(item.options)
        reply = template.answer(_request(item))
        messages = [] if "error" in reply else template.taken(item.messages)
        for count in {count for _, _, count, _ in reply.get("rows", ())}:
            text, tokens = (self._write(messages[:count], item.tools, item.options, as_one) for as_one in (False, True))
            if list(tokens) != self._inner(text, add_special_tokens=False)["input_ids"]:
                reply = {"error": "the tokenizer gives other tokens for this conversation than for its text."}
        return self._rendered(item, reply)

    def _own_code(self, options: Mapping[str, Any]) -> Template:
        """Return the code of the tokenizer in the form of a template."""
        options = {**self.options, **options}
        key = json.dumps(options, sort_keys=True)
        if key not in self._code:
            marks = Marks(**self._marks(False, options))
            self._code[key] = Template(self.tokenizer, options, marks, self._thinking_tags())
        return self._code[key]

    def _write(self, messages: Messages, tools: Any, options: Mapping[str, Any], tokenize: bool = False) -> Any:
        options = {**self.options, **options, "add_generation_prompt": False}
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=tokenize, **options)


def _request(conversation: Conversation) -> dict[str, Any]:
    return {name: getattr(conversation, name) for name in ("messages", "tools", "turns", "every_turn")}


def special_tokens(tokenizer: Any) -> list[str]:
    """Return the special tokens of transformers' tokenizer as they are written, also those without a name."""
    added = tokenizer.added_tokens_decoder.values()
    return sorted({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)})


def _chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    source = iter(items)
    while chunk := list(islice(source, _CHUNK)):
        yield chunk


class _Process:
    def __init__(self) -> None:
        command = bare_program(Path(__file__).with_name("render_process.py"), *LIMITS)
        quiet = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with self._child.stdin as stdin, self._child.stdout as stdout:
            self._requests = Connection(os.dup(stdin.fileno()), readable=False)
            self._replies = Connection(os.dup(stdout.fileno()), writable=False)
        self._known: set[str] = set()

    def ask(self, setups: dict[str, Any], requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the answer to each request; EOFError or OSError if the process ends before."""
        new = {name: setup for name, setup in setups.items() if name not in self._known}
        # A value that JSON lacks, such as a date in Parquet data, is shown to the template as the name of its type.
        self._requests.send_bytes(
            json.dumps([new, requests], default=lambda value: f"<{type(value).__name__}>").encode()
        )
        self._known.update(new)
        for _ in requests:
            # macOS lets a process take any memory in one step, which the process itself cannot interrupt.
            while sys.platform == "darwin" and not self._replies.poll(_LOOK_SECONDS):
                if memory_of(self._child.pid) > _OWN_MEMORY + LIMITS.memory:
                    self._child.send_signal(_TOO_LARGE)
            yield json.loads(self._replies.recv_bytes())

    @property
    def running(self) -> bool:
        """Whether the process runs; it ends when it has had nothing to do for some time."""
        return self._child.poll() is None

    def end(self) -> int:
        self._requests.close()
        self._replies.close()
        return self._child.wait()


_idle: list[_Process] = []
_lock = threading.Lock()


@atexit.register
def _end_processes() -> None:
    while _idle:
        _idle.pop().end()


def _take() -> tuple[_Process, bool]:
    with _lock:
        while _idle:
            process = _idle.pop()
            if process.running:
                return process, True
            process.end()
    return _Process(), False


def _answers(setups: dict[str, Any], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of a process; the last one is an error if the process ended over it."""
    while True:
        process, used = _take()
        replies: list[dict[str, Any]] = []
        try:
            for request, reply in zip(requests, process.ask(setups, requests), strict=True):
                replies.append(reply | {"template": request["template"]})
        except (EOFError, OSError):
            status = process.end()
            if used and status == 0 and not replies:
                continue  # It had nothing to do for so long that it ended just now.
            error = {"error": _ended(status), "template": requests[len(replies)]["template"]}
            return replies + [error] * (len(requests) - len(replies))
        with _lock:
            _idle.append(process)
        return replies


def _ended(status: int) -> str:
    limits = {
        -signal.SIGVTALRM: f"ran for more than {2 * LIMITS.seconds:g} seconds",
        -_TOO_LARGE: f"took more than {LIMITS.memory / (1 << 30):g} GB of memory",
    }
    if status in limits:
        return (
            f"the model's chat template {limits[status]} in one step on this conversation. "
            "It was stopped: mend the template, or give the model's folder another chat_template.jinja."
        )
    how = f"exit code {status}"
    with contextlib.suppress(ValueError):
        how = signal.Signals(-status).name
    return f"the process that renders the chat template ended over this conversation ({how}); mend the template."
