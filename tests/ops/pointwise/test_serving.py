"""Kernels are tried before their first use, and serve where they are faster: on NVIDIA GPUs, for many elements."""

from functools import partial

import mlx.core as mx
import pytest

from deltatune.machine import backend
from deltatune.ops.operator import kernel_operator
from deltatune.ops.pointwise import (
    adam,
    joining,
    rows,
    scored_swiglu,
    squares,
    stored_moments,
    unpacking,
    vocabulary_loss,
    weighted_norms,
)

FP32, BF16, FP16 = mx.float32, mx.bfloat16, mx.float16
# The case of each trial, and a factor of all results that it refuses.
TRIALS = {
    **{
        f"Adam, {dtype}, {gradient}": (partial(adam.trial_case, dtype, gradient), factor)
        for dtype, factor in ((FP32, 1.0001), (BF16, 1.01), (FP16, 1.002))
        for gradient in (FP32, BF16)
    },
    "Adam on 8 bits": (partial(stored_moments.trial_case, FP32, FP32), 1.02),
    "end to end": (partial(joining.trial_case, FP32), 1.001),
    "rows": (partial(rows.trial_case, BF16), 1.05),
    "scored SwiGLU": (partial(scored_swiglu.trial_case, FP32), 1.1),
    "squares": (partial(squares.trial_case, BF16), 1.001),
    **{f"{bits} bits": (partial(unpacking.trial_case, 64, bits, BF16, BF16), 1.05) for bits in unpacking.BITS},
    "the vocabulary's loss": (partial(vocabulary_loss.trial_case, FP32), 1 + 2e-5),
    "weighted norms": (partial(weighted_norms.trial_case, 1024, FP32, FP32, 1e-3), 1 + 2e-5),
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_kernel_that_is_wrong_or_fails_is_not_used(name, check_trial, monkeypatch):
    monkeypatch.setattr(squares, "_MOST", 512)
    case_of, factor = TRIALS[name]
    check_trial(case_of(), factor)


X, WEIGHT = mx.zeros((64, 1024), BF16), mx.zeros((1024,), BF16)
LARGE, SMALL, NARROW = (mx.zeros(shape) for shape in ((1024, 64), (8, 64), (10240, 12)))
PACKED = [mx.zeros((512, 32), mx.uint32), *[mx.zeros((512, 4), BF16)] * 2]
OTHER_PACKINGS = [(32, 4), (16, 4), (64, 8), (64, 7), (64, 4, "mxfp4"), ()]
# The function that decides, the calls that its kernels serve, and others that they leave to MLX.
SERVING = {
    "weighted norms": (
        weighted_norms.serves,
        [(X, WEIGHT, 1e-3), (X, WEIGHT, 1e-3, X)],
        [
            (X, WEIGHT, 1e-3, X.astype(FP32)),
            (X[:63], WEIGHT, 1e-3),
            (X.astype(mx.int32), WEIGHT, 1e-3),
            (X, WEIGHT[:512], 1e-3),
            (mx.zeros((64, 1020)), mx.zeros((1020,)), 1e-3),
            (mx.zeros((64, weighted_norms.WIDEST + 8)), mx.zeros((weighted_norms.WIDEST + 8,)), 1e-3),
        ],
    ),
    "the vocabulary's loss": (vocabulary_loss.serves, [(X,)], [(X[:63],), (X[None],), (X.astype(mx.int32),)]),
    "scored SwiGLU": (
        scored_swiglu.serves,
        [(LARGE,) * 3],
        [(SMALL,) * 3, (NARROW,) * 3, (LARGE, LARGE, LARGE.astype(BF16))],
    ),
    "rows": (rows.serves, [(LARGE, 1024)], [(SMALL, 1023), (NARROW, 10240)]),
    "unpacking": (
        unpacking.serves,
        [(*PACKED, BF16, 64, 4, "affine")],
        [
            *((*PACKED, BF16, *packing) for packing in OTHER_PACKINGS),
            (*(array[:128] for array in PACKED), BF16, 64, 4),
            (*PACKED, mx.float64, 64, 4),
            (*PACKED[:2], None, BF16, 64, 4),
        ],
    ),
}


@pytest.mark.parametrize("name", SERVING)
def test_which_calls_kernels_serve(name, monkeypatch):
    serves, right, others = SERVING[name]
    monkeypatch.setattr(kernel_operator, "is_right", lambda *_, **__: True)
    for device in ("cpu", "metal", "cuda"):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert {serves(*call) for call in right} == {device == "cuda"}
    assert not any(serves(*call) for call in others)
    monkeypatch.setattr(kernel_operator, "is_right", lambda *_, **__: False)
    assert not any(serves(*call) for call in right)
