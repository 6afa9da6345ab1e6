"""Training: the loop, its compiled step, and a state that is never lost."""

from .interrupt import Interrupted
from .loop import Result, Trainer

__all__ = ["Interrupted", "Result", "Trainer"]
