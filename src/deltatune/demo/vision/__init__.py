"""`deltatune demo vision` fine-tunes a bundled model with a vision tower to list the parts in pictures of trays."""

from .vision_demo import run_demo

__all__ = ["run_demo"]
