"""Gradients of patched models equal those of the recurrence, token by token: upstream's own, unpatched."""

import sys

import pytest
from cases import ROUTERS, TEXT, VISION, bound, error, gradients, images, tokens

from deltatune import patches
from deltatune.patches import patched
from deltatune.patches.tables import mlx_vlm

pytestmark = pytest.mark.compat


@pytest.fixture
def loop(monkeypatch):
    """Upstream's recurrence token by token: mlx-vlm trains through a scan, which rounds otherwise."""
    own = sys.modules.get("mlx_vlm.models.qwen3_5.gated_delta")
    if own is not None:
        monkeypatch.setattr(own, "gated_delta_chunked", own.gated_delta_ops)


def check(model, request, rows, more, tower=()) -> None:
    """Compare gradients with upstream's, which has the patches in `tower` as well."""
    model.train()
    with patched(model) as report:
        assert not report.unreached
        loss, actual = gradients(model, rows, **more)
    request.getfixturevalue("loop")
    request.getfixturevalue("monkeypatch").setattr(patches, "_records", lambda: (*ROUTERS, *tower))
    with patched():
        expected_loss, expected = gradients(model, rows, **more)
        allowed = bound(model, expected, rows, **more)
    found = error(expected, actual)
    request.getfixturevalue("record_property")("error", found)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found < allowed


@pytest.mark.parametrize("family", TEXT)
def test_text(tiny_model, request, family):
    check(tiny_model(family), request, tokens(70), {})


@pytest.mark.parametrize("family", VISION)
def test_images(tiny_vision_model, request, family):
    model = tiny_vision_model(family)
    # This tower's GELUs are exchanged for good reason (docs/guides/vision.md): the same tower on both sides.
    check(model, request, *images(model), tower=mlx_vlm.VISION if family == "qwen3_vl_moe" else ())
