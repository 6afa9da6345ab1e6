"""The chunkwise form: every hard case against float64, and its behaviour under MLX's transforms."""

import zlib
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from deltatune.machine import backend
from deltatune.ops.gated_delta import gated_delta_chunk
from deltatune.ops.gated_delta.float64 import recurrence

FLOATS = ("q", "k", "v", "log_g", "beta", "initial_state")


def test_every_gradient(case, per_channel, erases, naive, chunk, run, errors, cotangents):
    """Of the recurrence in fp32 as well, beside the same truth, which takes longer than either."""
    seed = zlib.crc32(f"{case.name} {per_channel}".encode())
    inputs = case.inputs(per_channel, seed, erases)
    dy, dstate = cotangents(inputs, seed)
    exact = recurrence(inputs, dy, dstate)
    for name, implementation in (("naive", naive), ("chunk", chunk)):
        measured = errors(run(implementation, inputs, dy, dstate), exact)
        assert max(measured.values()) <= case.bound, (name, measured)


@pytest.fixture
def example(case_named, erases):
    """A small case with shared heads, documents and a masked middle."""
    return case_named("documents, masked middle").inputs(False, 7, erases)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_loses_only_the_rounding_of_results(
    dtype, per_channel, erases, chunk, case_named, run, errors, tolerances
):
    inputs = case_named("documents").inputs(per_channel, 3, erases)
    names = ("q", "k", "v", *(["beta"] if erases else []))
    half = {name: mx.array(inputs[name]).astype(getattr(mx, dtype)) for name in names}
    exact = inputs | {name: np.array(array.astype(mx.float32)) for name, array in half.items()}
    generator = np.random.default_rng(5)
    dy = np.array(mx.array(generator.normal(size=inputs["v"].shape)).astype(getattr(mx, dtype)).astype(mx.float32))
    dstate = generator.normal(size=inputs["initial_state"].shape).astype(np.float32)
    results = run(chunk, inputs | half, dy, dstate)
    assert {name: results[name].dtype for name in half} == {name: array.dtype for name, array in half.items()}
    assert results["y"].dtype == getattr(mx, dtype)
    assert results["state"].dtype == results["log_g"].dtype == results["initial_state"].dtype == mx.float32
    measured = errors(results, recurrence(exact, dy, dstate))
    rounded = {name: measured.pop(name) for name in (*half, "y")}
    assert max(measured.values()) <= tolerances.EASY, measured
    assert max(rounded.values()) <= tolerances.ROUNDING[dtype] + tolerances.EASY, rounded


def test_same_bits_every_time(per_channel, erases, chunk, case_named, run, cotangents):
    inputs = case_named("500 tokens, chunks of 64").inputs(per_channel, 1, erases)
    dy, dstate = cotangents(inputs, 1)
    first = run(chunk, inputs, dy, dstate)
    for _ in range(2):
        again = run(chunk, inputs, dy, dstate)
        assert all(mx.array_equal(first[name], again[name]).item() for name in first)


def _loss_and_arguments(implementation, inputs: dict, transform=lambda f: f):
    """Return a loss with a function before every input and a non-linear one after the outputs, and its arguments."""
    constants = {name: mx.array(inputs[name]) for name in ("mask", "segments")}

    def loss(x: dict[str, mx.array]) -> mx.array:
        q, k = mx.tanh(x["q"]), x["k"] / mx.linalg.norm(x["k"], axis=-1, keepdims=True)
        rates = [mx.sigmoid(x["beta"])] if "beta" in x else []
        delta = transform(lambda *a: implementation(*a[:-1], initial_state=a[-1], **constants))
        y, state = delta(q, k, mx.sin(x["v"]), -nn.softplus(x["log_g"]), *rates, x["initial_state"] ** 2)
        return mx.tanh(y).square().sum() + (state**3).sum()

    return loss, {name: mx.array(inputs[name]) for name in FLOATS if name in inputs}


def _same(one: dict, other: dict) -> bool:
    return all(mx.array_equal(one[name], other[name]).item() for name in one)


def test_inside_checkpoint_and_any_nesting_the_same_bits(example, chunk):
    loss, x = _loss_and_arguments(chunk, example)
    plain = mx.grad(loss)(x)
    inside, _ = _loss_and_arguments(chunk, example, mx.checkpoint)
    assert _same(plain, mx.grad(inside)(x))
    assert _same(plain, mx.grad(mx.checkpoint(loss))(x))
    assert _same(plain, mx.grad(lambda x: mx.checkpoint(loss)(x))(x))


def test_inside_compile(example, chunk):
    loss, x = _loss_and_arguments(chunk, example)
    plain = mx.grad(loss)(x)
    for compiled in (mx.compile(mx.grad(loss)), mx.compile(mx.grad(mx.checkpoint(loss)))):
        result = compiled(x)
        again = compiled(x)
        assert _same(result, again)
        for name in plain:
            assert mx.abs(result[name] - plain[name]).max() <= 2e-6 * mx.abs(plain[name]).max(), name


def test_vmap_over_the_batch(per_channel, erases, chunk, case_named):
    inputs = case_named("64 tokens, batch 3").inputs(per_channel, 4, erases)
    names = [name for name in FLOATS if name in inputs]
    batch = [mx.array(inputs[name]) for name in names]

    def single(*a):
        y, state = chunk(*(x[None] for x in a[:-1]), initial_state=a[-1][None])
        return y[0], state[0]

    def loss_of(f):
        return lambda *a: sum(x.square().sum() for x in f(*a))

    def together(*a):
        return chunk(*a[:-1], initial_state=a[-1])

    for one, other in zip(together(*batch), mx.vmap(single)(*batch), strict=True):
        assert mx.allclose(one, other, rtol=0, atol=1e-6)
    everything = list(range(len(names)))
    expected = mx.grad(loss_of(together), argnums=everything)(*batch)
    of_vmap = mx.grad(loss_of(mx.vmap(single)), argnums=everything)(*batch)
    vmap_of = mx.vmap(mx.grad(loss_of(single), argnums=everything))(*batch)
    for name, truth, one, other in zip(names, expected, of_vmap, vmap_of, strict=True):
        for found in (one, other):
            assert mx.abs(truth - found).max() <= 2e-6 * mx.abs(truth).max(), name
    # An argument that is not mapped is shared; another axis than the first may be mapped.
    moved = [batch[0].moveaxis(0, 1), *batch[1:-1], batch[-1][0]]
    shared = mx.vmap(single, in_axes=(1, *[0] * (len(names) - 2), None))(*moved)
    repeated = together(*batch[:-1], mx.broadcast_to(batch[-1][:1], batch[-1].shape))
    assert all(mx.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(shared, repeated, strict=True))


@pytest.mark.parametrize("name", FLOATS)
def test_vmap_over_one_argument_alone(name, per_channel, erases, chunk, case_named):
    """The other arguments are shared. Compares outputs and gradients with one call after another."""
    inputs = case_named("65 tokens, odd sizes").inputs(per_channel, 8, erases)
    names = [each for each in FLOATS if each in inputs]
    if name not in names:
        pytest.skip("linear attention has no beta")
    mapped, arrays = names.index(name), [mx.array(inputs[name]) for name in names]
    several = mx.stack([arrays[mapped], arrays[mapped] * 0.9, arrays[mapped] * 0.5])

    def loss(*a):
        y, state = chunk(*a[:-1], initial_state=a[-1])
        return y.square().sum() + state.square().sum(), y

    def one(x):
        given = [*arrays[:mapped], x, *arrays[mapped + 1 :]]
        (_, y), gradients = mx.value_and_grad(loss, argnums=range(len(names)))(*given)
        return y, *gradients

    together = mx.vmap(one)(several)
    for row, x in enumerate(several):
        for found, expected in zip(together, one(x), strict=True):
            assert mx.abs(found[row] - expected).max() <= 2e-6 * mx.abs(expected).max()


def test_second_derivatives_are_refused(example, erases, chunk):
    loss, x = _loss_and_arguments(chunk, example)
    name = "gated_delta" if erases else "linear_attention"
    with pytest.raises(NotImplementedError, match=f"{name} has no second derivative.*DELTATUNE_{name.upper()}=naive"):
        mx.eval(mx.grad(lambda x: sum(g.square().sum() for g in mx.grad(loss)(x).values()))(x))


def test_arrays_that_are_not_contiguous(per_channel, erases, chunk, case_named):
    inputs = case_named("64 tokens, batch 3").inputs(per_channel, 4, erases)
    plain = [mx.array(inputs[name]) for name in FLOATS if name in inputs]
    mx.eval(plain)
    strided = [mx.stack([x, x * 0 - 7], axis=-1)[..., 0].swapaxes(0, 1).swapaxes(0, 1) for x in plain]
    every_second = [mx.repeat(x, 2, axis=0)[::2] for x in strided]
    expected = chunk(*plain[:-1], initial_state=plain[-1])
    for arrays in (strided, every_second):
        found = chunk(*arrays[:-1], initial_state=arrays[-1])
        for one, other in zip(expected, found, strict=True):  # a BLAS may sum a transposed operand in another order
            assert mx.abs(one - other).max() <= 1e-6 * mx.abs(one).max()


def test_batch_rows_do_not_influence_each_other(per_channel, erases, chunk, case_named, run, cotangents):
    """A batch row gives the same bits when the other rows hold large values."""
    inputs = case_named("64 tokens, batch 3").inputs(per_channel, 9, erases)
    dy, dstate = cotangents(inputs, 9)
    loud = {name: None if x is None else x.copy() for name, x in inputs.items()}
    for name in ("q", "v"):
        loud[name][1:] *= 1e6
    one, other = (run(chunk, given, dy, dstate) for given in (inputs, loud))
    assert all(mx.array_equal(one[name][0], other[name][0]) for name in one)


def _peak(length: int, per_channel: bool, erases: bool, peak_bytes, dtype: mx.Dtype = mx.float32) -> int:
    """Return the peak of bytes beyond the inputs while every gradient is computed by mx.compile, for 2 heads of 128."""
    shape = (1, length, 2, 128)
    q, k, v, dy = (mx.random.normal(shape, dtype, key=mx.random.key(n)) for n in range(4))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    log_g = mx.full(shape if per_channel else shape[:3], -0.1)
    arguments = [q, k, v, log_g, *([mx.full(shape[:3], 0.5)] if erases else [])]
    chunk = gated_delta_chunk if erases else partial(gated_delta_chunk, beta=None)
    mx.eval(arguments, dy)
    gradients = mx.compile(mx.grad(lambda a, dy: (chunk(*a)[0] * dy).sum()))
    return peak_bytes(lambda: gradients(arguments, dy))


@pytest.mark.any_blas
@pytest.mark.skipif(backend.device() != "cpu", reason="counts what a CPU holds")
@pytest.mark.parametrize(
    "dtype", [pytest.param(mx.float32, marks=pytest.mark.weekly), mx.bfloat16], ids=["fp32", "bf16"]
)
def test_memory_of_the_backward_pass(per_channel, erases, peak_bytes, dtype):
    """Saved states and returned gradients grow with the sequence; the working space of a group does not.

    Copies in fp32 of a group's 16-bit inputs are not kept from the forward to the backward pass.
    """
    short, long = (_peak(length, per_channel, erases, peak_bytes, dtype) for length in (1024, 3072))
    results = 2 * 4 * 128 * (4 + per_channel)  # bytes a token: gradients of q, k, v (and the gates), and of y
    states = 2 * 4 * 128 * 128 / 64
    per_head = 8 * 2 * 4  # gates, betas and their gradients
    late = 1e6  # what one operation has not given back yet when the next begins
    assert long - short <= (3072 - 1024) * (results + states + per_head) + late
    assert short <= (40e6 if per_channel else 30e6)


def test_nothing_of_an_earlier_document_remains(per_channel, erases, chunk, case_named, run, cotangents):
    """An enormous first document changes no bit of the second one or of its gradients."""
    inputs = case_named("few closed gates").inputs(per_channel, 6, erases)
    dy, dstate = cotangents(inputs, 6)
    second = slice(41, None)
    inputs["segments"] = np.broadcast_to(np.arange(130) >= second.start, inputs["v"].shape[:2]).astype(np.int32)
    loud = inputs | {"v": inputs["v"] * np.where(np.arange(130) < second.start, 1e18, 1.0)[:, None, None]}
    loud["v"] = loud["v"].astype(np.float32)
    one, other = (run(chunk, given, dy, dstate) for given in (inputs, loud))
    for name in ("y", "q", "k", "v", "log_g", *(["beta"] if erases else [])):
        assert mx.array_equal(one[name][:, second], other[name][:, second]), name
    assert mx.array_equal(one["state"], other["state"])
