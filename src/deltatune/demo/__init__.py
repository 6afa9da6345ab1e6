"""`make demo`: the bundled model learns the bundled task, and shows it."""

from .text_demo import run_demo

__all__ = ["run_demo"]
