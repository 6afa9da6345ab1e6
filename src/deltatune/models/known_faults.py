"""Known faults of mlx-lm's models: where their logits are not those of transformers, and in rows of which length.

tests/oracle/test_known_faults.py shows each of them on tiny models beside torch, and fails where mlx-lm has mended one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ..errors import UserError
from .transformers_configs import text_part, transformers_values

Values = Mapping[str, Any]

_ALL = range(1, sys.maxsize)


@dataclass(frozen=True)
class KnownFault:
    """A fault: the model's difference from transformers in words, and the lengths of the rows that are wrong, in
    tokens. Training and evaluation are `refused` where their losses would be those of no model.
    """

    sentence: str
    lengths: range
    refused: bool = False


@dataclass(frozen=True)
class _Record:
    """A known fault of some families, or of all where none is named.

    `lengths` reads from a config which rows are wrong, None where none is. The sentence may hold `first` and `last`,
    the lengths of the longest row that is right before those and of the longest of those.
    """

    families: frozenset[str]
    lengths: Callable[[Values], range | None]
    sentence: str
    refused: bool = False


def _beyond_window(values: Values) -> range | None:
    """Rows beyond the window of the layers that have one: those of a kind, or all where a family has no kinds."""
    kinds = values.get("layer_types")
    window = values.get("sliding_window")
    if not window or (kinds and "sliding_attention" not in kinds):
        return None
    return range(window + 1, sys.maxsize)


def _up_to_original_length(values: Values) -> range | None:
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type") != "longrope" or rope["short_factor"] == rope["long_factor"]:
        return None
    return range(1, rope["original_max_position_embeddings"] + 1)


def _where(is_wrong: Callable[[Values], bool]) -> Callable[[Values], range | None]:
    return lambda values: _ALL if is_wrong(values) else None


def _rotated_share(values: Values) -> Any:
    rope = values.get("rope_parameters") or {}
    return rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))


_some_experts = _where(lambda values: values.get("num_experts_per_tok", 1) < values.get("num_experts", 1))
_WITHOUT_WINDOW = {"dots1", "gemma2", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe"}
_WITHOUT_WINDOW |= {"qwen3", "qwen3_moe", "starcoder2"}
_OTHER_GELU = "computes another GELU than config.json asks for: logits differ by some 0.1 %"
_RECORDS = (
    _Record(
        frozenset(_WITHOUT_WINDOW),
        _beyond_window,
        "has no sliding window: beyond {first:,} tokens its logits are not those of transformers, where a token sees "
        "the last {first:,} alone",
    ),
    _Record(
        frozenset(),
        _up_to_original_length,
        "scales positions by long_factor in rows of any length, and transformers by short_factor in rows of up to "
        "{last:,} tokens",
    ),
    _Record(
        frozenset({"jamba"}),
        _some_experts,
        "takes the softmax of the chosen experts' scores alone, and transformers that of all experts' scores: the "
        "experts weigh more than they should",
    ),
    _Record(
        frozenset({"ernie4_5_moe"}),
        _some_experts,
        "leaves out e_score_correction_bias, which transformers adds to the scores by which experts are chosen",
    ),
    _Record(
        frozenset({"falcon_h1"}),
        _where(lambda values: values.get("key_multiplier", 1.0) != 1.0),
        "leaves out key_multiplier, by which transformers multiplies the keys of attention",
    ),
    _Record(
        frozenset({"falcon_h1", "mamba2"}),
        _where(lambda v: v.get("mamba_rms_norm", True) and (v.get("n_groups") or v.get("mamba_n_groups") or 1) > 1),
        "normalises the output of a mixer over all of its heads, and transformers over those of a group alone",
    ),
    _Record(
        frozenset({"glm"}),
        _where(lambda values: _rotated_share(values) != 1.0),
        "rotates a whole head by the token's position, and transformers the share partial_rotary_factor of it",
    ),
    _Record(
        frozenset({"gemma", "gpt_bigcode", "starcoder2"}),
        _where(lambda values: values.get("hidden_act", values.get("activation_function", "gelu")) != "gelu"),
        _OTHER_GELU,
    ),
    _Record(frozenset({"gpt_neox"}), _where(lambda values: values.get("hidden_act") == "gelu"), _OTHER_GELU),
    _Record(
        frozenset({"qwen2_moe"}),
        _where(lambda values: bool(values.get("norm_topk_prob"))),
        "does not divide the weights of the chosen experts by their sum, as transformers does where norm_topk_prob is "
        "true",
    ),
    _Record(
        frozenset({"gemma3n", "gemma3n_text"}),
        _where(lambda values: bool(values.get("num_kv_shared_layers"))),
        "computes keys and values of its last layers by their own projections, which no model was trained with, and "
        "transformers takes those of an earlier layer; with the cache of generation both do",
        refused=True,
    ),
)


def known_faults(config: Values) -> list[KnownFault]:
    """Return the known faults of mlx-lm's model for the content of a config.json."""
    part = text_part(config)
    family = str(part.get("model_type"))
    values = transformers_values(part)
    faults = []
    for record in _RECORDS:
        if record.families and family not in record.families:
            continue
        lengths = record.lengths(values)
        if lengths is not None:
            sentence = record.sentence.format(first=lengths.start - 1, last=lengths.stop - 1)
            faults.append(KnownFault(f"mlx-lm's {family} {sentence}.", lengths, record.refused))
    return faults


def fault_notes(model: nn.Module, config: Values, lengths: Iterable[int]) -> list[str]:
    """Return a note for each known fault of mlx-lm's model that rows of these lengths, in tokens, reach.

    The lengths are read only where the model has a fault. UserError where its losses are wrong in every row; mlx-vlm's
    model has that fault too.
    """
    faults = known_faults(config)
    if refused := next((fault for fault in faults if fault.refused), None):
        raise UserError(f"{refused.sentence[:-1]}. Train another model; this one can be used to generate.")
    faults = faults if type(model).__module__.startswith("mlx_lm.") else []
    rows = list(lengths) if faults else []
    notes = []
    for fault in faults:
        count = sum(length in fault.lengths for length in rows)
        if count:
            reached = "" if fault.lengths == _ALL else f" Of {len(rows):,} rows it reaches {count:,}."
            notes.append(f"Note: {fault.sentence}{reached}")
    return notes
