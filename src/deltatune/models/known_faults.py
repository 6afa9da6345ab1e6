"""Known faults of mlx-lm's models: where their logits are not those of transformers, and from which row length on.

tests/oracle/test_known_faults.py shows each of them on tiny models beside torch, and fails where mlx-lm has mended one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from .transformers_configs import transformers_values

Values = Mapping[str, Any]


@dataclass(frozen=True)
class KnownFault:
    """A known fault of a model.

    Attributes:
        sentence: What the model computes, and what transformers computes.
        beyond: Rows of up to so many tokens are right; 0 where none is.
    """

    sentence: str
    beyond: int


@dataclass(frozen=True)
class _Record:
    """A known fault of some families: `beyond` reads from a config how long rows may be; None where none is wrong."""

    families: frozenset[str]
    beyond: Callable[[Values], int | None]
    sentence: str


def _window(values: Values) -> int | None:
    """The window of the layers that have one: those of a kind, or all where a family has no kinds."""
    kinds = values.get("layer_types")
    return None if kinds and "sliding_attention" not in kinds else values.get("sliding_window") or None


def _some_experts(values: Values) -> int | None:
    return 0 if values.get("num_experts_per_tok", 1) < values.get("num_experts", 1) else None


def _partial_rotation(values: Values) -> int | None:
    rope = values.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    return None if share == 1.0 else 0


def _approximate_gelu(values: Values) -> int | None:
    return None if values.get("hidden_act") == "gelu" else 0


def _normalised_experts(values: Values) -> int | None:
    return 0 if values.get("norm_topk_prob") else None


_WITHOUT_WINDOW = {"dots1", "gemma2", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe"}
_WITHOUT_WINDOW |= {"qwen3", "qwen3_moe", "starcoder2"}
_RECORDS = (
    _Record(
        frozenset(_WITHOUT_WINDOW),
        _window,
        "has no sliding window: beyond {beyond:,} tokens its logits are not those of transformers, where a token sees "
        "the last {beyond:,} alone",
    ),
    _Record(
        frozenset({"jamba"}),
        _some_experts,
        "takes the softmax of the chosen experts' scores alone, and transformers that of all experts' scores: the "
        "experts weigh more than they should",
    ),
    _Record(
        frozenset({"glm"}),
        _partial_rotation,
        "rotates a whole head by the token's position, and transformers the share partial_rotary_factor of it",
    ),
    _Record(
        frozenset({"starcoder2"}),
        _approximate_gelu,
        "computes GELU exactly, and transformers as hidden_act says: logits differ by some 0.1 %",
    ),
    _Record(
        frozenset({"qwen2_moe"}),
        _normalised_experts,
        "does not divide the weights of the chosen experts by their sum, as transformers does where norm_topk_prob is "
        "true",
    ),
)


def known_faults(config: Values) -> list[KnownFault]:
    """Return the known faults of mlx-lm's model for the content of a config.json."""
    text = config.get("text_config")
    part: Values = text if isinstance(text, dict) and "model_type" in text else config
    family = str(part.get("model_type"))
    records = [record for record in _RECORDS if family in record.families]
    if not records:
        return []
    values = transformers_values(part)
    faults = []
    for record in records:
        beyond = record.beyond(values)
        if beyond is not None:
            faults.append(KnownFault(f"mlx-lm's {family} {record.sentence.format(beyond=beyond)}.", beyond))
    return faults


def fault_notes(model: nn.Module, config: Values, lengths: Iterable[int]) -> list[str]:
    """Return a note for each known fault that rows reach.

    Args:
        model: The model; one that is not mlx-lm's has none of these faults.
        config: The content of its config.json.
        lengths: The lengths of the rows, in tokens. They are read only where a length matters.
    """
    faults = known_faults(config) if type(model).__module__.startswith("mlx_lm.") else []
    longest = max(lengths, default=0) if faults else 0
    notes = []
    for fault in faults:
        if longest > fault.beyond:
            reached = f" The longest row has {longest:,}." if fault.beyond else ""
            notes.append(f"Note: {fault.sentence}{reached}")
    return notes
