"""The operators that several implementations compute, which doctor, self-test and reports go through."""

from __future__ import annotations

from dataclasses import replace

from .attention.choice import OPERATOR as ATTENTION
from .decoding import attention_token, delta_token, gated_attention_token, linear_token, sampled_token
from .experts import trial_case as experts
from .gated_delta.choice import OPERATOR as GATED_DELTA
from .linear_attention.choice import OPERATOR as LINEAR_ATTENTION
from .pointwise import (
    adam,
    conv,
    gating,
    heads,
    joining,
    norms,
    passes,
    rows,
    scored_swiglu,
    silu,
    squares,
    stored_moments,
    unpacking,
    vocabulary_loss,
    weighted_norms,
)
from .products import low_rank

# The passes with a gradient, which the self-test compares with float64 at the sizes of a model.
_PASSES = (silu, norms, heads, conv, gating)
OPERATORS = (GATED_DELTA, LINEAR_ATTENTION, ATTENTION)
# Those that kernels compute where they are right, and MLX's operations elsewhere.
KERNELS = (
    replace(passes.OPERATOR, workloads=lambda quick: [load for module in _PASSES for load in module.workloads(quick)]),
    *(module.OPERATOR for module in (weighted_norms, rows, joining, unpacking, adam, vocabulary_loss, low_rank)),
    *(module.OPERATOR for module in (squares, scored_swiglu, stored_moments)),
    *(experts.PRODUCTS, experts.GRADIENTS),
    *(module.OPERATOR for module in (linear_token, attention_token, gated_attention_token, delta_token, sampled_token)),
)
