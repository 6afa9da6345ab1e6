"""Operators with gradients of their own: the gated delta rule, short convolutions, losses, recomputation."""
