"""Lets the tokenizer of a tiny checkpoint have a token that begins a text, and add special tokens around each text."""

import json
import shutil
from pathlib import Path
from typing import Any

# An unused token of the tiny checkpoints, and the one that ends their texts.
FIRST, LAST = "<|unused_0|>", "<|im_end|>"


def with_first_token(source: Path, target: Path, *, before: bool = False, behind: bool = False) -> Path:
    """Copy a checkpoint to `target` with FIRST as its first token, added `before` each text, and LAST `behind`."""
    shutil.copytree(source, target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": FIRST}))
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    numbers = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    added = {name: {"id": name, "ids": [numbers[name]], "tokens": [name]} for name in (FIRST, LAST)}
    single = [*[_special(FIRST)] * before, {"Sequence": {"id": "A", "type_id": 0}}, *[_special(LAST)] * behind]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": added,
    }
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


def _special(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}
