"""With Metal declared present (metal.py): kernels without a gradient stop training; patched, gradients are naive's."""

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cases import DELTA, TEXT, VISION, bound, error, experts_cut_off, gradients, images, logits, tokens
from metal import NO_GRADIENT

from deltatune import patches
from deltatune.patches import patched
from deltatune.patches.tables import mlx_vlm

pytestmark = pytest.mark.compat
# Experts of mlx-vlm before 0.7.5 refuse before the kernel is asked.
REFUSED = f"{re.escape(NO_GRADIENT)}|Cannot calculate VJP with respect to indices"


def check(model: nn.Module, stops: bool, rows: mx.array, more: dict[str, Any], record_property, monkeypatch) -> None:
    """The gradient of a call in the mode that `model` is in: `stops` says what upstream alone does."""
    record_property("unpatched", "refused" if stops else "accepted")
    with pytest.raises(ValueError, match=REFUSED) if stops else experts_cut_off():
        gradients(model, rows, **more)
    with patched(model):
        loss, actual = gradients(model, rows, **more)
        monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
        model.train()
        expected_loss, expected = gradients(model, rows, **more)
        allowed = bound(model, expected, rows, **more)
    distance = error(expected, actual)
    record_property("error", distance)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert distance < allowed


@pytest.mark.parametrize(
    ("family", "pictured"), [*((family, False) for family in TEXT), *((family, True) for family in DELTA)]
)
def test_a_forgotten_train(request, record_property, monkeypatch, family, pictured):
    # Heads of 32, as newer versions give others to the loop.
    sizes = {} if pictured else {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    model = request.getfixturevalue("tiny_vision_model" if pictured else "tiny_model")(family, **sizes)
    model.eval()
    rows, more = images(model) if pictured else (tokens(20), {})
    check(model, True, rows, more, record_property, monkeypatch)


@pytest.mark.parametrize("family", VISION)
def test_the_fused_rotation(tiny_vision_model, record_property, monkeypatch, family):
    """In training mode. Its kernel has a gradient of upstream's own."""
    model = tiny_vision_model(family)
    model.train()
    rows, more = images(model)
    check(model, False, rows, more, record_property, monkeypatch)


@pytest.mark.parametrize("family", VISION)
def test_inference_is_upstreams_bit_for_bit(tiny_vision_model, monkeypatch, family):
    model = tiny_vision_model(family)
    model.eval()
    rows, more = images(model)
    # The tower of qwen3_vl_moe is another one on purpose: the same on both sides (docs/guides/vision.md).
    everything = patches.PATCHES
    monkeypatch.setattr(patches, "PATCHES", mlx_vlm.VISION)
    with patched():
        expected = logits(model, rows, **more)
        mx.eval(expected)
    monkeypatch.setattr(patches, "PATCHES", everything)
    with patched(model):
        assert mx.array_equal(logits(model, rows, **more), expected)
