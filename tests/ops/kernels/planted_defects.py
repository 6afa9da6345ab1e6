"""Chooses the planted defects of a kernel that `make test` runs: whether one shows changes with the text alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# `make test` runs one defect of so many. Each takes a compilation of the kernel.
OF_SO_MANY = 4


def some_daily(defects: Iterable[Any]) -> list[Any]:
    """Return `defects` for parametrize(): the first of every four as it is, the others weekly.

    That each has its place in the text is to be tested for all of them, which compiles nothing.
    """
    params = []
    for at, defect in enumerate(defects):
        values = defect if isinstance(defect, tuple) else (defect,)
        params.append(pytest.param(*values, marks=[pytest.mark.weekly] * (at % OF_SO_MANY > 0)))
    return params
