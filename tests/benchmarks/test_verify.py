"""The parity check before every timing passes right implementations and names the errors of others."""

import mlx.core as mx
import numpy as np
import pytest

SMALL = {"batch": 4, "tokens": 70, "key_heads": 5, "value_heads": 10, "head_size": 16}


@pytest.fixture(params=["float32", "bfloat16"])
def size(request):
    import sizes

    return sizes.Size(**SMALL, dtype=request.param)


@pytest.fixture
def check(tmp_path):
    """check(function, size): the errors, from float64 results cached in a folder."""
    import verify
    from with_mlx import MLX

    return lambda function, size: verify.errors(MLX(function), size, tmp_path)


def test_right_implementation_agrees(size, check):
    from autodiff import gated_delta_autodiff
    from deltatune.ops.gated_delta import gated_delta_chunk

    for function in (lambda *a: gated_delta_chunk(*a)[0], gated_delta_autodiff):
        found = check(function, size)
        assert found.agrees, found


def test_gates_per_channel(check):
    import sizes
    from deltatune.ops.gated_delta import gated_delta_chunk

    found = check(lambda *a: gated_delta_chunk(*a)[0], sizes.Size(**SMALL, dtype="float32", per_channel=True))
    assert found.agrees, found


@pytest.mark.parametrize("name", ["y", "k", "beta"])
def test_wrong_implementation_is_named(name, size, check):
    """An implementation that is 3 % off in the last row and head only."""
    from deltatune.ops.gated_delta import gated_delta_chunk

    @mx.custom_function
    def bent(x):
        return mx.contiguous(x)

    def scale(x):
        x[-1:, :, -2:] = x[-1:, :, -2:] * (1.3 if size.dtype == "bfloat16" else 1.03)
        return x

    bent.vjp(lambda primal, cotangent, output: scale(mx.contiguous(cotangent)))

    def wrong(q, k, v, log_g, beta):
        given = {"q": q, "k": k, "v": v, "log_g": log_g, "beta": beta}
        if name in given:
            given[name] = bent(given[name])
        y, _ = gated_delta_chunk(*given.values())
        return y + mx.stop_gradient(scale(y + 0) - y) if name == "y" else y

    found = check(wrong, size)
    assert not found.agrees
    assert found.worst[0] == name


def test_not_a_number_is_the_worst(check, size):
    from deltatune.ops.gated_delta import gated_delta_chunk

    found = check(lambda *a: gated_delta_chunk(*a)[0] * mx.array(np.nan), size)
    assert not found.agrees


def test_long_arguments_repeat_what_was_drawn(monkeypatch):
    import sizes
    from with_mlx import MLX

    monkeypatch.setattr(sizes, "DRAWN_TOKENS", 35)
    monkeypatch.setattr(sizes, "DRAWN_ROWS", 1)
    implementation = MLX(lambda *a: a[2])
    implementation.load(sizes.inputs(sizes.Size(**SMALL, dtype="float32")))
    _, k, v, log_g, _ = implementation.arrays
    assert v.shape == implementation.dy.shape == (4, 70, 10, 16)
    assert log_g.shape == (4, 70, 10)
    assert mx.array_equal(k[:, :35], k[:, 35:])
    assert mx.array_equal(k[0], k[2])
    with pytest.raises(ValueError, match="a multiple of 1 rows and 35 tokens"):
        sizes.inputs(sizes.Size(1, 50, 2, 2))
