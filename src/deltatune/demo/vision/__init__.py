"""`deltatune demo vision`: a bundled model with a vision tower learns to report what lies in a tray."""

from .vision_demo import run_demo

__all__ = ["run_demo"]
