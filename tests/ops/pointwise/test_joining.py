"""Joining arrays in one launch gives the numbers of mx.concatenate; and when the launch is used."""

from __future__ import annotations

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator import first_use
from deltatune.ops.pointwise import joining
from deltatune.ops.pointwise.joining import end_to_end

SHAPES = [(3, 50), (1,), (7,), (130, 2), (8, 16)]


def random_arrays(dtype, shapes=SHAPES):
    return [mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_equals_a_concatenation(dtype, execute):
    arrays = random_arrays(dtype)
    arrays[0] = arrays[0].T
    expected = mx.concatenate([array.reshape(-1) for array in arrays]).astype(mx.float32)
    for run in (execute, None):
        with on(run):
            found = end_to_end(arrays)
        assert found.dtype == mx.float32
        assert mx.array_equal(found, expected)


def test_when_launches_are_used(monkeypatch):
    launches = []

    def run(launch):
        launches.append(launch.name)
        assert len(launch.inputs) <= joining.MOST
        return [mx.concatenate([array.reshape(-1) for array in launch.inputs.values()])]

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(first_use, "is_right", lambda *_, **__: True)
    arrays = random_arrays(mx.float32)
    many = arrays * (1 + joining.MOST // len(arrays))
    cases = [arrays, arrays[:1], [arrays[0], arrays[1].astype(mx.bfloat16)], many]
    for device, times in (("cpu", 0), ("metal", 0), ("cuda", 3)):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        launches.clear()
        for case in cases:
            assert mx.array_equal(end_to_end(case), mx.concatenate([array.reshape(-1) for array in case]))
        # The first case takes one launch, and the last takes two.
        assert len(launches) == times
