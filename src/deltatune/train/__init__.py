"""Training: the loop, its compiled step, and a state that is never lost."""

from .interrupt import StoppedError
from .loop import Trainer
from .result import Result

__all__ = ["Result", "StoppedError", "Trainer"]
