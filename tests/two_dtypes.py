"""Which dtypes a kernel's text is tried in, where it is the same in all and each form of it is compiled anew."""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import pytest


def in_two_dtypes(forms: Iterable[Any]) -> list[Any]:
    """Return each form with bf16, and with fp32 and fp16 in turn: each form and each dtype occur, not all pairs.

    One of a form's two waits for the weekly run, bf16 in every second form.
    """
    cases = []
    for i, form in enumerate(forms):
        for weekly, dtype in enumerate((mx.bfloat16, (mx.float32, mx.float16)[i // 2 % 2])[:: (-1) ** i]):
            marks = [pytest.mark.weekly] * weekly
            cases.append(pytest.param(form, dtype, id=f"{form}-{str(dtype).rpartition('.')[2]}", marks=marks))
    return cases
