"""Which dtypes a kernel's text is tried in, where it is the same in all and each form of it is compiled anew."""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import pytest


def in_two_dtypes(forms: Iterable[Any]) -> list[Any]:
    """Return each form with bf16, and with fp32 and fp16 in turn: each form and each dtype occur, not all pairs."""
    others = (mx.float32, mx.float16)
    pairs = [(form, dtype) for i, form in enumerate(forms) for dtype in (mx.bfloat16, others[i % 2])]
    return [pytest.param(*pair, id=f"{pair[0]}-{str(pair[1]).rpartition('.')[2]}") for pair in pairs]
