"""Gradients of patched models equal those of the recurrence, token by token: upstream's own, unpatched."""

from __future__ import annotations

import sys

import pytest
from cases import MOE, TEXT, VISION, bound, error, gradients, images, tokens

from deltatune import patches
from deltatune.patches import patched
from deltatune.patches.tables import mlx_vlm

pytestmark = pytest.mark.compat


@pytest.fixture
def loop(monkeypatch, experts_cut_off):
    """Upstream's recurrence token by token: mlx-vlm trains through a scan, which rounds otherwise."""
    experts_cut_off()
    own = sys.modules.get("mlx_vlm.models.qwen3_5.gated_delta")
    if own is not None:
        monkeypatch.setattr(own, "gated_delta_chunked", own.gated_delta_ops)


@pytest.mark.parametrize("family", TEXT)
def test_text(tiny_model, record_property, request, monkeypatch, family):
    model = tiny_model(family)
    model.train()
    rows = tokens(70)
    with patched(model) as report:
        assert not report.unreached
        loss, actual = gradients(model, rows)
    request.getfixturevalue("loop")
    expected_loss, expected = gradients(model, rows)
    allowed = bound(model, expected, rows)
    found = error(expected, actual)
    record_property("error", found)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found < allowed


@pytest.mark.parametrize("family", VISION)
def test_images(tiny_vision_model, record_property, request, monkeypatch, family):
    model = tiny_vision_model(family)
    model.train()
    rows, more = images(model)
    with patched(model) as report:
        assert not report.unreached
        loss, actual = gradients(model, rows, **more)
    request.getfixturevalue("loop")
    if family == "qwen3_vl_moe":
        # Its tower's GELUs are exchanged for good reason (docs/guides/vision.md): the same tower on both sides.
        monkeypatch.setattr(patches, "PATCHES", mlx_vlm.VISION)
        with patched():
            expected_loss, expected = gradients(model, rows, **more)
            allowed = bound(model, expected, rows, **more)
    else:
        expected_loss, expected = gradients(model, rows, **more)
        allowed = bound(model, expected, rows, **more)
    found = error(expected, actual)
    record_property("error", found)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found < allowed


@pytest.mark.parametrize("family", MOE)
def test_the_naive_operator_agrees(tiny_vision_model, monkeypatch, family):
    model = tiny_vision_model(family)
    model.train()
    rows, more = images(model)
    with patched():
        _, actual = gradients(model, rows, **more)
        monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
        _, expected = gradients(model, rows, **more)
        allowed = bound(model, expected, rows, **more)
    assert error(expected, actual) < allowed
