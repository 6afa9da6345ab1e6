"""Patched models of mlx-vlm call deltatune and agree with upstream; inference stays as it is."""

import importlib
import importlib.util
import re
import sys
import tomllib
import warnings
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from deltatune import patches
from deltatune.machine import backend
from deltatune.models.vision.split import _example, vision_spec
from deltatune.patches import PatchWarning, patched, recurrence, served, serving, whole_rows
from deltatune.patches.patch_record import TRIED
from deltatune.patches.tables import mlx_lm, mlx_vlm

pytest.importorskip("mlx_vlm")
import vision
from model_gradients import gradients, losses, relative_errors, tokens, without_gradient

DELTA_FAMILIES = ("qwen3_5", "qwen3_5_moe")


def fresh(model: nn.Module) -> nn.Module:
    """The model without the positions that upstream keeps from the last call."""
    model.language_model._position_ids = model.language_model._rope_deltas = None
    return model


@pytest.mark.parametrize("training", [True, False], ids=["train", "forgotten train()"])
@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_values_and_gradients_are_upstreams(tiny_vision_model, monkeypatch, family, training):
    monkeypatch.setenv("DELTATUNE_GATED_DELTA", "naive")
    monkeypatch.setattr(backend, "device", lambda: "metal")
    # test_experts.py covers experts.
    monkeypatch.setattr(patches, "PATCHES", mlx_lm.PATCHES + mlx_vlm.PATCHES)
    model = tiny_vision_model(family)
    model.train(training)
    rows = tokens(2, 21)
    with monkeypatch.context() as upstream:
        # The loop over tokens takes the place of the scan, whose differences of cumulative logs cost 6e-5.
        own = sys.modules.get("mlx_vlm.models.qwen3_5.gated_delta")
        upstream.setattr(own, "gated_delta_chunked", own.gated_delta_ops)
        # Older versions let gradients reach the indices of the chosen experts, which newer MLX refuses.
        upstream.setattr(mx, "argpartition", without_gradient(mx.argpartition))
        expected_loss, expected = gradients(fresh(model).language_model, losses, rows)
    expected_logits = fresh(model)(rows).logits
    with patched(model) as report:
        assert report.complete, str(report)
        assert all(serving(model).delta.values())
        whole_rows.reset()
        loss, actual = gradients(fresh(model).language_model, losses, rows)
        logits = fresh(model)(rows).logits
    assert set(served()) == {recurrence.OURS if training else recurrence.BACKWARD}
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    # After a forgotten train(), the forward pass is upstream's scan.
    assert relative_errors(expected, actual)[0] < (5e-6 if training else 2e-4)
    if not training:
        assert mx.array_equal(logits, expected_logits)


def inferred(model: nn.Module) -> list[mx.array]:
    """The logits of a prompt that is read and decoded from, of one with images, and of a draft that is verified."""
    has_tower = "vision_tower" in model
    row, cache = tokens(1, 13), getattr(model.language_model if has_tower else model, "make_cache", lambda: None)()
    calls: list = [(row[:, :9], {"cache": cache}), *((row[:, at : at + 1], {"cache": cache}) for at in range(9, 13))]
    if has_tower:
        row, pictures = _example(vision_spec(model))
        pixels = mx.array(np.concatenate([picture.patches for picture in pictures]))
        calls.append(
            (mx.array(row[None]), {"pixel_values": pixels, "image_grid_thw": mx.array([p.grid for p in pictures])})
        )
    outputs = [(fresh(model) if has_tower else model)(given, **more) for given, more in calls]
    if has_tower and cache is not None:
        outputs.append(fresh(model).language_model(tokens(1, 4, seed=1), cache=cache, speculative_verify=True))
    logits = [getattr(output, "logits", output) for output in outputs]
    mx.eval(logits)
    return logits


DAILY = [("text", "qwen3_5"), ("images", "qwen3_5_moe"), ("images", "qwen3_vl_moe")]
INFERRING = [("text", family) for family in DELTA_FAMILIES]
INFERRING += [("images", family) for family in (*DELTA_FAMILIES, "qwen3_vl", "qwen3_vl_moe")]


@pytest.mark.parametrize(
    ("kind", "family"), [pytest.param(*case, marks=[pytest.mark.weekly] * (case not in DAILY)) for case in INFERRING]
)
def test_inference_is_upstreams_bit_for_bit(tiny_model, tiny_vision_model, monkeypatch, kind, family):
    """Prompts are left to upstream here, as on Metal: elsewhere deltatune computes long ones, with other bits."""
    monkeypatch.setattr(recurrence, "PROMPT_TOKENS", 1000)
    model = (tiny_model if kind == "text" else tiny_vision_model)(family)
    model.eval()
    expected = inferred(model)
    with patched(model):
        whole_rows.reset()
        actual = inferred(model)
        assert not served()[recurrence.OURS]
        assert bool(served()[recurrence.UPSTREAM]) == (family in DELTA_FAMILIES)
    if family == "qwen3_vl_moe":
        # The one record that changes inference, on purpose: the GELUs of this tower (docs/guides/vision.md).
        assert 1e-6 < mx.abs(expected.pop() - actual.pop()).max().item() < 1e-2
    assert all(map(mx.array_equal, expected, actual))


@pytest.mark.parametrize("steps", [None, 3])
def test_a_call_with_state_steps_stays_upstreams(steps):
    gated_delta = importlib.import_module("mlx_vlm.models.qwen3_5.gated_delta")
    arrays = [mx.random.normal((1, 5, 1, 4)) for _ in range(2)] + [mx.random.normal((1, 5, 2, 3))]
    arrays += [mx.random.normal((1, 5, 2)) for _ in range(2)] + [mx.zeros(2), mx.ones(2)]
    expected = gated_delta.gated_delta_update(*arrays, state_steps=steps)
    with patched():
        whole_rows.reset()
        actual = gated_delta.gated_delta_update(*arrays, state_steps=steps)
        assert set(served()) == {recurrence.UPSTREAM if steps else recurrence.BACKWARD}
    assert len(actual) == len(expected) == (3 if steps else 2)
    assert all(mx.array_equal(e, a) for e, a in zip(expected, actual, strict=True))


def test_two_functions_of_one_name_are_both_replaced_without_a_warning(tiny_vision_model):
    tiny_vision_model("qwen3_5")
    names = ("gated_delta", "qwen3_5.gated_delta", "kimi_linear.language", "qwen3_5.language")
    shared, own, *holders = (importlib.import_module(f"mlx_vlm.models.{name}") for name in names)
    upstreams = shared.gated_delta_update, own.gated_delta_update
    with warnings.catch_warnings():
        warnings.simplefilter("error", PatchWarning)
        with patched() as report:
            assert report.complete
            assert holders[0].gated_delta_update is shared.gated_delta_update
            assert holders[1].gated_delta_update is own.gated_delta_update
            assert shared.gated_delta_update is not own.gated_delta_update
            assert shared.gated_delta_update is not upstreams[0]
    assert upstreams == (shared.gated_delta_update, own.gated_delta_update)


def test_the_lowest_versions_are_the_same_everywhere():
    """In pyproject.toml, in the records, and in the trials of `make floors`."""
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["vision"]]
    floors = {Requirement(line).name: Requirement(line).specifier for line in asked}
    tried = dict(re.findall(r"(mlx[a-z-]*)==([\d.]+)", (root / "scripts" / "with_upstream").read_text()))
    for package, versions in TRIED.items():
        lowest = min(Version(specifier.version) for specifier in SpecifierSet(versions))
        (floor,) = floors[package.replace("_", "-")]
        assert Version(floor.version) == Version(tried[package.replace("_", "-")]) == lowest


def test_the_vision_tower_of_qwen3_vl_moe_gets_the_other_gelus(tiny_vision_model):
    """With the patches, it agrees with the tower of qwen3_vl with the same weights."""
    right, wrong = tiny_vision_model("qwen3_vl").vision_tower, tiny_vision_model("qwen3_vl_moe").vision_tower
    wrong.update(right.parameters())
    pixels, grid = mx.random.normal((24, 3 * 2 * vision.PATCH**2)), mx.array([[1, 4, 6]])
    expected, deep = right(pixels, grid)
    before = wrong(pixels, grid)[0]
    with patched():
        actual, other = wrong(pixels, grid)
    assert mx.abs(before - expected).max().item() > 1e-5
    assert mx.array_equal(actual, expected)
    assert all(mx.array_equal(a, b) for a, b in zip(deep, other, strict=True))
