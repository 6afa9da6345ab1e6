"""The context that holds a packed batch's segments, and the attention mask that is built from them."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.segments import attention_mask, current, segments


def test_context_nests_and_restores():
    one, two = mx.zeros((1, 3), mx.int32), mx.ones((1, 3), mx.int32)
    assert current() is None
    with segments(one):
        with segments(two):
            assert current() is two
        with segments(None):
            assert current() is None
        assert current() is one
    assert current() is None


def test_context_restores_after_an_error():
    def fail() -> None:
        with segments(mx.zeros((1, 3), mx.int32)):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fail()
    assert current() is None


@pytest.mark.parametrize("array", [mx.zeros((3,), mx.int32), mx.zeros((1, 3))], ids=["rank", "dtype"])
def test_arrays_of_another_rank_or_type_are_refused(array):
    with pytest.raises(ValueError, match="expected integers of shape"):
        segments(array).__enter__()


@pytest.mark.parametrize("window", [None, 2, 100])
def test_attention_mask(window):
    segment = np.array([[0, 0, 0, 1, 1, 2], [4, 4, 4, 4, 4, 4]])
    actual = np.array(attention_mask(mx.array(segment), window))
    assert actual.shape == (2, 1, 6, 6)
    for b in range(2):
        for query in range(6):
            for key in range(6):
                in_window = window is None or query - key < window
                expected = key <= query and segment[b, query] == segment[b, key] and in_window
                assert actual[b, 0, query, key] == expected
