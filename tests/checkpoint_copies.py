"""Copies of tiny checkpoints with other contents."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx


def rewrite(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes a key out."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def copied(checkpoint: Path, target: Path, **config: Any) -> Path:
    """Copy a checkpoint, and change keys of config.json in the copy."""
    shutil.copytree(checkpoint, target)
    rewrite(target / "config.json", **config)
    return target


@contextmanager
def rewritten(file: Path) -> Iterator[dict[str, mx.array]]:
    """Give the tensors of a file, by name, to change within the context; then write them to the file."""
    tensors = mx.load(str(file))
    mx.eval(tensors)
    yield tensors
    mx.eval(tensors)
    mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
