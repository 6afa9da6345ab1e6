"""Trains a model: the training loop, its compiled step, and the saved state from which a run continues."""

from .ending.interrupt import StoppedError
from .loop import Trainer
from .progress import Result

__all__ = ["Result", "StoppedError", "Trainer"]
