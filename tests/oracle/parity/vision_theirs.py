"""The runs of transformers + PEFT on images and videos. Needs torch."""

from collections.abc import Callable

import numpy as np
import torch
import transformers

from deltatune.selftest.parity import vision, vision_ours
from deltatune.selftest.parity.families import Config, Weights
from deltatune.selftest.parity.vision import IMAGE, VIDEO, VisionCase, VisionRows, batch

from . import theirs
from .record import PACKAGES, Comparison, Reference

_KIND = transformers.AutoModelForImageTextToText


class VisionComparison(Comparison):
    """Adapters on both towers and the projector, but not on the head."""

    folder, cases, packages, ours = "vision/", vision.CASES, (*PACKAGES, "mlx-vlm"), staticmethod(vision_ours.run)

    def family(self, case: VisionCase) -> VisionCase:
        return case

    def layout(self, case: VisionCase) -> tuple[Config, dict[str, tuple[int, ...]]]:
        return theirs.saved(case.model_type, case.options, _KIND)

    def load(self, config: Config, weights: Weights) -> torch.nn.Module:
        return theirs.load(config, weights, _KIND)

    def targets(self, case: VisionCase, model: torch.nn.Module) -> dict[str, tuple[int, int]]:
        return theirs.targets(model, ("lm_head",))

    def loss(self, case: VisionCase, model: torch.nn.Module, start: Reference) -> Callable[[int], torch.Tensor]:
        return lambda step: loss_of(model, batch(step, case.videos))

    def checksums(self, case: VisionCase, weights: Weights) -> dict[str, str]:
        return vision.checksums(weights, case.videos)


COMPARISON = VisionComparison()


def loss_of(model: torch.nn.Module, rows: VisionRows) -> torch.Tensor:
    """The loss of a batch."""
    tokens = torch.from_numpy(rows.tokens).long()
    labels = tokens.clone()
    labels[:, 1:][torch.from_numpy(rows.counts == 0)] = -100
    labels[:, 0] = -100
    present = torch.arange(tokens.shape[1])[None] < torch.tensor(rows.lengths)[:, None]
    return model(
        input_ids=tokens,
        attention_mask=present.long(),
        labels=labels,
        **_pictures(rows),
        mm_token_type_ids=(tokens == IMAGE).int() + 2 * (tokens == VIDEO).int(),
        use_cache=False,
    ).loss


def _pictures(rows: VisionRows) -> dict[str, torch.Tensor]:
    """The model's arguments for the images and videos of a batch, of each kind where there is one."""
    found: dict[str, torch.Tensor] = {}
    for patches, grids, wanted in (
        ("pixel_values", "image_grid_thw", lambda grid: grid[0] == 1),
        ("pixel_values_videos", "video_grid_thw", lambda grid: grid[0] > 1),
    ):
        kept = [
            (patch, grid)
            for row, of_row in zip(rows.patches, rows.grids, strict=True)
            for patch, grid in zip(row, of_row, strict=True)
            if wanted(grid)
        ]
        if kept:
            found[patches] = torch.from_numpy(np.concatenate([patch for patch, _ in kept]))
            found[grids] = torch.tensor([grid for _, grid in kept])
    return found
