"""The gated delta rule, with a gradient for every input. README.md in this folder derives the formulas."""

from .chunk import gated_delta_chunk
from .naive import gated_delta_naive
from .op import gated_delta

__all__ = ["gated_delta", "gated_delta_chunk", "gated_delta_naive"]
