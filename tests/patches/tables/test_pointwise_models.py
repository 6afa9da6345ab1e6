"""Whole models keep upstream's losses and gradients with the pointwise kernels, which the host machine runs."""

import mlx.core as mx
import numpy as np
import pytest

import model_gradients
from deltatune import patches
from deltatune.machine import backend
from deltatune.ops import recomputation
from deltatune.ops.operator import kernel_operator
from deltatune.ops.pointwise import conv, gating, weighted_norms
from deltatune.ops.segments import segments
from deltatune.patches import patched
from deltatune.patches.tables import mlx_lm
from last_place import parameters_one_unit_off
from model_gradients import losses

# Kernels run on the host machine, beside upstream's own functions: neither is a BLAS's.
pytestmark = pytest.mark.any_blas

CONVS = ("conv and silu of documents", "conv, silu and norms of documents", "conv and silu", "conv, silu and norms")
AROUND_ATTENTION = ("turned heads and gates", "turned heads", "times gate")
NAMES = ("gated norm", "norm and gate", "norm", *CONVS, "gates", "swiglu", *AROUND_ATTENTION)
# These families convolve queries, keys and values together, and norm them in the same pass.
TOGETHER = ("qwen3_5", "qwen3_next")
# The kernels that each family uses besides that of its convolution.
SERVED = {
    "qwen3_5": {*AROUND_ATTENTION, "gates", "gated norm", "swiglu"},
    # Too few of its elements turn.
    "qwen3_next": {"norm and gate", "times gate", "gates", "gated norm", "swiglu"},
    "olmo_hybrid": {"norm", "gates", "gated norm"},
    "kimi_linear": {"norm", "swiglu"},
}
# The weighted norms of every family: alone, of a layer's input, and of the sum behind its first half.
NORMS = {"alone", "branch", "sum"}


# Each family, and each of the two convolutions with and without documents.
DAILY = [("qwen3_5", True), ("qwen3_next", False), ("olmo_hybrid", True), ("kimi_linear", False)]
WEEKLY = [pytest.param(family, not packed, marks=pytest.mark.weekly) for family, packed in DAILY]


def as_on_cuda(monkeypatch, passes_on_host) -> tuple[list[str], set[str]]:
    """From here on the host machine runs every kernel on 8 elements or more: the passes and the norms that ran."""
    normed: set[str] = set()
    weighted = weighted_norms._function

    def function(kind, eps):
        normed.add(kind)
        return weighted(kind, eps)

    monkeypatch.setattr(weighted_norms, "_function", function)
    monkeypatch.setattr(kernel_operator, "is_right", lambda *_, **__: True)
    for module in (recomputation, conv, gating):
        monkeypatch.setattr(module, "LEAST", 8)
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    return passes_on_host(*weighted_norms.FILES), normed


def conditioned(model, rows, owner, expected: dict[str, mx.array]) -> tuple[float, dict[str, float]]:
    """How far all gradients together, and each one, move when parameters move by a unit: the largest of four draws."""
    held, draws = model.parameters(), []
    for seed in range(4):
        model.update(parameters_one_unit_off(model, seed))
        draws.append(distances(gradients(model, rows, owner)[1], expected))
    model.update(held)
    each = {name: max(draw[name] for draw in draws) for name in expected}
    return max(together(draw) for draw in draws), each


def distances(found: dict[str, mx.array], expected: dict[str, mx.array]) -> dict[str, float]:
    return {name: float(mx.linalg.norm(found[name] - expected[name])) for name in expected}


def together(norms: dict[str, float]) -> float:
    return float(np.hypot.reduce(list(norms.values())))


def gradients(model, rows, owner):
    def loss(model, rows):
        with segments(owner):
            return losses(model, rows)

    with patched():
        return model_gradients.gradients(model, loss, rows)


@pytest.mark.skipif(backend.device() != "cpu", reason="the host machine needs a CPU")
@pytest.mark.parametrize(("family", "packed"), [*DAILY, *WEEKLY])
def test_losses_and_gradients_stay_the_same(tiny_model, passes_on_host, monkeypatch, family, packed):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
    # Experts stay upstream's.
    monkeypatch.setattr(patches, "PATCHES", mlx_lm.PATCHES)
    model = tiny_model(family, **({} if family == "kimi_linear" else {"linear_value_head_dim": 16}))
    model.train()
    rows = mx.random.randint(0, 320, (2, 22), key=mx.random.key(1))
    owner = mx.array(np.tile(np.repeat([0, 1, 2], 7), (2, 1))) if packed else None
    wanted, expected = gradients(model, rows, owner)
    condition = conditioned(model, rows, owner, expected)
    passes, normed = as_on_cuda(monkeypatch, passes_on_host)
    found, actual = gradients(model, rows, owner)
    convolution = "conv, silu and norms" if family in TOGETHER else "conv and silu"
    wanted_passes = SERVED[family] | NORMS | {f"{convolution} of documents" if packed else convolution}
    served = {next(name for name in NAMES if each.startswith(name)) for each in passes}
    assert served | normed == wanted_passes
    assert found == pytest.approx(wanted, rel=1e-6)
    assert expected.keys() == actual.keys()
    # A kernel rounds a value in up to four places where upstream does not, by half a unit each: two units in all. Their
    # effect on the gradients depends on the model: in kimi_linear one unit moves them by about 1e-4.
    off, (all_allowed, allowed) = distances(actual, expected), condition
    assert together(off) < 2 * all_allowed
    # The error of one tensor varies more between draws than that of all together.
    assert all(off[name] <= 8 * allowed[name] for name in off), {name: (off[name], allowed[name]) for name in off}
