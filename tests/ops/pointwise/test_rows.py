"""Rows chosen and rows summed, on the host machine or a GPU, against MLX's operations; and where each serves."""

from __future__ import annotations

from functools import partial

import deltatune  # noqa: F401

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from deltatune.machine import backend
from deltatune.ops.pointwise import rows
from deltatune.ops.pointwise.rows import combined, taken

DTYPES = [mx.float32, mx.bfloat16, mx.float16]
ROUNDING = {mx.float32: 2.0**-22, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def drawn(dtype, tokens=37, k=3, width=40):
    x = mx.random.normal((tokens * k, width), key=mx.random.key(0)).astype(dtype)
    weights = mx.random.normal((tokens, k), key=mx.random.key(1))
    order = mx.argsort(mx.random.normal((tokens * k,), key=mx.random.key(2)))
    return x, weights, order


@pytest.mark.parametrize("kind", [mx.int32, mx.uint32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_taken_rows_are_those_rows(dtype, kind, execute):
    x, _, order = drawn(dtype)
    for index in (order, order[:5], mx.concatenate([order, order]), mx.array([110, 0, 0])):
        found = taken(x, index.astype(kind), execute=execute)
        assert found.dtype == dtype
        assert mx.array_equal(found, x[index])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("result", [None, mx.float32])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combined_rows_against_float64(dtype, k, result, weighted, execute):
    x, weights, order = drawn(dtype, k=k)
    place = order.reshape(-1, k)
    found = combined(x, place, weights if weighted else None, result, execute=execute)
    wide = np.array(x.astype(mx.float32), np.float64)[np.array(place)]
    expected = (wide * np.array(weights, np.float64)[..., None] if weighted else wide).sum(axis=1)
    assert found.dtype == (result or dtype)
    error = np.abs(np.array(found.astype(mx.float32)) - expected).max() / np.abs(expected).max()
    assert error < ROUNDING[result or dtype]


def test_where_they_serve(monkeypatch):
    large, small, narrow = (mx.zeros(shape) for shape in ((1024, 64), (8, 64), (10240, 12)))
    monkeypatch.setattr(rows, "_proven", lambda *_: True)
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    assert rows.proven(large, 1024)
    assert not rows.proven(small, 1023)
    assert not rows.proven(narrow, 10240)
    for device in ("cpu", "metal"):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert not rows.proven(large, 1024)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_them_mlxs_operations_give_the_same(dtype):
    x, weights, order = drawn(dtype)
    assert mx.array_equal(taken(x, order), x[order])
    found = combined(x, order.reshape(-1, 3), weights)
    assert found.dtype == dtype
    each = x[order].reshape(-1, 3, 40).astype(mx.float32) * weights[..., None]
    assert mx.abs(found.astype(mx.float32) - each.sum(axis=1)).max() < 4 * ROUNDING[dtype] * mx.abs(each).max()


def test_a_pass_that_is_wrong_or_does_not_run_is_not_used(on_trial):
    on_trial(partial(rows._proven, mx.float32), 1.2)
