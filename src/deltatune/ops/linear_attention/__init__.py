"""Linear attention with gates: the gated delta rule without its erase, by the implementations of that rule."""

from .op import linear_attention

__all__ = ["linear_attention"]
