"""The error of quantising a merged matrix again, against float64."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import adapter_checks
from adapter_checks import float64
from deltatune.lora import LoRALinear
from deltatune.lora.rounding import Rounding
from deltatune.lora.weights import dense_weight


def adapted(bits: int, scale: float) -> LoRALinear:
    base = nn.QuantizedLinear.from_linear(nn.Linear(64, 96), 32, bits)
    return adapter_checks.adapted(LoRALinear, base, 4, scale)


def norm(array: np.ndarray) -> float:
    return float(np.sqrt(np.square(array).sum()))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_shares_against_float64(bits):
    mx.random.seed(0)
    rounding, errors, updates, sizes = Rounding(), [], [], []
    for name, scale in (("a", 0.1), ("b", 2.0)):
        adapter = adapted(bits, scale)
        fused = adapter.fuse()
        rounding.add(name, adapter, fused)
        base = float64(dense_weight(adapter.base))
        exact = base + scale * (float64(adapter.lora_a) @ float64(adapter.lora_b)).T
        errors.append(float64(dense_weight(fused)) - exact)
        updates.append(exact - base)
        sizes.append(exact)
        assert rounding.errors[name] == pytest.approx(norm(errors[-1]) / norm(exact), rel=1e-3)
    whole = norm(np.stack(sizes))
    assert rounding.error == pytest.approx(norm(np.stack(errors)) / whole, rel=1e-3)
    assert rounding.update == pytest.approx(norm(np.stack(updates)) / whole, rel=1e-3)
    worst = max(rounding.errors, key=lambda name: rounding.errors[name])
    assert f"at most by {rounding.errors[worst]:.2%} ({worst})" in str(rounding)


def test_a_matrix_of_zeros_has_no_error():
    adapter = adapted(4, 1.0)
    adapter.base.scales, adapter.base.biases = (mx.zeros_like(adapter.base[name]) for name in ("scales", "biases"))
    adapter.lora_b = mx.zeros_like(adapter.lora_b)
    rounding = Rounding()
    rounding.add("a", adapter, adapter.fuse())
    assert (rounding.error, rounding.update, rounding.errors) == (0.0, 0.0, {"a": 0.0})
