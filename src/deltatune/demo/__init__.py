"""`make demo`: the bundled model learns the bundled task, and shows it."""

from .run import main, run_demo

__all__ = ["main", "run_demo"]
