"""The operators that several implementations compute, which doctor, self-test and reports go through."""

from __future__ import annotations

from .attention.choice import OPERATOR as ATTENTION
from .decoding import attention_token, delta_token, gated_attention_token, linear_token, sampled_token
from .experts import trial_case as experts
from .gated_delta.choice import OPERATOR as GATED_DELTA
from .linear_attention.choice import OPERATOR as LINEAR_ATTENTION
from .pointwise import (
    adam,
    joining,
    rows,
    scored_swiglu,
    squares,
    stored_moments,
    unpacking,
    vocabulary_loss,
    weighted_norms,
    workloads,
)
from .products import low_rank

OPERATORS = (GATED_DELTA, LINEAR_ATTENTION, ATTENTION)
# Those that kernels compute where they are right, and MLX's operations elsewhere.
KERNELS = (
    *(workloads.OPERATOR, weighted_norms.OPERATOR, rows.OPERATOR, joining.OPERATOR, unpacking.OPERATOR, adam.OPERATOR),
    *(vocabulary_loss.OPERATOR, low_rank.OPERATOR, squares.OPERATOR, scored_swiglu.OPERATOR, stored_moments.OPERATOR),
    *(experts.PRODUCTS, experts.GRADIENTS),
    *(module.OPERATOR for module in (linear_token, attention_token, gated_attention_token, delta_token, sampled_token)),
)
