"""The routed experts of a mixture-of-experts layer, base and adapter together, as one function with its gradient."""

from .block import expert_block, swiglu
from .projection import Projection

__all__ = ["Projection", "expert_block", "swiglu"]
