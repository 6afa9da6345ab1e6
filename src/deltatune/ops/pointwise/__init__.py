"""Elementwise and row-wise operations of training, each as one kernel, for CUDA, where mx.compile fuses nothing.

They are the norms, gates, activation and convolution of a gated-delta layer, the norms, rotary embedding and gate
around attention, Adam's update, and choosing and summing the rows of experts. Each is compared with MLX's operations
before its first use on a machine (passes.py).
"""
