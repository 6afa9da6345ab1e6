"""Refuses a model before its weights are read if its results depend on a function with upstream's code."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import upstream
from ..errors import UserError
from ..ops.random_state import drawing_from
from ..patches import left_alone_for, refuse
from .load import plain_config
from .transformers_configs import BUILD_ERRORS, completed, with_known_type
from .vision import load as vision_load


def refuse_unserved(
    path: Path, uses: Collection[str], *, image: str | None = None, trust_remote_code: bool = False
) -> None:
    """Refuse a checkpoint, by its config.json, as patched(model, uses=uses) would refuse the loaded model.

    A config from which no model can be built is left to the loader, which says why.

    Args:
        path: The checkpoint folder.
        uses: The uses of the model: TRAINING, PACKING, INFERENCE.
        image: Where the first image of the data is, as for load(); None for text.
        trust_remote_code: Whether code in the checkpoint may run.

    Raises:
        UserError: Results of this model depend on a function that stays as it is; the message names it.
    """
    config = plain_config(path, trust_remote_code)
    if config.get("model_file"):
        return
    try:
        if image is not None:
            parts: Any = vision_load.architecture(config)
        else:
            parts = upstream.model_classes(with_known_type(config))
    except (UserError, ValueError, AttributeError):
        return
    report = left_alone_for(uses)
    if not report.left_alone:
        return
    model = _unloaded(parts, config)
    if model is not None:
        refuse(report, model, uses)


def _unloaded(parts: Any, config: dict[str, Any]) -> nn.Module | None:
    """The model of a config, with weights that nothing computes; None where it cannot be built."""
    try:
        with drawing_from(mx.random.key(0)):
            if not isinstance(parts, tuple):
                return vision_load.build(parts, config)
            model_class, arguments_class = parts
            model: nn.Module = model_class(arguments_class.from_dict(copy.deepcopy(completed(config))))
            return model
    except BUILD_ERRORS:
        return None
