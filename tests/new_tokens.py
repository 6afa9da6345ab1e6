"""Copies of checkpoints with tokens that the embedding has no row for, and data that use them."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

TOKENS = ["<call>", "</call>"]


def with_new_tokens(checkpoint: Path, target: Path) -> Path:
    """Copy a checkpoint, and add TOKENS to the tokenizer of the copy."""
    shutil.copytree(checkpoint, target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens(TOKENS)
    tokenizer.save(str(target / "tokenizer.json"))
    return target


def write_data(folder: Path, *, new: bool = True, rows: int = 8) -> Path:
    """Write the three splits. With `new`, every answer but the first has both tokens, around a word."""
    folder.mkdir(parents=True)
    opening, closing = TOKENS if new else ("", "")
    answers = ["plain"] + [f"{opening} fox {number} {closing}" for number in range(1, rows)]
    lines = [{"prompt": f"question {number}", "completion": answer} for number, answer in enumerate(answers)]
    for split in ("train", "valid", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
