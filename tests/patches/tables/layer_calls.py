"""Layers of tiny models, and calls of them: on whole rows, with padding, on packed documents, and in pieces."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3_5, qwen3_next

from deltatune.ops.pieces import States
from deltatune.ops.segments import segments

SIZES = {"hidden_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 24}
SIZES |= {"linear_key_head_dim": 16, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rope_theta": 1e4}
SIZES |= {"attention_bias": False, "rope_scaling": None, "max_position_embeddings": 128}


def delta_layer(family: str) -> nn.Module:
    mx.random.seed(3)
    if family == "qwen3_5":
        known = qwen3_5.TextModelArgs.__dataclass_fields__
        return qwen3_5.GatedDeltaNet(qwen3_5.TextModelArgs(**{k: v for k, v in SIZES.items() if k in known})).train()
    return qwen3_next.Qwen3NextGatedDeltaNet(type("Sizes", (), SIZES)).train()


def attention(**sizes) -> nn.Module:
    return qwen3_next.Qwen3NextAttention(type("Sizes", (), SIZES | sizes))


def whole(layer, x):
    return layer(x)


def masked(layer, x):
    """The first tokens are padding, which the convolution of the others must not read."""
    return layer(x, mx.arange(x.shape[1])[None] >= mx.array([[2], [9]]))


def packed(layer, x):
    owner = mx.array(np.tile(np.repeat([0, 1, 2], [5, 1, x.shape[1] - 6]), (2, 1)))
    with segments(owner):
        return layer(x)


def in_pieces(layer, x):
    """One cache after another, of which the second piece is shorter than the convolution's state."""
    ys, arrays = [], [None, None]
    for start, stop in ((0, 8), (8, 10), (10, x.shape[1])):
        cache = States(arrays)
        ys.append(layer(x[:, start:stop], cache=cache))
        arrays = cache.following
    return mx.concatenate(ys, axis=1)


RUNS = (whole, masked, packed, in_pieces)
