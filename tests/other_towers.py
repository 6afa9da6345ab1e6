"""Tiny models of mlx-vlm that are not trained on images here, as scripts/families makes them."""

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "scripts" / "families"


def from_families(name: str) -> Any:
    """Import a module of scripts/families. Other scripts, which tests may have imported, have files of its names."""
    names = [file.stem for file in FOLDER.glob("*.py")]
    others = {each: sys.modules.pop(each) for each in names if each in sys.modules}
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for each in names:
            sys.modules.pop(each, None)
        sys.modules.update(others)


def config(family: str) -> dict[str, Any]:
    """config.json of a tiny model."""
    return from_families("mlx_vlm_types").config_of_vlm(f"mlx_vlm.{family}")


def build(family: str) -> Any:
    """The model with random weights, as mlx-vlm's own loader builds it."""
    return from_families("packages").MLX_VLM.new(config(family))
