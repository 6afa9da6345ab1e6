"""What operators know of a step: rules that its graph leaves out, a packed batch's segments and mask."""

import io

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.functional import differentiated_once, not_differentiated_again, without_vmap
from deltatune.ops.segments import attention_mask, segments


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


def _rules(function, *arrays: mx.array) -> int:
    """How many custom functions' rules the graph of a function's result holds."""
    text = io.StringIO()
    mx.export_to_dot(text, function(*arrays))
    return text.getvalue().count("CustomTransforms")


def _refuse(*_):
    raise NotImplementedError("no rule")


def _outer(x: mx.array) -> mx.array:
    function = mx.custom_function(lambda x: x * x)
    function.vjp(lambda x, d, _: not_differentiated_again(lambda x, d: 2 * x * d, _refuse)(x, d))
    return function(x)


def test_a_step_keeps_the_rule_of_the_first_derivative_alone():
    x = mx.array([1.0, 2.0])
    gradient = mx.grad(lambda x: _outer(x).sum())
    assert _rules(gradient, x) == 1
    with differentiated_once():
        assert _rules(gradient, x) == 0
        assert _rules(_outer, x) == 1
        assert mx.array_equal(gradient(x), 2 * x)


def test_elsewhere_a_second_derivative_asks_for_the_rule():
    with pytest.raises(NotImplementedError, match="no rule"):
        mx.grad(lambda x: mx.grad(lambda x: _outer(x).sum())(x).sum())(mx.array([1.0]))


def test_a_step_is_never_mapped():
    x = mx.array([1.0, 2.0])

    def call(x: mx.array) -> mx.array:
        return without_vmap("not mapped")(x)[0] * 2

    with pytest.raises(ValueError, match="not mapped"):
        mx.vmap(call)(x)
    with differentiated_once():
        assert _rules(call, x) == 0
