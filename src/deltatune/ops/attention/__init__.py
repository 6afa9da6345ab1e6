"""Softmax attention that trains in linear memory, with gradients for q, k, v and sinks. README.md derives them."""

from .blocked import attention_blocked
from .naive import attention_naive
from .op import attention

__all__ = ["attention", "attention_blocked", "attention_naive"]
