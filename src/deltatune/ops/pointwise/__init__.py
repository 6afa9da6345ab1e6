"""What stands around the recurrence, in one pass over memory each: for CUDA, where mx.compile fuses nothing."""

from .conv import conv_silu
from .gating import gates, log_gate
from .norms import gated_norm, norm
from .silu import swiglu

__all__ = ["conv_silu", "gated_norm", "gates", "log_gate", "norm", "swiglu"]
