"""Training on images and videos against recorded runs of transformers + PEFT: same checkpoint, batches; no torch."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from parity import faults
from parity.faults import falls, recorded

pytest.importorskip("mlx_vlm")
from deltatune.models.vision import split
from deltatune.selftest.parity import vision_ours
from deltatune.selftest.parity.cases import ParityRun
from deltatune.selftest.parity.vision import CASES


def replay(name: str, plant=lambda: None) -> ParityRun:
    return faults.replay(vision_ours, CASES[name], f"vision/{name}", plant)


# Of each family, images or a video are replayed at each commit; qwen3_vl_moe has experts and qwen3_5 the other tower.
# A video's frames come in another order and place, and from there on the products are those of images.
MARKS = {name: [pytest.mark.any_blas] * case.videos for name, case in CASES.items()}
for name in ("qwen3_5_moe", "qwen3_5_moe-video", "qwen3_vl-video", "qwen3_vl_moe-video"):
    MARKS[name].append(pytest.mark.weekly)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_every_loss_and_the_final_adapters_are_those_of_transformers(name):
    assert falls(recorded(f"vision/{name}").losses)
    found = recorded(f"vision/{name}").compare(replay(name))
    assert found.small, found


def wrong_gelus(monkeypatch):
    """qwen3_vl_moe's MLP with the exact GELU, as mlx-vlm 0.7.10 has it."""
    monkeypatch.setattr(nn, "gelu_approx", nn.gelu)


def no_gradient_through_the_tower(monkeypatch):
    run = split.run_tower

    def stopped(*arguments):
        features, deep = run(*arguments)
        return mx.stop_gradient(features), [mx.stop_gradient(each) for each in deep]

    monkeypatch.setattr(split, "run_tower", stopped)


def rows_and_columns_swapped(monkeypatch):
    angles = split._rotation
    monkeypatch.setattr(split, "_rotation", lambda tower, cells: angles(tower, cells[..., ::-1]))


def positions_of_text(monkeypatch):
    """Every token of a video in a place of its own, as if it were a word."""
    plain = lambda tokens, grids, spec: np.tile(np.arange(len(tokens), dtype=np.int32), (3, 1))  # noqa: E731
    monkeypatch.setattr(vision_ours, "token_positions", plain)


def frames_in_another_order(monkeypatch):
    grouped = vision_ours.vision_batch

    def turned(rows, width, spec):
        return grouped([(*row, [backwards(picture) for picture in pictures]) for *row, pictures in rows], width, spec)

    def backwards(picture):
        frames = picture.patches.reshape(picture.grid[0], -1, picture.patches.shape[1])
        return vision_ours.Picture(frames[::-1].reshape(picture.patches.shape), picture.grid)

    monkeypatch.setattr(vision_ours, "vision_batch", turned)


FAULTS = {
    "mlx-vlm's own GELUs": (wrong_gelus, "qwen3_vl_moe"),
    "no gradient through the tower": (no_gradient_through_the_tower, "qwen3_vl"),
    "rows and columns swapped": (rows_and_columns_swapped, "qwen3_vl"),
    "positions of text": (positions_of_text, "qwen3_vl-video"),
    "frames in another order": (frames_in_another_order, "qwen3_vl-video"),
}


@pytest.mark.any_blas
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault):
    plant, name = FAULTS[fault]

    def run(patch):
        if plant is wrong_gelus:
            # The patches take the GELU that they find when they are applied; other faults are planted after that.
            plant(patch)
        return replay(name, lambda: plant(patch))

    assert faults.shows(vision_ours, recorded(f"vision/{name}"), run)
