"""The gated delta rule: y and final state, with gradients for every input. See README.md here for the derivation."""

from .chunk import gated_delta_chunk
from .naive import gated_delta_naive
from .op import gated_delta

__all__ = ["gated_delta", "gated_delta_chunk", "gated_delta_naive"]
