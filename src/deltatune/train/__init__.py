"""Training: the loop, its compiled step, and a state that is never lost."""

from .interrupt import StoppedError
from .loop import Result, Trainer

__all__ = ["Result", "StoppedError", "Trainer"]
