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
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jinja2

from ..errors import UserError, reason
from ..machine.environment import cores
from . import render_process
from .render_process import Marks, RefusalError, RenderLimits, chat_rows
from .row_formats import Conversation, PlainText

# A process gets this many rows at once; one more process is worth its start for every so many rows.
_CHUNK = 64
_WORTH_A_PROCESS = 4000
LIMITS = RenderLimits()
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Item = PlainText | Conversation


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation, or its beginning, as a chat template writes it.

    Args:
        text: the text.
        turns: for each part that counts in the loss, the characters at which it may start, and at which it ends. Of
            several starts, the first whose tokens fit is meant.
        messages: the number of messages in the text.
        blocks: whether the parts are the template's {% generation %} blocks.
    """

    text: str
    turns: list[tuple[list[int], int]]
    messages: int
    blocks: bool


Rendered = tuple[Item, "list[ChatRow] | UserError"]


class Renderer:
    """Renders conversations with the chat template of a tokenizer.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._inner = tokenizer, tokenizer._tokenizer
        self._setups: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}

    @property
    def writes_by_itself(self) -> bool:
        """Whether code of the tokenizer or of mlx-lm writes conversations, and no Jinja template."""
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        own = type(self._inner).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        return own or self._tokenizer._chat_template is not None

    def template(self, tools: Any) -> str | None:
        """Return the Jinja template for conversations with these tools; None where code writes them."""
        return None if self.writes_by_itself else self._inner.get_chat_template(None, tools)

    def chunks(self, items: Iterable[Item], count: int = 1) -> Iterator[list[Rendered]]:
        """Yield the items in order, a chunk at a time, with the rows of each conversation or why there are none.

        Args:
            items: conversations, and texts, which have no rows.
            count: about how many items there are, which decides in how many processes they are rendered.
        """
        chunks = _chunks(items)
        if self.writes_by_itself:
            yield from ([(item, self._by_the_tokenizer(item)) for item in chunk] for chunk in chunks)
            return
        processes = min(cores(), 1 + count // _WORTH_A_PROCESS)
        waiting: deque[Future[list[Rendered]]] = deque()
        with ThreadPoolExecutor(processes) as threads:
            try:
                while True:
                    for chunk in islice(chunks, 2 * processes - len(waiting)):
                        waiting.append(threads.submit(self._chunk, chunk, self._requests(chunk)))
                    if not waiting:
                        return
                    yield waiting.popleft().result()
            finally:
                threads.shutdown(wait=True, cancel_futures=True)

    def rows(self, conversation: Conversation) -> list[ChatRow]:
        """Return the rows of one conversation; UserError, naming its source, where the template does not render it."""
        ((_, rows),) = next(self.chunks([conversation]))
        if isinstance(rows, UserError):
            raise rows
        return rows

    def text(self, messages: list[dict[str, Any]], *, tools: Any = None, **options: Any) -> str:
        """Return the text of a conversation.

        Args:
            messages: the messages, each with its role.
            tools: the tools that the template may name.
            options: further arguments of transformers' apply_chat_template, and variables for the template.

        Raises:
            UserError: the template does not render it.
        """
        if self.writes_by_itself:
            try:
                return self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
            except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
                raise UserError(f"the model's chat template refuses this conversation: {reason(error)}") from error
        name = self._setup(tools)
        request = {"template": name, "messages": messages, "tools": tools, "options": options}
        (reply,) = _answers({name: self._setups[name]}, [request])
        if "error" in reply:
            raise UserError(reply["error"])
        return reply["rows"][0][0]

    def _chunk(self, chunk: list[Item], requests: list[dict[str, Any]]) -> list[Rendered]:
        """Return a chunk with its rows. This runs in several threads at once."""
        names = {request["template"] for request in requests}
        replies = iter(_answers({name: self._setups[name] for name in names}, requests) if requests else [])
        return [(item, self._rows(item, next(replies)) if isinstance(item, Conversation) else []) for item in chunk]

    def _rows(self, conversation: Conversation, reply: dict[str, Any]) -> list[ChatRow] | UserError:
        """Return the rows in a reply, or the error in it."""
        if "error" in reply:
            return UserError(f"{conversation.source}: {reply['error']}")
        blocks = conversation.every_turn and self._setups[reply["template"]]["marks"]["blocks"]
        return [ChatRow(text, turns, messages, blocks) for text, turns, messages in reply["rows"]]

    def _requests(self, chunk: list[Item]) -> list[dict[str, Any]]:
        """Return what a process is asked for the conversations of a chunk."""
        return [self._request(item) for item in chunk if isinstance(item, Conversation)]

    def _request(self, conversation: Conversation) -> dict[str, Any]:
        """Return what a process is asked for a conversation."""
        return {
            "template": self._setup(conversation.tools),
            "messages": conversation.messages,
            "tools": conversation.tools,
            "turns": conversation.turns,
            "every_turn": conversation.every_turn,
        }

    def _setup(self, tools: Any) -> str:
        """Return the name of what a process has to know of the template for conversations with these tools."""
        template = self._inner.get_chat_template(None, tools)
        if template not in self._names:
            setup = {
                "template": template,
                "special_tokens": self._inner.special_tokens_map,
                "options": {"enable_thinking": self._tokenizer.has_thinking},
                "marks": self._marks(_GENERATION_TAG.search(template) is not None),
            }
            name = hashlib.blake2b(json.dumps(setup).encode(), digest_size=16).hexdigest()
            self._setups[name], self._names[template] = setup, name
        return self._names[template]

    def _marks(self, blocks: bool) -> dict[str, Any]:
        """Return the fields of Marks."""
        ends = [self._inner.decode([token]) for token in self._tokenizer.eos_token_ids]
        return {
            "specials": sorted({*self._inner.all_special_tokens, *ends}),
            "ends": sorted(ends),
            "added": sorted(token.content for token in self._inner.added_tokens_decoder.values()),
            "blocks": blocks,
        }

    def _by_the_tokenizer(self, item: Item) -> list[ChatRow] | UserError:
        """Return the rows of a conversation that code of the tokenizer writes, without limits: it is not a template."""
        if not isinstance(item, Conversation):
            return []

        def render(count: int, prompt: bool = False, thinking: bool | None = None, tokens: bool = False) -> Any:
            options = {} if thinking is None else {"enable_thinking": thinking}
            written = self._tokenizer.apply_chat_template(
                item.messages[:count], tools=item.tools, tokenize=tokens, add_generation_prompt=prompt, **options
            )
            return written if tokens else (written, [])

        try:
            if item.turns is None:
                text = render(len(item.messages))[0]
                rows = [ChatRow(text, [([0], len(text))], len(item.messages), False)]
            else:
                marks = Marks(**self._marks(False))
                written = chat_rows(item.messages, item.turns, False, render, marks)
                rows = [ChatRow(text, turns, messages, False) for text, turns, messages in written]
            for row in rows:
                if (
                    list(render(row.messages, tokens=True))
                    != self._inner(row.text, add_special_tokens=False)["input_ids"]
                ):
                    raise RefusalError("the tokenizer gives other tokens for this conversation than for its text.")
        except RefusalError as error:
            return UserError(f"{item.source}: {error}")
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            return UserError(f"{item.source}: the model's chat template refuses this conversation: {reason(error)}")
        return rows


def _chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the items in lists of _CHUNK."""
    source = iter(items)
    while chunk := list(islice(source, _CHUNK)):
        yield chunk


class _Process:
    """A process that runs render_process.py."""

    def __init__(self) -> None:
        # -P keeps this file's folder, whose modules have the names of others, out of the process's imports.
        command = [sys.executable, "-P", str(Path(render_process.__file__)), *(str(limit) for limit in LIMITS)]
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
            yield json.loads(self._replies.recv_bytes())

    @property
    def running(self) -> bool:
        """Whether the process runs; it ends when it has had nothing to do for some time."""
        return self._child.poll() is None

    def end(self) -> int:
        """End the process and return its exit status."""
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
    """Return a process, and whether it was used before."""
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
    """Return the message for a process that ended over a conversation."""
    if status == -signal.SIGVTALRM:
        return (
            f"the model's chat template ran for more than {2 * LIMITS.seconds:g} seconds in one step on this "
            "conversation. It was stopped: mend the template, or give the model's folder another chat_template.jinja."
        )
    how = f"exit code {status}"
    with contextlib.suppress(ValueError):
        how = signal.Signals(-status).name
    return f"the process that renders the chat template ended over this conversation ({how}); mend the template."
