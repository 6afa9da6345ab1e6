"""The operator: the arguments that it accepts and refuses, the messages, and which implementation it uses."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta import gated_delta, gated_delta_chunk, gated_delta_naive

SHAPES = {"q": (2, 5, 2, 8), "k": (2, 5, 2, 8), "v": (2, 5, 4, 6), "log_g": (2, 5, 4), "beta": (2, 5, 4)}


def arguments(**changes) -> dict[str, mx.array]:
    arrays = {name: mx.random.normal(shape, key=mx.random.key(1)) for name, shape in SHAPES.items()}
    arrays["log_g"], arrays["beta"] = -mx.abs(arrays["log_g"]), mx.sigmoid(arrays["beta"])
    arrays["k"] = arrays["k"] / mx.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    return arrays | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": mx.zeros((2, 5, 8))}, r"q must have 4 dimensions \[B, T, H, D\], got shape \[2, 5, 8\]"),
        ({"q": mx.zeros((2, 5, 4, 8))}, r"q must have shape \[2, 5, 2, 8\], got \[2, 5, 4, 8\]"),
        ({"v": mx.zeros((2, 6, 4, 6))}, r"v must have shape \[2, 5, 4, 6\], got \[2, 6, 4, 6\]"),
        ({"v": mx.zeros((2, 5, 3, 6))}, "v must have a multiple of k's 2 heads, got 3"),
        ({"v": mx.zeros((2, 5, 0, 6))}, "empty arguments"),
        ({name: mx.zeros((2, 0, *SHAPES[name][2:])) for name in SHAPES}, r"T >= 1.*got T = 0"),
        ({"log_g": mx.zeros((2, 5, 2))}, r"log_g must have shape \[2, 5, 4\], got \[2, 5, 2\]"),
        ({"log_g": mx.zeros((2, 5, 4, 6))}, r"log_g must have shape \[2, 5, 4, 8\], got \[2, 5, 4, 6\]"),
        ({"log_g": mx.zeros((2, 5))}, r"log_g must have shape \[2, 5, 4\]"),
        ({"beta": mx.zeros((2, 5, 4, 1))}, r"beta must have shape \[2, 5, 4\]"),
        ({"beta": mx.zeros((2, 5, 4), mx.int32)}, "beta must be float32, float16 or bfloat16, got mlx.core.int32"),
        ({"initial_state": mx.zeros((2, 4, 8, 6))}, r"initial_state must have shape \[2, 4, 6, 8\]"),
        ({"mask": mx.ones((2, 5))}, "mask must be bool, got mlx.core.float32"),
        ({"mask": mx.ones((2, 5, 1), mx.bool_)}, r"mask must have shape \[2, 5\]"),
        ({"segments": mx.zeros((2, 5))}, "segments must be integers, got mlx.core.float32"),
        ({"segments": mx.zeros((1, 5), mx.int32)}, r"segments must have shape \[2, 5\], got \[1, 5\]"),
    ],
)
def test_refuses_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        gated_delta(**arguments(**changes))


@pytest.mark.parametrize("implementation", [gated_delta_naive, gated_delta_chunk])
def test_shapes_and_dtypes(implementation):
    half = {name: arguments()[name].astype(mx.bfloat16) for name in ("q", "k", "v", "beta")}
    y, state = implementation(**arguments(**half))
    assert (y.shape, y.dtype) == ((2, 5, 4, 6), mx.bfloat16)
    assert (state.shape, state.dtype) == ((2, 4, 6, 8), mx.float32)


@pytest.mark.parametrize("implementation", [gated_delta_naive, gated_delta_chunk])
def test_no_state_is_a_state_of_zeros(implementation):
    y, state = implementation(**arguments())
    zeros = implementation(**arguments(initial_state=mx.zeros((2, 4, 6, 8))))
    assert mx.array_equal(y, zeros[0])
    assert mx.array_equal(state, zeros[1])


@pytest.mark.parametrize("implementation", [gated_delta_naive, gated_delta_chunk])
def test_a_sequence_in_two_parts_is_the_sequence(implementation):
    arrays = arguments()
    whole = implementation(**arrays)
    first = implementation(**{name: x[:, :3] for name, x in arrays.items()})
    second = implementation(**{name: x[:, 3:] for name, x in arrays.items()}, initial_state=first[1])
    assert mx.allclose(whole[0], mx.concatenate([first[0], second[0]], axis=1), rtol=0, atol=1e-6)
    assert mx.allclose(whole[1], second[1], rtol=0, atol=1e-6)


def test_agrees_with_upstream(monkeypatch):
    """Compares with mlx-lm's own loop, which has another y at masked steps (no loss reads it)."""
    from mlx_lm.models.gated_delta import gated_delta_ops

    mask = mx.array(np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], bool))
    for extra in ({}, {"mask": mask}):
        arrays = arguments()
        y, state = gated_delta(**arrays, **extra)
        g = mx.exp(arrays["log_g"])
        theirs, their_state = gated_delta_ops(arrays["q"], arrays["k"], arrays["v"], g, arrays["beta"], None, **extra)
        seen = mask[..., None, None] if extra else mx.array(True)
        assert mx.allclose(mx.where(seen, y, 0), mx.where(seen, theirs, 0), rtol=0, atol=2e-6)
        assert mx.allclose(state, their_state, rtol=0, atol=2e-6)
        if extra:
            assert mx.all(mx.where(seen, 0, y) == 0)
