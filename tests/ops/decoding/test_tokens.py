"""The kernels of one token of each row: against their definitions and float64, and their refusals."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from host_machine import HostError

from deltatune.machine import backend
from deltatune.ops.decoding import attention_token, delta_token, gated_attention_token, linear_token
from deltatune.ops.decoding.delta_token import DeltaToken, TokenArrays
from deltatune.ops.decoding.gated_attention_token import GatedAttention, RowArrays
from deltatune.ops.decoding.linear_token import LinearToken, LowRank, RowNorm, TokenBlock
from deltatune.ops.gated_delta import float64
from deltatune.ops.kernels.launch import Launch, on
from deltatune.ops.operator.case import judged
from deltatune.ops.pointwise.conv import NormedHeads
from two_dtypes import in_two_dtypes


def delta_layer(key_heads: int, value_heads: int, key_size: int, value_size: int) -> DeltaToken:
    heads = NormedHeads(key_heads, key_size, 1 / key_size, key_size**-0.5, 1e-6 / key_size)
    return DeltaToken(heads, value_heads, value_size, 1e-6)


def gated_layer(heads: int, key_heads: int, size: int, rotary_dims: int) -> GatedAttention:
    return GatedAttention(heads, key_heads, size, 1e-6, 1e-5, rotary_dims, 1e4, size**-0.5)


def delta_kinds(dtype: mx.Dtype, others: mx.Dtype) -> tuple[tuple[str, mx.Dtype], ...]:
    return ("before", dtype), ("taps", dtype), ("dt_bias", others), ("weight", others)


# Heads, key heads and sizes: heads in blocks of one, two, three of four, and four.
ATTENTION = [(4, 4, 32), (4, 2, 64), (6, 1, 128), (8, 2, 256)]
# Value heads to a key head, sizes of heads, taps, and whether the projections are one array.
DELTA = [
    (delta_layer(1, 1, 128, 128), True, 4),
    (delta_layer(2, 4, 32, 24), False, 4),
    (delta_layer(1, 3, 64, 40), True, 3),
    (delta_layer(2, 2, 16, 8), False, 2),
    (delta_layer(1, 2, 256, 16), False, 3),
]
# Layers, and whether the projections are one array.
GATED = [
    (gated_layer(2, 2, 32, 16), False),
    (gated_layer(6, 2, 64, 64), True),
    (gated_layer(8, 2, 128, 32), False),
    (gated_layer(8, 1, 256, 64), True),
]


def cases() -> Iterator[Any]:
    """Yield each kernel with the arguments of a case: weights in fp32 in every second one."""
    of_layers = {
        attention_token: (ATTENTION, lambda dtype, others: (dtype,)),
        delta_token: (DELTA, lambda dtype, others: (delta_kinds(dtype, others),)),
        gated_attention_token: (GATED, lambda dtype, others: ((dtype, dtype, others),)),
    }
    for module, (layers, kinds) in of_layers.items():
        for param in in_two_dtypes(range(len(layers))):
            number, dtype = param.values
            case = (*layers[number], *kinds(dtype, mx.float32 if number % 2 else dtype))
            yield pytest.param(module, case, marks=param.marks)
    # With and without a norm, a second weight, adapters and a residual: any three of them in both types. The daily run
    # has any two of them, either, and neither.
    for parts in itertools.product([False, True], repeat=4):
        case = (parts, list(linear_token.BOUNDS)[sum(parts) % 2], TokenBlock(2, 2, 8))
        yield pytest.param(linear_token, case, marks=[pytest.mark.weekly] * (sum(parts) in (2, 3)))


def named(value: Any) -> str:
    # The text of a function holds its address, by which two processes would collect different tests.
    return value.__name__.rpartition(".")[2] if hasattr(value, "__name__") else str(value)


@pytest.mark.parametrize(("module", "case"), list(cases()), ids=named)
def test_a_token_is_that_of_the_definition(module, case, running):
    """Behind a row's last key lies NaN."""
    verdict = judged(module.trial_case(*case), running(module.KERNEL), "kernel")
    assert verdict.passed, (verdict.errors, verdict.problem)


WRONG = [
    (attention_token, (*ATTENTION[0], mx.float32), "y", 1.001),
    (delta_token, (*DELTA[1], delta_kinds(mx.float32, mx.float32)), "state", 1.001),
    (gated_attention_token, (*GATED[0], (mx.float32,) * 3), "y", 1.001),
    (linear_token, ((True,) * 4, mx.bfloat16, TokenBlock(2, 1, 8)), "y", 1.1),
]


@pytest.mark.parametrize(("module", "case", "result", "factor"), WRONG, ids=named)
def test_a_wrong_kernel_is_refused(module, case, result, factor, running):
    def wrong(launch: Launch) -> list[mx.array]:
        *others, last = running(module.KERNEL)(launch)
        return [*others, last * factor]

    verdict = judged(module.trial_case(*case), wrong, "kernel")
    assert not verdict.passed
    assert verdict.worst == result


def drawn(*shapes: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(5), len(shapes))
    return [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)]


def delta_arrays(layer: DeltaToken, rows: int = 2, taps: int = 4) -> TokenArrays:
    heads, channels = layer.value_heads, layer.channels
    others = [(rows, taps - 1, channels), (rows, heads, layer.value_size, layer.heads.size)]
    others += [(channels, taps), (heads,), (heads,), (layer.value_size,)]
    arrays = drawn(*((rows, width) for width in layer.widths), *others)
    return TokenArrays(tuple(arrays[:4]), *arrays[4:])


def row_arrays(layer: GatedAttention, rows: int = 2, capacity: int = 9) -> RowArrays:
    others = [(layer.size,)] * 2 + [(rows, layer.key_heads, capacity, layer.size)] * 2
    arrays = drawn(*((rows, 1, width) for width in layer.widths), *others)
    return RowArrays(tuple(arrays[:3]), *arrays[3:], mx.array([0, 3][:rows], mx.int32))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_large_scores_are_those_of_float64(scale, running):
    q, keys, values = drawn((2, 4, 1, 32), (2, 2, 90, 32), (2, 2, 90, 32))
    lengths = [90, 33]
    with on(running(attention_token.KERNEL)):
        y = attention_token.attention_token(q, keys, values, mx.array(lengths, mx.int32), scale)
    for row, length in enumerate(lengths):
        wide = [np.array(x[row], np.float64) for x in (q, keys, values)]
        k, v = (np.repeat(x[:, :length], 2, axis=0) for x in wide[1:])
        scores = scale * (wide[0] @ k.swapaxes(1, 2))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        expected = weights / weights.sum(axis=-1, keepdims=True) @ v
        # A score of up to s is off by s 2^-24 for each of 32 products, and its exponential by as much of itself.
        bound = 32 * 2.0**-24 * max(1.0, np.abs(scores).max())
        assert np.abs(np.array(y[row], np.float64) - expected).max() < bound * np.abs(v).max()


def test_the_recurrence_steps_as_in_float64(running):
    """Operations around the recurrence are taken out: taps that pass x on, factors of 1 and no gates of the output."""
    layer = delta_layer(1, 2, 32, 16)
    given = delta_arrays(layer, rows=1, taps=2)
    x, _, b, a = given.projected
    given = replace(given, taps=mx.broadcast_to(mx.array([0.0, 1.0]), (layer.channels, 2)), weight=mx.ones(16))
    with on(running(delta_token.KERNEL)):
        y, _, state = delta_token.delta_token(layer, given)
    wide = {name: np.array(array, np.float64) for name, array in (("x", x), ("b", b), ("a", a))}
    silu = wide["x"] / (1 + np.exp(-wide["x"]))
    q, k, v = silu[:, :32], silu[:, 32:64], silu[:, 64:].reshape(1, 1, 2, 16)
    q, k = (part / np.sqrt((part**2).sum() + 1e-6) for part in (q, k))
    rate = np.log1p(np.exp(wide["a"] + np.array(given.dt_bias, np.float64)))
    inputs = {
        "q": (q * 32**-0.5).reshape(1, 1, 1, 32),
        "k": k.reshape(1, 1, 1, 32),
        "v": v,
        "log_g": (-np.exp(np.array(given.A_log, np.float64)) * rate)[:, None],
        "beta": (1 / (1 + np.exp(-wide["b"])))[:, None],
        "initial_state": np.array(given.state, np.float64),
        "mask": None,
        "segments": None,
    }
    truth = float64.recurrence(inputs, np.zeros((1, 1, 2, 16)), np.zeros_like(inputs["initial_state"]))
    # 32 products are summed in fp32, twice.
    assert np.abs(np.array(state) - truth["state"]).max() < 2**-18 * np.abs(truth["state"]).max()
    out = truth["y"][:, 0] / np.sqrt((truth["y"][:, 0] ** 2).mean(axis=-1, keepdims=True) + 1e-6)
    z = np.array(given.projected[1], np.float64).reshape(1, 2, 16)
    expected = (out * z / (1 + np.exp(-z))).reshape(1, 32)
    assert np.abs(np.array(y) - expected).max() < 2**-17 * np.abs(expected).max()


def test_keys_behind_a_row_do_not_matter(running):
    """Behind a row's last key lies NaN, and only the token's own place is written."""
    layer = gated_layer(4, 2, 32, 32)
    given = row_arrays(layer)
    behind = mx.arange(9)[None, None, :, None] >= given.offsets[:, None, None, None]
    keys, values = (mx.where(behind, mx.nan, array) for array in (given.keys, given.values))
    mx.eval(keys, values, given.keys, given.values)
    call = partial(gated_attention_token.gated_attention_token, layer)
    with on(running(gated_attention_token.KERNEL)):
        y, expected = (call(arrays) for arrays in (replace(given, keys=keys, values=values), given))
    assert mx.array_equal(y, expected)
    for array in (keys, values):
        assert (mx.isnan(array).any(axis=(1, 3)) == (mx.arange(9) > given.offsets[:, None])).all()


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_row_of_any_start_is_read(rows, running):
    """One row may start in the middle of another array's, at no multiple of 16 bytes."""
    wide, weight = drawn((rows, 107), (20, 104), dtype=mx.bfloat16)
    call = LinearToken(wide[:, None, 3:], weight)
    with on(running(linear_token.KERNEL)):
        y = linear_token.linear_token(call)
    exact = linear_token.linear_token_naive(LinearToken(call.x.astype(mx.float32), weight.astype(mx.float32)))
    assert mx.abs(y - exact).max().item() <= linear_token.BOUNDS[mx.bfloat16] * mx.abs(exact).max().item()


def test_blocks_wait_for_the_narrow_product_and_leave_their_counters_at_zero(running):
    launches = []

    def noted(launch: Launch) -> list[mx.array]:
        launches.append(launch)
        return running(linear_token.KERNEL)(launch)

    case = linear_token.trial_case((True,) * 4, mx.bfloat16, TokenBlock(2, 1, 8))
    mx.eval(case.computed(noted))
    (launch,) = launches
    assert launch.blocks[0] > 1
    assert not launch.inputs["counters"].any()
    if backend.device() == "cpu":
        launch.kernel = replace(launch.kernel, in_order=False)
        with pytest.raises(HostError, match="a block waits for one that has not run"):
            running(linear_token.KERNEL)(launch)


def attention_calls() -> Iterator[tuple]:
    """Yield the arguments of a right call, and then those of others that the kernel cannot compute."""
    q, keys, narrow, thirds = drawn((2, 4, 1, 32), (2, 2, 9, 32), (2, 2, 9, 24), (2, 3, 9, 32))
    lengths = mx.array([1, 9], mx.int32)
    yield q, keys, keys, lengths
    yield mx.concatenate([q, q], axis=2), keys, keys, lengths
    yield q, thirds, thirds, lengths
    yield q, keys, keys[:, :, :8], lengths
    yield q, keys, keys.astype(mx.float16), lengths
    yield q, keys, keys, lengths[:1]
    yield q[..., :24], narrow, narrow, lengths


def delta_calls() -> Iterator[tuple]:
    layer = delta_layer(2, 4, 32, 24)
    given = delta_arrays(layer)
    yield layer, given
    yield layer, replace(given, state=given.state[:, :1])
    yield layer, replace(given, taps=given.taps[:, :1])
    yield layer, replace(given, before=given.before.astype(mx.bfloat16))
    yield layer, replace(given, A_log=given.A_log.astype(mx.bfloat16))
    yield layer, replace(given, projected=given.projected[::-1])
    yield delta_layer(2, 4, 24, 24), delta_arrays(delta_layer(2, 4, 24, 24))


def gated_calls() -> Iterator[tuple]:
    layer = gated_layer(4, 2, 32, 32)
    given = row_arrays(layer)
    yield layer, given
    yield layer, replace(given, keys=given.keys[:, :1])
    yield layer, replace(given, values=given.values[:, :, :4])
    yield layer, replace(given, offsets=given.offsets.astype(mx.uint32))
    yield layer, replace(given, q_weight=given.q_weight[:16])
    yield layer, replace(given, projected=given.projected[::-1])
    yield layer, replace(given, keys=given.keys.astype(mx.bfloat16))
    yield replace(layer, rotary_dims=24), given


def linear_calls() -> Iterator[tuple]:
    shapes = [(3, 16), (8, 16), (8, 16), (16,), (3, 8), (8, 16), (8, 8), (8, 8)]
    x, weight, second, norm, residual, a, b, second_b = drawn(*shapes, dtype=mx.bfloat16)
    call = LinearToken(x, weight, RowNorm(norm, 1e-6), second, LowRank(a, b, second_b), residual)
    yield (call,)
    yield (replace(call, x=x[:, :12], weight=weight[:, :12], norm=None, second=None, low_rank=None),)
    yield (replace(call, weight=weight.astype(mx.float32)),)
    yield (replace(call, second=second[:4]),)
    yield (replace(call, norm=RowNorm(norm[:8], 1e-6)),)
    yield (replace(call, residual=residual[:1]),)
    yield (replace(call, low_rank=LowRank(a, b[:1], second_b)),)
    yield (replace(call, low_rank=LowRank(a, b)),)
    yield (replace(call, low_rank=LowRank(a[:5], b[:, :5], second_b[:, :5])),)
    yield (LinearToken(x.astype(mx.float32), weight.astype(mx.float32)),)
    yield (LinearToken(x[0], weight),)


CALLS = [
    (attention_token, attention_calls),
    (delta_token, delta_calls),
    (gated_attention_token, gated_calls),
    (linear_token, linear_calls),
]


@pytest.mark.parametrize(("module", "calls"), CALLS, ids=named)
def test_other_calls_and_a_cpu_keep_mlx_operations(module, calls, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    right, *refused = calls()
    assert module.covers(*right)
    assert not module.serves(*right)
    assert not any(module.covers(*call) for call in refused)
