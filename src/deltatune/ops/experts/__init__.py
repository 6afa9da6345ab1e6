"""The routed experts of a mixture-of-experts layer as one differentiable function."""

from .activation import swiglu
from .block import expert_block
from .projection import Projection

__all__ = ["Projection", "expert_block", "swiglu"]
