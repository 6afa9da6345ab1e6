"""Operators with gradients written by hand: gated delta, experts, convolution, loss, checkpoints and fused passes."""

# By operator, the implementations that its environment variable may force (operators.py has the operators).
IMPLEMENTATIONS = {
    "gated_delta": ("naive", "chunk", "chunk_bf16", "fused", "native"),
    "linear_attention": ("naive", "chunk", "chunk_bf16", "fused"),
    "quantized_product": ("packed", "unpacked"),
    "attention": ("naive", "blocked", "fused", "native"),
}
