"""The fused kernels on this machine's GPU, as gated_delta calls them.

They are skipped on a CPU, where tests/ops/kernels runs the kernels' Metal text instead.
"""

import warnings

import mlx.core as mx
import numpy as np
import pytest

from checkpointing import checkpoint
from deltatune.machine import backend
from deltatune.ops.gated_delta import choice, gated_delta, gated_delta_chunk, gated_delta_naive
from deltatune.ops.gated_delta.float64 import recurrence
from deltatune.ops.gated_delta.fused_op import gated_delta_fused
from deltatune.ops.gated_delta.tolerances import FUSED_NORM, OVERSHOOTING, REPEATED_KEY, fused_bf16_norm, fused_bound
from deltatune.ops.operator import candidates, verdicts

pytestmark = pytest.mark.skipif(backend.device() == "cpu", reason="needs a GPU")

# Two shapes, since each of them is compiled: the sizes of a model, and odd sizes.
MODEL = {"batch": 1, "length": 300, "key_heads": 2, "repeats": 1, "key_size": 128, "value_size": 128}
ODD = {"batch": 2, "length": 130, "repeats": 3, "key_size": 24, "value_size": 40, "mask": "middle", "segments": True}
CASES = {
    "model": MODEL,
    "open gates": MODEL | {"gates": "open"},
    "closed gates": MODEL | {"gates": "closed"},
    "mixed gates": MODEL | {"gates": "mixed"},
    "one key": MODEL | {"keys": "one", "gates": "open", "beta": 1.0, "bound": REPEATED_KEY},
    "near keys, beta 1.9": MODEL | {"keys": "near", "gates": "open", "beta": 1.9, "bound": OVERSHOOTING},
    "beta 2": MODEL | {"gates": "open", "beta": 2.0, "bound": OVERSHOOTING},
    "odd": ODD,
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.delenv("DELTATUNE_GATED_DELTA", raising=False)
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, dtype, per_channel, tolerances, run, errors, norms, cotangents):
    case = tolerances.Case(name, **CASES[name])
    inputs = case.inputs(per_channel, 0)
    dy, dstate = cotangents(inputs, 0)
    kind = getattr(mx, dtype)
    for key in ("q", "k", "v"):
        inputs[key] = np.array(mx.array(inputs[key]).astype(kind).astype(mx.float32))
    dy = np.array(mx.array(dy).astype(kind).astype(mx.float32))

    def rounded(implementation):
        def half(q, k, v, *rest, **options):
            return implementation(q.astype(kind), k.astype(kind), v.astype(kind), *rest, **options)

        return half

    exact = recurrence(inputs, dy, dstate)
    results = run(rounded(gated_delta_fused), inputs, dy, dstate)
    measured = errors(results, exact)
    assert max(measured.values()) <= fused_bound(case.bound, dtype), measured
    measured = norms(results, exact)
    with mx.stream(mx.cpu):
        reference = gated_delta_chunk if dtype == "float32" else gated_delta_naive
        errors_of_reference = norms(run(rounded(reference), inputs, dy, dstate), exact)
    if dtype == "float32":
        bounds = {key: max(FUSED_NORM, error) for key, error in errors_of_reference.items()}
    else:
        bounds = {key: fused_bf16_norm(error) for key, error in errors_of_reference.items()}
    assert not {key: (error, bounds[key]) for key, error in measured.items() if not error <= bounds[key]}


@pytest.fixture
def arrays(tolerances):
    inputs = tolerances.Case("model", **MODEL).inputs(False, 0)
    names = ("q", "k", "v", "log_g", "beta")
    return [mx.array(inputs[name]).astype(mx.bfloat16 if name in "qkv" else mx.float32) for name in names]


def loss(*arrays):
    y, state = gated_delta(*arrays)
    return (y.astype(mx.float32) ** 2).sum() + (state**2).sum()


EVERY_ARGUMENT = range(5)


def test_the_choice_is_fused_after_its_check(arrays, tmp_path):
    verdicts.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call = choice.Call(*arrays[:4], masked=False, segmented=False)
        assert candidates.choose(choice.OPERATOR, call)[0] == "fused"
    assert len(list(tmp_path.rglob("fused-*.json"))) == 1


def test_again_compiled_checkpointed_and_both(arrays):
    plain = mx.grad(loss, argnums=EVERY_ARGUMENT)(*arrays)
    ways = {
        "again": mx.grad(loss, argnums=EVERY_ARGUMENT),
        "compiled": mx.compile(mx.grad(loss, argnums=EVERY_ARGUMENT)),
        "checkpointed": mx.grad(checkpoint(loss), argnums=EVERY_ARGUMENT),
        "both": mx.compile(mx.grad(checkpoint(loss), argnums=EVERY_ARGUMENT)),
    }
    for name, way in ways.items():
        for one, other in zip(plain, way(*arrays), strict=True):
            assert mx.array_equal(one, other), name


def test_views(arrays):
    """Compares with chunk where inputs and cotangents are strided views."""
    both = mx.concatenate([arrays[0], arrays[1]], axis=-1)
    values = mx.swapaxes(mx.contiguous(mx.swapaxes(arrays[2], 1, 2)), 1, 2)[:, ::-1]

    def turned(implementation):
        def function(both, values):
            y, _ = implementation(both[..., :128], both[..., 128:], values, *arrays[3:])
            return (mx.swapaxes(y, 1, 2).astype(mx.float32) ** 2).sum()

        return mx.grad(function, argnums=(0, 1))(both, values)

    for one, other in zip(turned(gated_delta), turned(gated_delta_chunk), strict=True):
        one, other = one.astype(mx.float32), other.astype(mx.float32)
        assert (mx.abs(one - other).max() <= 0.02 * mx.abs(other).max()).item()
