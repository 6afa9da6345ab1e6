"""The operators that several implementations compute, which doctor, self-test and reports go through."""

from __future__ import annotations

from .attention.choice import OPERATOR as ATTENTION
from .gated_delta.choice import OPERATOR as GATED_DELTA

OPERATORS = (GATED_DELTA, ATTENTION)
