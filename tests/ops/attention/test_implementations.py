"""`naive` and `blocked` against float64 and under MLX's transforms, and the memory that `blocked` takes."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.attention import attention_blocked, attention_naive
from deltatune.ops.attention.trial_case import fp32_bound, half_norm

# A block has so few scores here that rows of these lengths have several blocks.
FEW = 32 * 70


def few(*arrays, **options):
    return attention_blocked(*arrays, scores=FEW, **options)


IMPLEMENTATIONS = {"naive": attention_naive, "blocked": attention_blocked, "blocked, small": few}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_fp32(name, case, differentiate, norms):
    results, truth = differentiate(IMPLEMENTATIONS[name], case)
    # Of rows that see nothing.
    assert not any(np.array(results[key])[truth[key] == 0].any() for key in ("y", "dq"))
    found = norms(results, truth)
    # The gradient of a sink sums terms of both signs over all rows, each with its rounding error.
    dsinks = found.pop("dsinks", 0.0)
    assert max(found.values()) <= fp32_bound(case.largest_score), found
    assert dsinks <= 1e-5


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["naive", "blocked, small"])
def test_half_precision(name, dtype, case, differentiate, norms):
    results, truth = differentiate(IMPLEMENTATIONS[name], case, dtype)
    assert {x.dtype for name, x in results.items() if name != "dsinks"} == {dtype}
    found = norms(results, truth)
    # The gradient of a sink sums terms of both signs, which are computed from the rounded y.
    dsinks = found.pop("dsinks", 0.0)
    bound = half_norm(str(dtype).rpartition(".")[2]) + fp32_bound(case.largest_score)
    assert max(found.values()) <= bound, found
    assert dsinks <= 10 * bound


def loss(function, **options):
    return lambda *arrays: (function(*arrays, scale=0.25, **options) ** 2).sum()


@pytest.fixture
def arrays():
    return [mx.random.normal((2, heads, 40, 16), key=mx.random.key(heads)) for heads in (4, 2, 2)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_inside_compile_and_checkpoint(name, arrays):
    plain = mx.value_and_grad(loss(IMPLEMENTATIONS[name]), argnums=(0, 1, 2))
    value, gradients = plain(*arrays)
    wrapped = mx.value_and_grad(mx.checkpoint(loss(IMPLEMENTATIONS[name])), argnums=(0, 1, 2))
    for other in (mx.compile(plain), wrapped, mx.compile(wrapped)):
        again, others = other(*arrays)
        assert mx.allclose(value, again, rtol=1e-6)
        assert all(mx.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(gradients, others, strict=True))


def test_two_runs_give_the_same_bits(arrays):
    runs = [mx.grad(loss(few), argnums=(0, 1, 2))(*arrays) for _ in range(2)]
    assert all(mx.array_equal(a, b) for a, b in zip(*runs, strict=True))


def test_naive_is_mapped_over_the_batch(arrays):
    stacked = [mx.stack([x, 2 * x]) for x in arrays]
    mapped = mx.vmap(lambda *each: attention_naive(*each, scale=0.25))(*stacked)
    for i in range(2):
        assert mx.allclose(mapped[i], attention_naive(*(x[i] for x in stacked), scale=0.25), atol=1e-6)


def test_blocked_refuses_vmap_and_second_derivatives_by_name(arrays):
    stacked = [mx.stack([x, x]) for x in arrays]
    with pytest.raises(ValueError, match=r"mx\.vmap cannot map this implementation.*DELTATUNE_ATTENTION=naive"):
        mx.vmap(lambda *each: attention_blocked(*each, scale=0.25))(*stacked)
    with pytest.raises(NotImplementedError, match=r"attention has no second derivative.*DELTATUNE_ATTENTION=naive"):
        mx.grad(lambda q: mx.grad(loss(attention_blocked))(q, *arrays[1:]).sum())(arrays[0])


def test_memory_does_not_grow_with_the_square_of_the_length(peak_bytes):
    def excess(length: int) -> int:
        arrays = [mx.random.normal((1, heads, length, 8), key=mx.random.key(heads)) for heads in (2, 1, 1)]
        mx.eval(arrays)
        return peak_bytes(lambda: mx.grad(loss(attention_blocked), argnums=(0, 1, 2))(*arrays))

    with mx.stream(mx.cpu):
        small, large = excess(1024), excess(4096)
    # Inputs, results and what is summed up in fp32 are four times as long; a matrix of scores would be 128 MB.
    assert large <= 4 * small
    assert large < 40e6
