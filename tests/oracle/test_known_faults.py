"""The known faults of mlx-lm's models, shown on tiny models beside transformers' own. Live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from deltatune.models.known_faults import known_faults
from deltatune.models.load import load_model

pytestmark = [
    pytest.mark.oracle,
    # Raised inside transformers.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]

WINDOW = 16
ROWS = np.random.default_rng(0).integers(10, 300, (2, 40))
# As in test_saved_families.py.
TOLERANCE = 1e-4
NO_NORM = {"norm_topk_prob": False}
SLIDING = {"layer_types": ["sliding_attention"] * 4, "sliding_window": WINDOW, "use_sliding_window": True}
WINDOWS = ["mistral", "mixtral", "phi3"]
GELU = {"hidden_act": "gelu"}
# mlx-lm's PhiMoE always has this bias.
BIAS = {"lm_head_bias": True}
WINDOWS_OF_KINDS = ["dots1", "qwen2", "qwen3", "qwen3_moe"]


def rotated(share: float) -> dict[str, Any]:
    """The option that rotates a share of each head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}}


# A family, options with its fault, options without it, and the length up to which rows are right.
FAULTS: list[tuple[str, dict[str, Any], dict[str, Any] | None, int]] = [
    *((family, {"sliding_window": WINDOW}, {"sliding_window": None}, WINDOW) for family in WINDOWS),
    *((family, SLIDING, {}, WINDOW) for family in WINDOWS_OF_KINDS),
    ("starcoder2", GELU | {"sliding_window": WINDOW}, GELU | {"sliding_window": None}, WINDOW),
    ("starcoder2", {"sliding_window": None}, GELU | {"sliding_window": None}, 0),
    ("phimoe", BIAS | {"sliding_window": WINDOW}, BIAS | {"sliding_window": None}, WINDOW),
    ("gemma2", {"sliding_window": WINDOW}, {"layer_types": ["full_attention"] * 4}, WINDOW),
    ("qwen2_moe", NO_NORM | SLIDING, NO_NORM, WINDOW),
    ("qwen2_moe", {"norm_topk_prob": True}, NO_NORM, 0),
    ("jamba", {"num_experts_per_tok": 2}, {"num_experts_per_tok": 4}, 0),
    ("ernie4_5_moe", {"moe_k": 2}, {"moe_k": 4}, 0),
    ("falcon_h1", {"key_multiplier": 0.5}, {"key_multiplier": 1.0}, 0),
    # Transformers reads "gelu" in a config of Gemma as the approximation, too.
    ("gemma", {}, None, 0),
    ("gpt_neox", {}, {"hidden_act": "gelu_fast"}, 0),
    ("glm", rotated(0.5), rotated(1.0), 0),
]


@pytest.fixture(autouse=True)
def saves(monkeypatch):
    """The script's folder is on the path for a test alone: other folders have modules of the same names."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts" / "families")


def difference(family: str, folder: Path, options: dict[str, Any]) -> tuple[np.ndarray, list[int]]:
    """The largest difference of the logits at each position, and the lengths of the known faults."""
    import torch_saves

    model = torch_saves.save(family, folder, **options)
    expected = torch_saves.logits(model, ROWS)
    ours, _ = load_model(folder)
    found = np.array(ours(mx.array(ROWS)).astype(mx.float32))
    faults = known_faults(json.loads((folder / "config.json").read_text()))
    return np.abs(found - expected).max(axis=(0, 2)), [fault.lengths.start - 1 for fault in faults]


@pytest.mark.parametrize(("family", "faulty", "sound", "length"), FAULTS)
def test_a_known_fault(family, faulty, sound, length, tmp_path):
    off, beyond = difference(family, tmp_path / "faulty", faulty)
    assert beyond == [length]
    assert off[:length].max(initial=0) < TOLERANCE
    assert off[length:].max() > 5 * TOLERANCE
    if sound is None:
        return
    off, beyond = difference(family, tmp_path / "sound", sound)
    assert beyond == []
    assert off.max() < TOLERANCE


def test_positions_that_are_scaled_by_length(tmp_path):
    """Transformers takes short_factor for rows up to the original length."""

    def longrope(original: int, short: float) -> dict[str, Any]:
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original}
        rope |= {"partial_rotary_factor": 1.0, "short_factor": [short] * 8, "long_factor": [3.0] * 8}
        return {"rope_parameters": rope, "original_max_position_embeddings": original, "sliding_window": None}

    off, beyond = difference("phi3", tmp_path / "short", longrope(64, 1.0))
    assert beyond == [0]
    assert off.max() > 1.0
    off, _ = difference("phi3", tmp_path / "long", longrope(16, 1.0))
    assert off.max() < TOLERANCE
    off, beyond = difference("phi3", tmp_path / "same", longrope(64, 3.0))
    assert beyond == []
    assert off.max() < TOLERANCE
