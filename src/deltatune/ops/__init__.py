"""Operators with gradients written by hand: gated delta, experts, convolution, loss, checkpoints and fused passes."""
