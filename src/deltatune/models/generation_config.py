"""Adds tokens at which generation stops to a checkpoint's files, generation_config.json before all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_files import read_json
from ..machine.atomic_files import replace_file
from .load import load_tokenizer, locate, plain_config

NAME = "generation_config.json"


def end_tokens(model_path: str | Path, texts: Sequence[str]) -> list[int]:
    """Return the tokens at which generation is to stop: those of a checkpoint, then these.

    Args:
        model_path: The checkpoint: a folder, or a name on the Hugging Face hub.
        texts: Further tokens as they are written, or their numbers.

    Raises:
        UserError: The model has no such token.
    """
    path = locate(model_path)
    tokenizer = tokenizer_of(path)
    known = tokenizer.get_vocab()
    ends = sorted(tokenizer.eos_token_ids)
    for text in texts:
        number = known.get(text, int(text) if text.isdecimal() else None)
        if number not in known.values():
            raise UserError(f"--extra-eos-token: {text!r} is no token of this model, and no token's number.")
        ends = [*(end for end in ends if end != number), number]
    return ends


def unwritten_ends(folder: Path) -> list[int]:
    """Return the tokens at which generation stops in mlx-lm and here, if transformers overlooks one of them; else none.

    mlx-lm stops at the tokenizer's end token and at those of generation_config.json; transformers at the latter alone.
    A checkpoint without a tokenizer that loads here, without code of its own, is left as it is.
    """
    written = read_json(folder / NAME) if (folder / NAME).is_file() else read_json(folder / "config.json")
    stated = written.get("eos_token_id", (written.get("text_config") or {}).get("eos_token_id"))
    try:
        ends = tokenizer_of(folder).eos_token_ids
    except UserError:
        return []
    return sorted(ends) if ends - set(stated if isinstance(stated, list) else [stated]) else []


def write_ends(folder: Path, ends: Sequence[int]) -> None:
    """Write the tokens at which generation stops into the generation_config.json of a checkpoint's folder."""
    _change(folder / NAME, eos_token_id=list(ends))


def write_tokenizer_end(folder: Path, end: int) -> None:
    """Make a token the end token of the tokenizer in a checkpoint's folder, where llama.cpp's converter reads it."""
    token = tokenizer_of(folder).convert_ids_to_tokens(end)
    _change(folder / "tokenizer_config.json", eos_token=token)


def tokenizer_of(folder: Path) -> Any:
    """Return mlx-lm's wrapper of the tokenizer, also that of a model which mlx-vlm alone knows."""
    return load_tokenizer(folder, plain_config(folder, trust_remote_code=True))


def _change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file, which need not exist."""
    content = {**(read_json(path) if path.is_file() else {}), **fields}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    try:
        replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}).") from error
