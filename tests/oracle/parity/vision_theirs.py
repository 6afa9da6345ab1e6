"""The run of transformers + PEFT on text, images and videos. Needs torch."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from deltatune.selftest.parity.cases import BETAS, EPS, STEPS, WEIGHT_DECAY, Adapters, ParityRun
from deltatune.selftest.parity.families import Config, Weights
from deltatune.selftest.parity.vision import IMAGE, VIDEO, VisionCase, VisionRows, batch

from . import theirs

_KIND = transformers.AutoModelForImageTextToText


def layout(case: VisionCase) -> tuple[Config, dict[str, tuple[int, ...]]]:
    """The files that transformers saves: its config.json, and the name and shape of every tensor."""
    return theirs.saved(case.model_type, case.options, _KIND)


def load(config: Config, weights: Weights) -> torch.nn.Module:
    """The model of a save with these weights, read by transformers itself; no tensor missing or left over."""
    return theirs.load(config, weights, _KIND)


def targets(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Every linear of both towers and the projector, but the head: its path, and (inputs, outputs)."""
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")
    }


def train(case: VisionCase, model: torch.nn.Module, parameters: theirs.Parameters) -> ParityRun:
    """The recipe; `parameters` are trained in place."""
    model.train()
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=case.learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    losses = []
    gradients: Adapters = {}
    for step in range(STEPS):
        loss = loss_of(model, batch(step, case.videos))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = theirs.copied({key: parameter.grad for key, parameter in parameters.items()})
        optimizer.step()
        losses.append(loss.item())
    return ParityRun(losses, gradients, theirs.copied(parameters))


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
