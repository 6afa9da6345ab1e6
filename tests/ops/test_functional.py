"""The rules that a training step's graph leaves out, and those that it keeps."""

import io

import mlx.core as mx
import pytest

from deltatune.ops.functional import differentiated_once, not_differentiated_again, without_vmap


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
