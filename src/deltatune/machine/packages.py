"""Finds the versions of the installed packages that influence results."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterable

PACKAGES = ("deltatune", "mlx", "mlx-lm", "mlx-vlm", "numpy", "transformers")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the version of each package that is installed, by name."""
    installed = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed
