"""Keeps the tokens of a table between starts, in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..machine.atomic_files import write
from ..machine.environment import cache_directory
from ..upstream import chat_template_code, hugging_face_tokenizer
from .example import Example

# The files together; the one that was not read for longest goes first.
LARGEST_BYTES = 4 << 30
# Each file begins with the digest of the rest, in hexadecimal digits.
_DIGEST_BYTES = 40
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "mlx-lm", "numpy")
# These and the template are all that a tokenizer written in Python is made from.
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")


@dataclass(frozen=True)
class Encoded:
    """A table as examples at full length: of each row one, or several where the template rewrites earlier turns.

    Counted are the rows of each format, those with each column that is not read, messages (rows for tools) with parts
    of each kind that the chat template does not write, and turns behind a prompt with each value of enable_thinking.
    """

    rows: list[list[Example]]
    kinds: Counter[str]
    unread: Counter[str]
    unwritten: Counter[str]
    prompts: Counter[bool]


def digest(parts: Iterable[bytes | memoryview | str]) -> str:
    """Return a digest of some parts, which are told apart by their lengths."""
    whole = hashlib.blake2b(digest_size=20)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        whole.update(len(content).to_bytes(8, "little"))
        whole.update(content)
    return whole.hexdigest()


def encoding_digest(tokenizer: Any) -> str | None:
    """Return a digest of all that turns a row into tokens, beside the options; None if it cannot be known."""
    inner, writer = hugging_face_tokenizer(tokenizer), chat_template_code(tokenizer)
    if getattr(writer, "__self__", None) is tokenizer:
        return None
    backend = getattr(inner, "backend_tokenizer", None)
    folder = Path(inner.name_or_path)
    if backend is not None:
        parts: list[bytes | str] = [backend.to_str()]
    elif folder.is_dir():
        files = sorted({file for kind in _TOKENIZER_FILES for file in folder.glob(kind)})
        parts = [content for file in files for content in (file.name, file.read_bytes())]
    else:
        return None
    code = sorted(Path(__file__).parent.rglob("*.py"))
    known = {
        "class": type(inner).__qualname__,
        "template": inner.chat_template,
        "specials": inner.special_tokens_map,
        "ends": sorted(tokenizer.eos_token_ids),
        "thinking": tokenizer.has_thinking,
        "split": getattr(inner, "split_special_tokens", None),
        "writer": repr(getattr(writer, "__module__", None)),
        "libraries": [importlib.metadata.version(name) for name in _LIBRARIES],
    }
    # A template that writes the date gives other tokens every day.
    if "strftime_now" in str(inner.chat_template):
        known["today"] = date.today().isoformat()
    return digest([*parts, json.dumps(known, default=str), *(file.read_bytes() for file in code)])


def read(key: str, name: str) -> Encoded | None:
    """Return the table that `keep` stored under a key; None if there is none or it is damaged.

    `name` is that of the table, with which the sources of its rows begin.
    """
    path = _path(key)
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if content[:_DIGEST_BYTES] != digest([content[_DIGEST_BYTES:]]).encode():
        return None
    with contextlib.suppress(OSError):
        path.touch()
    with np.load(io.BytesIO(content[_DIGEST_BYTES:]), allow_pickle=False) as arrays:
        about = json.loads(arrays["about"].tobytes())
        tokens, lengths, sizes = arrays["tokens"], arrays["lengths"], arrays["rows"]
        targets = np.unpackbits(arrays["targets"], count=len(tokens)).astype(bool)
    ends = np.cumsum(lengths).tolist()
    examples = iter(
        Example(tokens[start:end], targets[start:end], name + source)
        for start, end, source in zip([0, *ends[:-1]], ends, about["sources"], strict=True)
    )
    return Encoded(
        [list(islice(examples, size)) for size in sizes.tolist()],
        Counter(about["kinds"]),
        Counter(about["unread"]),
        Counter(about["unwritten"]),
        Counter(dict(zip((True, False), about["prompts"], strict=True))),
    )


def keep(key: str, name: str, encoded: Encoded) -> None:
    """Keep the examples of a table for the next start, if the folder can be written and they are not too large."""
    examples = [example for row in encoded.rows for example in row]
    about = {
        "sources": [example.source.removeprefix(name) for example in examples],
        "kinds": encoded.kinds,
        "unread": encoded.unread,
        "unwritten": encoded.unwritten,
        "prompts": [encoded.prompts[True], encoded.prompts[False]],
    }
    tokens = np.concatenate([example.tokens for example in examples]) if examples else np.zeros(0, np.int32)
    targets = np.concatenate([example.targets for example in examples]) if examples else np.zeros(0, bool)
    file = io.BytesIO()
    np.savez(
        file,
        tokens=tokens,
        targets=np.packbits(targets),
        lengths=np.array([len(example.tokens) for example in examples], np.int64),
        rows=np.array([len(row) for row in encoded.rows], np.int64),
        about=np.frombuffer(json.dumps(about).encode(), np.uint8),
    )
    content = digest([file.getbuffer()]).encode() + file.getbuffer()
    if len(content) > LARGEST_BYTES:
        return
    # Without these files the next start takes longer, and nothing else changes.
    with contextlib.suppress(OSError):
        _make_room(len(content))
        write(_path(key), content)


def _path(key: str) -> Path:
    return cache_directory() / "tokens" / f"{key}.tokens"


def _make_room(needed: int) -> None:
    """Remove the files that were not read for longest, until `needed` more bytes are within LARGEST_BYTES."""
    files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in _path("").parent.glob("*.tokens"))
    room = LARGEST_BYTES - sum(size for _, size, _ in files)
    for _, size, path in files:
        if room >= needed:
            return
        path.unlink(missing_ok=True)
        room += size
