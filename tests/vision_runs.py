"""The flags of short runs on images or videos."""

from pathlib import Path
from typing import Any


def options(model: Path, folder: Path, target: Path, **more: Any) -> list[str]:
    """Return the flags of a short run on the data in `folder` into `target`; `more` adds or replaces flags."""
    flags = {"model": model, "data": folder, "adapter-path": target, "iters": 6, "batch-size": 4, "warmup": 0}
    flags |= {"lr-schedule": "constant", "learning-rate": 2e-3, "steps-per-report": 2, "steps-per-eval": 6} | more
    return [part for key, value in flags.items() for part in (f"--{key}", str(value))]
