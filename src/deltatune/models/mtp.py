"""Loads the multi-token-prediction head of a checkpoint, which predicts the token after the next one.

mlx-lm drops the head's tensors when it loads a checkpoint, and mlx-vlm has its modules, for speculative decoding. The
head becomes a child of the model, so that adapters, saves, plans and digests treat it as any other module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError, reason
from ..lora.select import MTP
from ..machine import packages
from ..upstream import draft_forward
from .checkpoint_files import only_chosen, weight_headers
from .load import plain_config
from .transformers_configs import completed, text_part, with_known_type
from .vision.split import has_vision
from .vocabulary import token_tables

# The model types with heads that tests train.
_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h")
# The first mlx-vlm that loads a head beside its model.
_SINCE = "0.7.10"


def add_head(model: nn.Module, path: Path) -> None:
    """Add the head of a checkpoint to its model in place, as the child `mtp`, in inference mode.

    UserError: the model was loaded for images, no head in it can be trained, its tensors do not fit, or mlx-vlm lacks
    it.
    """
    if has_vision(model):
        raise UserError("mtp: the head of a model trains on text, and the data have images; leave those rows out.")
    splitter, config, _ = _stored(path)
    try:
        with only_chosen(path) as folder:
            head = splitter.load(folder, source_config=config)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"mtp: the tensors of the multi-token-prediction head of {path} do not fit its config.json: "
            f"{reason(error)}. Take the files of the original model."
        ) from error
    model[MTP] = head.eval()


def head_sanitizer(path: Path) -> Callable[[Mapping[str, mx.array]], dict[str, mx.array]]:
    """Return the function from all tensors of a checkpoint's files to the parameters of a model that are its head's."""
    splitter, config, of_mlx = _stored(path)
    text = splitter.read_text_config(config)

    def sanitize(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        of_head = {name: tensor for name, tensor in tensors.items() if splitter.select_keys(name, text)}
        return {f"{MTP}.{name}": tensor for name, tensor in splitter.transform(of_head, text, of_mlx).items()}

    return sanitize


def two_ahead(model: nn.Module) -> Callable[[mx.array, mx.array], mx.array]:
    """Return the head as a function of a row's hidden states and of the tokens that follow.

    The function takes the hidden states [B, T, D] of the model behind its last norm and the token behind each position
    [B, T]. It returns [B, T, D], of which the model's own output head makes the logits of the tokens after those.
    Documents of packed rows are kept apart as in the model.

    Source: https://arxiv.org/abs/2412.19437, section 2.2; mlx_vlm.speculative.drafters.
    """
    head: Any = model[MTP]
    embedding = next(iter(token_tables(model).values()))
    forward = draft_forward(head)

    return lambda hidden, following: forward(embedding(following), hidden, following)


def _stored(path: Path) -> tuple[Any, dict[str, Any], bool]:
    """mlx-vlm's reader of a head's tensors, the config.json for it, and whether the tensors are in MLX's form."""
    splitter, config = reader_of(path)
    text = text_part(config)
    headers = () if splitter is None else weight_headers(path).values()
    holding = [header for header in headers if any(splitter.select_keys(name, text) for name in header.tensors)]
    if not holding:
        raise UserError(
            f"mtp: model {path} ({config['model_type']}) has no multi-token-prediction head that can be trained: "
            "tensors mtp.* of a Qwen3.5, Qwen3-Next or Nemotron-H model were expected. Converted checkpoints often "
            "lack them: take the original model, or leave mtp out."
        )
    of_mlx = splitter.supports_mlx_source and any(header.metadata.get("format") == "mlx" for header in holding)
    return splitter, config, of_mlx


def reader_of(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return mlx-vlm's reader of heads of a checkpoint's family, None for one without, and the config.json for it."""
    try:
        from mlx_vlm.speculative.drafters.mtp_split import MTPSplitter, get_mtp_splitter

        loads = hasattr(MTPSplitter, "load")
    except ImportError:
        loads = False
    if not loads:
        installed = packages.versions(["mlx-vlm"]).get("mlx-vlm", "none")
        raise UserError(
            f"mtp: the head's modules are those of mlx-vlm {_SINCE} or later, and {installed} is installed: "
            f"pip install 'mlx-vlm>={_SINCE}'."
        )
    config = with_known_type(completed(plain_config(path, trust_remote_code=False)))
    if config["model_type"] not in _FAMILIES:
        return None, config
    text = dict(text_part(config))
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" not in rope:
        # All three positions of a token of text are equal, so that any division of the frequencies serves.
        half = int(text["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        text["rope_parameters"] = {"type": "default", **rope, "mrope_section": [half, 0, 0]}
    config = {**config, "text_config": text}
    return get_mtp_splitter(source_config=config), config
