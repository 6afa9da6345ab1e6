"""Vision-language models of mlx-vlm, taken apart for training: images and tokens -> hidden states, and the head."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from packaging.version import Version

from ...errors import UserError
from ...patches import PatchWarning
from .inputs import Grid, Picture, VisionBatch, VisionSpec, single_frames, token_positions, vision_batch
from .tower import TowerInputs, run_tower

# Relative difference of our order of the tower's operations from upstream's.
_TOLERANCE = {mx.float32: 1e-4}
_HALF_TOLERANCE = 5e-2
# The first that was read to count them right; 0.5.0 does not.
_COUNTS_SEVERAL = Version("0.6.2")
_TRIED = ((1, 4, 6), (1, 6, 4), (2, 4, 4))


# VisionBatch's fields as MLX arrays: positions, feature, and where there are images "tower": TowerInputs' fields, or
# "features" and "deep" of a tower that was run before; "counted": the positions that the loss looks at, where it is not
# all of them. Dictionaries, since mx.compile hands named tuples on as plain ones.
VisionArrays = dict[str, Any]


def has_vision(model: nn.Module) -> bool:
    """Whether `model` is one of mlx-vlm's: a language model with a vision tower beside it."""
    return isinstance(model.get("vision_tower"), nn.Module) and isinstance(model.get("language_model"), nn.Module)


def vision_spec(model: Any) -> VisionSpec:
    """The numbers that images are cut and counted by. UserError for a tower that is not of the Qwen3-VL kind."""
    tower, config = model.get("vision_tower"), model.config
    parts = ("patch_embed", "pos_embed", "rotary_pos_emb", "blocks", "merger")
    missing = [name for name in parts if not hasattr(tower, name)]
    if missing:
        what = "it has none by that name" if tower is None else f"{type(tower).__module__} has no {', '.join(missing)}"
        raise UserError(
            f"{type(model).__module__}: this layer cannot be trained: the vision tower is of another kind than that of "
            f"Qwen3-VL and Qwen3.5, the only one that deltatune trains on images with ({what}). Leave images and "
            "videos out: text trains where mlx-lm knows the model (docs/guides/vision.md)."
        )
    about = config.vision_config
    return VisionSpec(
        patch=about.patch_size,
        temporal=about.temporal_patch_size,
        merge=about.spatial_merge_size,
        side=int(about.num_position_embeddings**0.5),
        values=about.in_channels * about.temporal_patch_size * about.patch_size**2,
        image_token=config.image_token_id,
        video_token=config.video_token_id,
        start_token=config.vision_start_token_id,
        end_token=config.vision_end_token_id,
    )


def vision_arrays(batch: VisionBatch, tower: Callable[[VisionBatch], VisionArrays] | None = None) -> VisionArrays:
    """`batch` for the model. tower: one that does not train (frozen_tower.FrozenTower), run here."""
    arrays: VisionArrays = {"positions": mx.array(batch.positions), "feature": mx.array(batch.feature)}
    if tower is not None:
        arrays |= tower(batch)
    elif len(batch.patches):
        arrays["tower"] = {name: mx.array(getattr(batch, name)) for name in TowerInputs._fields}
    return arrays


class VisionSplit(NamedTuple):
    """`head(backbone(tokens [B,T], images))` equals the logits of the model."""

    backbone: Callable[[mx.array, VisionArrays], mx.array]
    head: nn.Module | Callable[[mx.array], mx.array]


def split_vision(model: Any, *, compare: bool = True) -> VisionSplit:
    """Take `model` apart, with the patches in force, and compare the parts with upstream's own forward pass.

    UserError, with the difference, where they do not agree: this version then computes something else. `compare`:
    False computes nothing, and reads no weights.
    """
    language = model.language_model
    head = language.lm_head if "lm_head" in language else language.model.embed_tokens.as_linear

    def backbone(tokens: mx.array, images: VisionArrays) -> mx.array:
        hidden = language.model.embed_tokens(tokens)
        more: dict[str, Any] = {}
        if "tower" in images or "features" in images:
            if "tower" in images:
                features, deep = run_tower(model.vision_tower, TowerInputs(**images["tower"]))
            else:
                features, deep = images["features"], images["deep"]
            here, row = (images["feature"] >= 0)[..., None], mx.maximum(images["feature"], 0)
            hidden = mx.where(here, features[row].astype(hidden.dtype), hidden)
            if deep:
                more["visual_pos_masks"] = here[..., 0]
                more["deepstack_visual_embeds"] = [mx.where(here, each[row], 0) for each in deep]
        return language.model(tokens, inputs_embeds=hidden, position_ids=images["positions"], **more)

    split = VisionSplit(backbone, head)
    if compare:
        _compare_with_upstream(model, split)
    return split


def _compare_with_upstream(model: Any, split: VisionSplit) -> None:
    """A row of text and images of several shapes, through both; as upstream is called to generate.

    mlx-vlm before 0.6.2 counts the images of a row right where there is one (for several it reads a token behind the
    row's end): then one image by upstream's places, and several by ours, have to agree.
    """
    import mlx_vlm

    spec = vision_spec(model)
    limit = _TOLERANCE.get(model.vision_tower.patch_embed.proj.weight.dtype, _HALF_TOLERANCE)
    miscounts = Version(mlx_vlm.__version__) < _COUNTS_SEVERAL
    difference = _difference(model, split, _example(spec, _TRIED), own_positions=not miscounts)
    if miscounts:
        difference = max(difference, _difference(model, split, _example(spec, _TRIED[:1]), own_positions=True))
    if not difference <= limit:
        raise UserError(
            f"{type(model).__module__}: on a small image its logits differ by {difference:.1e} of their size from "
            f"those of deltatune's order of the same operations (at most {limit:.0e} is rounding), so it cannot be "
            "trained on images. Is this version of mlx-vlm one that deltatune knows (docs/guides/vision.md)?"
        )
    if miscounts:
        warnings.warn(
            f"mlx-vlm {mlx_vlm.__version__} miscounts several images in one row, and then places their tokens "
            "otherwise than Hugging Face does. Training places them right; generating from several images with this "
            f"version does not. mlx-vlm {_COUNTS_SEVERAL} does.",
            PatchWarning,
            stacklevel=3,
        )


def _difference(
    model: Any, split: VisionSplit, example: tuple[np.ndarray, list[Picture]], own_positions: bool
) -> float:
    """Of our logits from upstream's, which has its own positions or is given ours, over the largest logit."""
    spec, (tokens, pictures) = vision_spec(model), example
    grids = [picture.grid for picture in pictures]
    batch = vision_batch([(tokens, token_positions(tokens, grids, spec), pictures)], len(tokens), spec)
    language, modes = model.language_model, [(module, module.training) for module in model.modules()]
    saved = {name: getattr(language, name, None) for name in ("_position_ids", "_rope_deltas")}
    if not own_positions:
        # Not every version heeds positions that its call is given.
        language.get_rope_index = lambda *_, **__: (mx.array(batch.positions), mx.zeros((1, 1), mx.int32))
    try:
        # In training mode dropout would differ; adapters are zero or the same on both sides.
        model.eval()
        rows = mx.array(tokens[None])
        expected = model(
            rows,
            pixel_values=mx.array(np.concatenate([picture.patches for picture in pictures])),
            image_grid_thw=mx.array(grids),
        ).logits
        actual = split.head(split.backbone(rows, vision_arrays(batch)))
    finally:
        vars(language).pop("get_rope_index", None)
        for module, training in modes:
            module._set_training_mode(training)
        for name, value in saved.items():
            setattr(language, name, value)
    expected, actual = expected.astype(mx.float32), actual.astype(mx.float32)
    return float(mx.abs(actual - expected).max() / mx.abs(expected).max())


def _example(spec: VisionSpec, shapes: Sequence[Grid]) -> tuple[np.ndarray, list[Picture]]:
    """A row of tokens with an image for each frame of each shape, and the images."""
    random = np.random.default_rng(0)
    grids = single_frames([(f, r // 2 * spec.merge, c // 2 * spec.merge) for f, r, c in shapes])
    pictures = [Picture(random.standard_normal((int(np.prod(grid)), spec.values), np.float32), grid) for grid in grids]
    tokens = [1]
    for picture in pictures:
        tokens += [spec.start_token, *([spec.image_token] * spec.tokens(picture.grid)), 1, 2]
    return np.array(tokens, np.int32), pictures
