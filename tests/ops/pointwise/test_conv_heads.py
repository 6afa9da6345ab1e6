"""Convolution, silu and norms of heads in one pass: values and gradients against float64, and its refusals."""

from dataclasses import replace
from functools import partialmethod

import mlx.core as mx
import numpy as np
import pytest

import against_float64
from deltatune.ops.kernels.launch import on
from deltatune.ops.operator import first_use
from deltatune.ops.operator.measure import relative_error
from deltatune.ops.pointwise import conv, conv_heads, conv_silu
from deltatune.ops.pointwise.conv import FORWARD, NormedHeads
from deltatune.ops.pointwise.passes import Passes
from pass_definitions import reference_heads
from two_dtypes import in_two_dtypes

# The largest error over the largest element: that of fp32 sums of up to 256 terms, of which a gradient has two, or of
# one rounding to the dtype, with room for a second one in the gradient of the weight.
BOUND = {mx.float32: 4e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
ROWS = FORWARD.rows
# Heads, their size, the values' channels, taps, tokens, whether there is a state, and whether there are documents.
CASES = {
    "one head of 64": (1, 64, 24, 4, ROWS + 3, False, False),
    "heads of 128, state, documents": (2, 128, 264, 4, 2 * ROWS + 5, True, True),
    "heads of 96": (3, 96, 8, 4, ROWS, True, False),
    "heads of 96, documents": (1, 96, 40, 3, ROWS + 1, False, True),
    "heads of 256": (1, 256, 16, 2, 7, False, False),
    "five heads of 24, state": (5, 24, 8, 3, 2 * ROWS, True, True),
    "one token": (2, 8, 16, 4, 1, False, False),
    "two tokens, state": (2, 16, 16, 4, 2, True, True),
}


def form_of(case):
    """The norms of a case, and its documents: of one token, of a few, and of more than a lane computes."""
    count, size, *_, length, _, segmented = CASES[case]
    heads = NormedHeads(count, size, 1 / size, size**-0.5, 1e-3)
    owner = np.searchsorted([1, 4, 9, 11], np.arange(length), side="right") if segmented else None
    return heads, owner


def drawn(case, dtype, spread=1.0, batch=2):
    """x, weight and, where the case has one, a state."""
    count, size, values, taps, length, stateful, _ = CASES[case]
    channels = 2 * count * size + values
    shapes = [(batch, length, channels), (channels, taps), *[(batch, taps - 1, channels)] * stateful]
    x, weight, *state = against_float64.drawn(*shapes, dtype=dtype, seed=7)
    return [spread * x, weight, *(spread * array for array in state)]


def ours(case, batch=2):
    heads, owner = form_of(case)
    documents = None if owner is None else mx.broadcast_to(mx.array(owner.astype(np.int32)), (batch, len(owner)))
    return lambda x, weight, state=None: conv_heads(x, weight, heads, state, documents)


@pytest.mark.parametrize(("case", "dtype"), in_two_dtypes(CASES))
@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_values_and_gradients_against_float64(case, spread, dtype, execute):
    heads, owner = form_of(case)
    arrays = drawn(case, dtype, spread)
    found = against_float64.errors(
        ours(case), lambda x, w, state=None: reference_heads(x, w, heads, state, owner), arrays
    )
    assert max(found) < BOUND[dtype], found


def test_rows_of_zeros_have_finite_gradients(execute):
    """Masked tokens are rows of zeros, with a norm from eps alone."""
    case = "heads of 128, state, documents"
    arrays = drawn(case, mx.float32)
    arrays[0][:, 3:12] = 0
    outputs, gradients = mx.vjp(ours(case), arrays, [mx.ones_like(y) for y in ours(case)(*arrays)])
    assert all(mx.isfinite(array).all() for array in [*outputs, *gradients])


def test_inputs_with_other_strides_and_odd_offsets(execute):
    case = "heads of 96"
    x, weight, state = drawn(case, mx.bfloat16)
    wanted = ours(case)(x, weight, state)
    odd = mx.concatenate([mx.zeros((1,), x.dtype), x.reshape(-1)])[1:].reshape(x.shape)
    turned = mx.contiguous(x.swapaxes(0, 1)).swapaxes(0, 1)
    for given in (odd, turned):
        for one, other in zip(ours(case)(given, weight, state), wanted, strict=True):
            assert mx.array_equal(one, other)


def test_a_row_in_pieces_is_the_whole_row(execute):
    """The last rows of a piece are the state of the next: values are equal, and so are the sums of gradients."""
    case = "heads of 128, state, documents"
    heads, _ = form_of(case)
    x, weight, state = drawn(case, mx.float32)

    def whole(x, weight, state):
        return conv_heads(x, weight, heads, state)

    def in_pieces(x, weight, state):
        first = conv_heads(x[:, :20], weight, heads, state)
        rest = conv_heads(x[:, 20:], weight, heads, x[:, 17:20])
        return [mx.concatenate(list(pair), axis=1) for pair in zip(first, rest, strict=True)]

    ones = [mx.random.normal(y.shape, key=mx.random.key(3)) for y in whole(x, weight, state)]
    wanted, expected = mx.vjp(whole, [x, weight, state], ones)
    found, gradients = mx.vjp(in_pieces, [x, weight, state], ones)
    assert all(mx.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    for one, other in zip(gradients, expected, strict=True):
        # A row's gradient is a sum of at most four terms, here in another order.
        assert relative_error(one, other) < 1e-6


def test_without_heads_it_is_the_convolution_alone(execute):
    """The values equal those of a convolution with its state in its input's first rows."""
    case = "heads of 96"
    x, weight, state = drawn(case, mx.float32)
    *_, values = ours(case)(x, weight, state)
    y = conv_silu(mx.concatenate([state, x], axis=1), weight)
    assert mx.array_equal(values, y[..., -values.shape[2] :])


def test_one_launch_forward_and_one_backward(execute):
    x, weight, state = drawn("heads of 96", mx.float32)
    launches = []

    def counted(launch):
        launches.append((launch.name, tuple(launch.outputs)))
        return execute(launch)

    with on(counted):
        mx.eval(mx.grad(lambda x: sum(y.sum() for y in ours("heads of 96")(x, weight, state)))(x))
    assert launches[:2] == [("conv_silu_forward", ("q", "k", "v")), ("conv_silu_backward", ("dx", "dstate"))]
    # The host machine runs each launch at once, and a GPU those that something uses, which a frozen weight's is not.
    assert launches[2:] == [("conv_silu_taps", ("dweight",))]


def test_refuses_what_does_not_fit():
    case = "one head of 64"
    heads, _ = form_of(case)
    x, weight = drawn(case, mx.float32)
    for arguments in (
        (x, weight[:, :1], heads),
        (x, weight[:8], heads),
        (x[..., :128], weight[:128], heads),
        (x, weight, replace(heads, size=60)),
        (x, weight, replace(heads, size=264)),
        (x, weight, heads, mx.zeros((2, 2, x.shape[2]))),
        (x, weight, heads, mx.zeros((2, 3, x.shape[2]), mx.bfloat16)),
    ):
        assert not conv.serves_heads(*arguments)
        with pytest.raises(ValueError, match="conv_heads: x"):
            conv_heads(*arguments)


def test_every_form_is_tried_before_its_first_use(execute, monkeypatch):
    monkeypatch.setattr(Passes, "passes_trial", partialmethod(Passes.passes_trial, device=execute))
    monkeypatch.setattr(first_use, "_right", {})
    case = "one head of 64"
    heads, _ = form_of(case)
    x, weight = drawn(case, mx.float32)
    assert not conv.serves_heads(x, weight, heads)  # It has too few elements.
    monkeypatch.setattr(conv, "LEAST", 0)
    state, documents = mx.zeros((2, 3, x.shape[2])), mx.zeros(x.shape[:2], mx.int32)
    forms = [(None, None), (state, None), (None, documents), (state, documents)]
    assert all(conv.serves_heads(x, weight, heads, *form) for form in forms)
    assert len(first_use._right) == len(forms)


def test_a_kernel_that_is_wrong_is_not_used(execute, monkeypatch):
    case = "one head of 64"
    heads, _ = form_of(case)
    x, weight = drawn(case, mx.bfloat16)
    monkeypatch.setattr(conv, "LEAST", 0)
    for name in ("conv_silu_forward", "conv_silu_backward"):

        def wrong(launch, name=name):
            found = execute(launch)
            return [array * 1.2 for array in found] if launch.name == name else found

        monkeypatch.setattr(Passes, "passes_trial", partialmethod(_passes_trial, device=wrong))
        monkeypatch.setattr(first_use, "_right", {})
        assert not conv.serves_heads(x, weight, heads)


_passes_trial = Passes.passes_trial
