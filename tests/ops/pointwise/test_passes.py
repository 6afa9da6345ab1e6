"""Kernels with a gradient, on the host machine or a GPU: against float64, their launches, refusals and trials."""

from collections.abc import Callable
from functools import partial, partialmethod
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from against_float64 import drawn, errors, listed, with_gradients
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator import kernel_operator
from deltatune.ops.operator.measure import relative_error
from deltatune.ops.pointwise import conv, gating, heads, norms, silu
from deltatune.ops.pointwise.conv import NormedHeads, conv_heads, conv_silu
from deltatune.ops.pointwise.gating import gates
from deltatune.ops.pointwise.heads import times_gate, turned_heads
from deltatune.ops.pointwise.norms import gated_norm
from deltatune.ops.pointwise.passes import Passes
from deltatune.ops.pointwise.silu import swiglu
from deltatune.ops.pointwise.weighted_norms import branch_norm, sum_norm, weighted_norm
from pass_definitions import inverse_rms, reference_conv, reference_gates, reference_heads, reference_turned_heads
from two_dtypes import in_two_dtypes

# The largest error over the largest element: that of fp32 sums of 256 terms and an exponential, or of rounding; twice
# as much in fp32 for a gradient of two such sums, and for angles below 16.
BOUND = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
TWO_SUMS = BOUND | {mx.float32: 4e-6}
# Half a last place of the dtype, twice: a sum is rounded, and its norm is. In fp32 sums have up to 2,560 terms.
OF_NORMS = {mx.float32: 2.0**-20, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
EPS, BASE = 1e-3, 1e4
ROWS = conv.FORWARD.rows


class Pass(NamedTuple):
    """A function of arrays, its definition, the shapes of its arguments, and by dtype the largest error."""

    function: Callable
    definition: Callable
    shapes: list[tuple[int, ...]]
    bound: dict[mx.Dtype, float] = BOUND


def owner_of(length: int, segmented: bool) -> tuple[np.ndarray | None, mx.array | None]:
    """Documents of one token, of a few tokens, and of more tokens than a lane computes: [T], and [2, T] int32."""
    owner = np.searchsorted([1, 4, 9, 11], np.arange(length), side="right")
    documents = mx.broadcast_to(mx.array(owner.astype(np.int32)), (2, length))
    return (owner, documents) if segmented else (None, None)


def convolution(length: int, channels: int, taps: int, segmented: bool = False) -> Pass:
    owner, documents = owner_of(length, segmented)
    shapes = [(2, taps - 1 + length, channels), (channels, taps)]
    return Pass(lambda x, w: conv_silu(x, w, documents), lambda x, w: reference_conv(x, w, length, owner), shapes)


def normed_heads(count: int, size: int) -> NormedHeads:
    return NormedHeads(count, size, 1 / size, size**-0.5, 1e-3)


def convolved_heads(count, size, values, taps, length, stateful, segmented) -> Pass:
    of_heads, (owner, documents) = normed_heads(count, size), owner_of(length, segmented)
    channels = 2 * count * size + values
    return Pass(
        lambda x, w, state=None: conv_heads(x, w, of_heads, state, documents),
        lambda x, w, state=None: reference_heads(x, w, of_heads, state, owner),
        [(2, length, channels), (channels, taps), *[(2, taps - 1, channels)] * stateful],
        TWO_SUMS,
    )


def turned(width, rotary_dims, count, length, gated) -> Pass:
    options = EPS, rotary_dims, BASE, gated
    return Pass(
        lambda x, w: turned_heads(x, w, *options),
        lambda x, w: reference_turned_heads(x, w, *options),
        [(2, length, count, width * (1 + gated)), (width,)],
        TWO_SUMS,
    )


def exact_norm(x: mx.array, weight: mx.array) -> mx.array:
    return x * inverse_rms(x, EPS) * weight


def rows(width: int) -> list[tuple[int, ...]]:
    return [(5, 27, width)] * 2


WEIGHTED = {
    "alone": (lambda x, w: [weighted_norm(x, w, EPS)], lambda x, w: [exact_norm(x, w)], 1),
    "branch": (lambda x, w: branch_norm(x, w, EPS), lambda x, w: [x, exact_norm(x, w)], 1),
    "sum": (lambda x, o, w: sum_norm(x, o, w, EPS), lambda x, o, w: [x + o, exact_norm(x + o, w)], 2),
}


def weighted(kind: str, width: int) -> Pass:
    function, definition, count = WEIGHTED[kind]
    return Pass(function, definition, [*[(3, 3, width)] * count, (width,)], OF_NORMS)


PASSES = {
    "swiglu": Pass(swiglu, lambda g, x: g * mx.sigmoid(g) * x, rows(40)),
    "gates": Pass(gates, reference_gates, [(2, 75, 3), (2, 75, 3), (3,), (3,)]),
    "gates with beta up to 2": Pass(
        partial(gates, largest_beta=2.0), partial(reference_gates, largest_beta=2.0), [(4, 16)] * 2 + [(16,)] * 2
    ),
    "conv": convolution(19, 24, 4),
    "conv of one token": convolution(1, 8, 4),
    "conv of two taps": convolution(8, 16, 2),
    "conv of documents": convolution(29, 16, 4, segmented=True),
    # Heads, their size, the values' channels, taps, tokens, whether there is a state, and whether there are documents.
    "one head of 64": convolved_heads(1, 64, 24, 4, ROWS + 3, False, False),
    "heads of 128, state, documents": convolved_heads(2, 128, 264, 4, 2 * ROWS + 5, True, True),
    "heads of 96": convolved_heads(3, 96, 8, 4, ROWS, True, False),
    "heads of 96, documents": convolved_heads(1, 96, 40, 3, ROWS + 1, False, True),
    "heads of 256": convolved_heads(1, 256, 16, 2, 7, False, False),
    "five heads of 24, state": convolved_heads(5, 24, 8, 3, 2 * ROWS, True, True),
    "one token of heads": convolved_heads(2, 8, 16, 4, 1, False, False),
    "two tokens, state": convolved_heads(2, 16, 16, 4, 2, True, True),
    # The width of a head, its rotary dimensions, heads, tokens, and whether there are gates.
    "eight turned heads of 32, gates": turned(32, 16, 8, 5, True),
    "one turned head of 32": turned(32, 32, 1, 7, False),
    "six turned heads of 64, gates": turned(64, 64, 6, 5, True),
    "one token of two turned heads": turned(16, 16, 2, 1, True),
    "three turned heads of 128": turned(128, 32, 3, 3, False),
    "four turned heads of 256, gates": turned(256, 64, 4, 3, True),
    "two turned heads of 256": turned(256, 256, 2, 15, False),
}
for width in (8, 16, 64, 128, 256):
    PASSES[f"gated norm of {width}"] = Pass(
        lambda x, g, w: gated_norm(x, w, g, 1e-6),
        lambda x, g, w: x * inverse_rms(x, 1e-6) * w * g * mx.sigmoid(g),
        [*rows(width), (width,)],
    )
for width in (8, 40):
    PASSES[f"times gate of {width}"] = Pass(
        times_gate, lambda y, gate: y.swapaxes(1, 2) * gate, [(2, 3, 7, width), (2, 7, 3, width)], TWO_SUMS
    )
# A piece for some lanes of a group; a group to a row; several pieces a lane; and four groups to a row with a rest.
for at, width in enumerate((8, 64, 256, 320, 512, 520, 1024, 2560)):
    kind = list(WEIGHTED)[at % 3]
    PASSES[f"{kind} of {width}"] = weighted(kind, width)
PASSES |= {f"{kind} of {width}": weighted(kind, width) for kind, width in (("sum", 1024), ("alone", 520))}


@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(PASSES))
def test_values_and_gradients_against_float64(name, dtype, execute):
    function, definition, shapes, bound = PASSES[name]
    for spread in (1.0, 20.0):
        # Parameters have one axis.
        arrays = [array * (spread if array.ndim > 1 else 1.0) for array in drawn(*shapes, dtype=dtype)]
        found = errors(function, definition, arrays)
        assert max(found) < bound[dtype], (spread, found)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_weighted_norms_of_other_shapes_and_dtypes_of_the_weight(kind, execute):
    function, definition, count = WEIGHTED[kind]
    for shape in ((1, 1024), (4, 64), (2, 1, 3, 64)):
        arrays = [30.0 * array for array in drawn(*[shape] * count)] + drawn(shape[-1:])
        assert max(errors(function, definition, arrays)) < OF_NORMS[mx.float32]
    arrays = drawn(*[(2, 5, 256)] * count, dtype=mx.bfloat16) + drawn((256,))
    assert max(errors(function, definition, arrays)) < OF_NORMS[mx.bfloat16]


def odd_offset(x: mx.array) -> mx.array:
    return mx.concatenate([mx.zeros((1,), x.dtype), x.reshape(-1)])[1:].reshape(x.shape)


def swapped(x: mx.array) -> mx.array:
    return mx.contiguous(x.swapaxes(0, 1)).swapaxes(0, 1) if x.ndim > 1 else x


OF_EACH_KERNEL = ["swiglu", "gated norm of 128", "gates", "conv of documents"]
OF_EACH_KERNEL += ["heads of 96", "eight turned heads of 32, gates", "times gate of 40", "sum of 1024"]


@pytest.mark.parametrize("name", OF_EACH_KERNEL)
def test_other_strides_and_orders_of_the_lanes_change_no_bit(name, execute):
    function, _, shapes, _ = PASSES[name]
    arrays = drawn(*shapes, dtype=mx.bfloat16)
    cotangents = [drawn(y.shape, dtype=y.dtype, seed=i)[0] for i, y in enumerate(listed(function(*arrays)))]
    wanted = with_gradients(function, arrays, cotangents)
    runs = [execute] if execute is Launch.run else [execute, partial(execute, seed=2), partial(execute, seed=3)]
    for run in runs:
        for laid_out in (odd_offset, swapped):
            with on(run):
                found = with_gradients(function, list(map(laid_out, arrays)), list(map(laid_out, cotangents)))
            assert all(mx.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


# The launches of a value and its gradients, and their outputs.
LAUNCHES = {
    "heads of 96": [
        ("conv_silu_forward", ("q", "k", "v")),
        ("conv_silu_backward", ("dx", "dstate")),
        ("conv_silu_taps", ("dweight",)),
    ],
    "eight turned heads of 32, gates": [("turned_heads_forward", ("y", "gate")), ("turned_heads_backward", ("dx",))],
    "times gate of 40": [("times_gate_forward", ("out",)), ("times_gate_backward", ("dy", "dgate"))],
    "sum of 1024": [("weighted_norm_forward", ("total", "y")), ("weighted_norm_backward", ("dx",))],
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_one_launch_forward_and_one_backward(name, execute):
    """A kernel of its own sums the gradient of a convolution's weight."""
    launches = []

    def counted(launch):
        launches.append((launch.name, tuple(launch.outputs)))
        return execute(launch)

    arrays = drawn(*PASSES[name].shapes)
    with on(counted):
        mx.eval(mx.grad(lambda x: sum(y.sum() for y in listed(PASSES[name].function(x, *arrays[1:]))))(arrays[0]))
    # A GPU runs the launches that something uses, which a frozen weight's gradient is not.
    assert launches in (LAUNCHES[name], LAUNCHES[name][:2])


def test_a_gate_close_to_zero_is_accurate(execute):
    a, b, A_log, dt_bias = drawn((4, 8), (4, 8), (8,), (8,))
    log_g, _ = gates(a - 14, b, A_log, dt_bias)
    exact = -np.exp(np.array(A_log, np.float64)) * np.log1p(np.exp(np.array(a, np.float64) - 14 + np.array(dt_bias)))
    assert np.abs(np.array(log_g) / exact - 1).max() < 1e-5


def test_rows_of_zeros_have_finite_gradients(execute):
    """Masked tokens are rows of zeros, with a norm from eps alone."""
    function, _, shapes, _ = PASSES["heads of 128, state, documents"]
    arrays = drawn(*shapes)
    arrays[0][:, 3:12] = 0
    found = with_gradients(function, arrays, [mx.ones_like(y) for y in function(*arrays)])
    assert all(mx.isfinite(array).all() for array in found)


def test_a_row_in_pieces_is_the_whole_row(execute):
    """The last rows of a piece are the state of the next: values are equal, and so are the sums of gradients."""
    arrays, of_heads = drawn(*PASSES["heads of 128, state, documents"].shapes), normed_heads(2, 128)

    def whole(x, weight, state):
        return conv_heads(x, weight, of_heads, state)

    def in_pieces(x, weight, state):
        pieces = [conv_heads(x[:, :20], weight, of_heads, state), conv_heads(x[:, 20:], weight, of_heads, x[:, 17:20])]
        return [mx.concatenate(list(pair), axis=1) for pair in zip(*pieces, strict=True)]

    cotangents = [drawn(y.shape, seed=3)[0] for y in whole(*arrays)]
    wanted, found = (with_gradients(function, arrays, cotangents) for function in (whole, in_pieces))
    assert all(mx.array_equal(one, other) for one, other in zip(found[:3], wanted[:3], strict=True))
    # A row's gradient is a sum of at most four terms, here in another order.
    assert all(relative_error(one, other) < 1e-6 for one, other in zip(found[3:], wanted[3:], strict=True))


def test_without_heads_it_is_the_convolution_alone(execute):
    """The values equal those of a convolution with its state in its input's first rows."""
    x, weight, state = arrays = drawn(*PASSES["heads of 96"].shapes)
    *_, values = PASSES["heads of 96"].function(*arrays)
    y = conv_silu(mx.concatenate([state, x], axis=1), weight)
    assert mx.array_equal(values, y[..., -values.shape[2] :])


def test_a_sum_and_its_norm_equal_mlxs_sum_and_the_norm_alone(execute):
    x, other, weight = drawn((5, 520), (5, 520), (520,), dtype=mx.bfloat16)
    total, y = sum_norm(x, other, weight, EPS)
    assert mx.array_equal(total, x + other)
    assert mx.array_equal(y, weighted_norm(x + other, weight, EPS))
    kept, y = branch_norm(x, weight, EPS)
    assert mx.array_equal(kept, x)
    assert mx.array_equal(y, weighted_norm(x, weight, EPS))


def test_compiled_and_checkpointed(execute):
    x, g, w = drawn(*rows(64), (64,))

    def loss(x, g, w):
        return swiglu(gated_norm(x, w, g, 1e-6), x).square().sum()

    expected = mx.grad(loss, argnums=(0, 1, 2))(x, g, w)
    if backend.device() == "cuda":
        found = mx.compile(mx.grad(loss, argnums=(0, 1, 2)))(x, g, w)
        assert all(mx.array_equal(one, other) for one, other in zip(expected, found, strict=True))
    (again,) = mx.vjp(mx.checkpoint(loss), [x, g, w], [mx.ones(())])[1][:1]
    assert mx.array_equal(again, expected[0])


def test_gradients_of_parameters_close_over_no_array(execute, monkeypatch):
    """mx.vjp walks through all that a closed-over array was computed from: the whole step, for each piece of a row."""
    function, _, shapes, _ = PASSES["gates"]
    arrays, differentiate, closed = drawn(*shapes), mx.vjp, []

    def watched(inner, primals, cotangents):
        closed.append([cell.cell_contents for cell in inner.__closure__ or ()])
        return differentiate(inner, primals, cotangents)

    monkeypatch.setattr(mx, "vjp", watched)
    differentiate(lambda *arrays: list(function(*arrays)), arrays, [mx.ones_like(y) for y in function(*arrays)])
    assert closed
    assert not [item for cells in closed for item in cells if isinstance(item, (mx.array, list, tuple))]


@pytest.mark.parametrize("function", [lambda x: swiglu(x, x), lambda x: weighted_norm(x, mx.ones(64), EPS)])
def test_no_second_derivative(function, execute):
    with pytest.raises(NotImplementedError, match="no second derivative"):
        mx.grad(lambda x: mx.grad(lambda x: function(x).sum())(x).sum())(mx.ones((2, 64)))


W = mx.zeros((64,))
ROW, TAPS, ONE_HEAD = mx.zeros((2, 19, 152)), mx.zeros((152, 4)), normed_heads(1, 64)
HEADS, OF_HEADS = mx.zeros((2, 5, 8, 64)), mx.zeros((32,))
Y, GATE = mx.zeros((2, 3, 5, 16)), mx.zeros((2, 5, 3, 16))
# The function that decides, the calls of different kernels that it serves, and others that it does not.
X9, TAPS9, STATE = mx.zeros((1, 9, 64)), mx.zeros((64, 4)), mx.zeros((2, 3, 152))
DOCUMENTS = mx.zeros((2, 19), mx.int32)
SERVES = {
    "swiglu": (silu.serves, [(X9, X9)], [(X9, X9[:, :1]), (X9, X9.astype(mx.bfloat16))]),
    "gated norm": (
        norms.gated_norm_serves,
        [(X9, W, X9, 1e-6)],
        [(X9, W[:32], X9, 1e-6), (X9[..., :12], W[:12], X9[..., :12], 1e-6)],
    ),
    "gates": (gating.serves, [(X9, X9, W, W), (X9, X9, W, W, 2.0)], [(X9, X9, W[:3], W), (X9, X9, W[:32], W[:32])]),
    "conv": (
        conv.serves,
        [(X9, TAPS9), (X9, TAPS9, mx.zeros((1, 6), mx.int32))],
        [(X9, W[:, None]), (X9[:, :3], TAPS9)],
    ),
    "conv and heads": (
        conv.serves_heads,
        [(ROW, TAPS, ONE_HEAD, state, owner) for state in (None, STATE) for owner in (None, DOCUMENTS)],
        [
            (ROW, TAPS[:, :1], ONE_HEAD),
            (ROW, TAPS[:8], ONE_HEAD),
            (ROW[..., :128], TAPS[:128], ONE_HEAD),
            (ROW, TAPS, normed_heads(1, 60)),
            (ROW, TAPS, normed_heads(1, 264)),
            (ROW, TAPS, ONE_HEAD, STATE[:, :2]),
            (ROW, TAPS, ONE_HEAD, STATE.astype(mx.bfloat16)),
        ],
    ),
    "turned heads": (
        heads.serves,
        [(HEADS, OF_HEADS, EPS, 16, BASE, True), (HEADS[..., :32], OF_HEADS, EPS, 16, BASE, False)],
        [
            (HEADS[0], OF_HEADS, EPS, 16, BASE, True),
            (HEADS, OF_HEADS, EPS, 16, BASE, False),
            *((HEADS, OF_HEADS, EPS, turning, BASE, True) for turning in (64, 24, 8)),
            (mx.zeros((2, 5, 8, 96)), mx.zeros((96,)), EPS, 16, BASE, False),
            (HEADS[:, :0], OF_HEADS, EPS, 16, BASE, True),
            (HEADS.astype(mx.int32), OF_HEADS, EPS, 16, BASE, True),
        ],
    ),
    "times gate": (
        heads.serves_gate,
        [(Y, GATE)],
        [(Y, gate) for gate in (Y, GATE.astype(mx.bfloat16), GATE[..., :12])],
    ),
}
PASSES_TRIAL = Passes.passes_trial


@pytest.mark.parametrize("name", SERVES)
def test_kernels_are_tried_before_their_first_use(name, execute, monkeypatch):
    """Each call's kernels have a trial of their own, which a thousandth more in the results of any kernel fails."""
    serves, calls, others = SERVES[name]
    # Few elements are not worth building kernels.
    monkeypatch.setattr(Passes, "passes_trial", lambda *_, **__: pytest.fail("built"))
    assert not any(serves(*call) for call in calls)
    for module in (recomputation, gating, conv):
        monkeypatch.setattr(module, "LEAST", 0)
    names = []

    def with_factor(wrong, launch):
        names.append(launch.name)
        return [array * (1.001 if launch.name == wrong else 1) for array in execute(launch)]

    def served(wrong=None):
        monkeypatch.setattr(Passes, "passes_trial", partialmethod(PASSES_TRIAL, device=partial(with_factor, wrong)))
        monkeypatch.setattr(kernel_operator, "_right", {})
        return [serves(*call) for call in calls]

    assert all(served())
    assert len(kernel_operator._right) == len(calls)
    assert not any(serves(*call) for call in others)
    for wrong in set(names):
        assert not any(served(wrong)), wrong
