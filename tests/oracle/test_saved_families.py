"""Tiny models that transformers itself draws and saves have the same logits here. Live."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from deltatune.models.load import load_model

pytestmark = [
    pytest.mark.oracle,
    # Raised inside transformers.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]

# Rows longer than every window of these models.
ROWS = np.random.default_rng(0).integers(10, 300, (2, 40))
FAMILIES = [
    "apertus",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "glm4_moe",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "mamba2",
    "mellum",
    "minimax_m2",
    "olmo3",
    "qwen3_moe",
    "qwen3_vl",
]
# Differences of 1e-7 a sum, of logits up to 6, over four layers of sums of up to 96 products.
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def saves(monkeypatch):
    """The script's folder is on the path for a test alone: other folders have modules of the same names."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts" / "families")


def equal(folder: Path, model) -> None:
    import torch_saves

    expected = torch_saves.logits(model, ROWS)
    ours, _ = load_model(folder)
    found = ours(mx.array(ROWS))
    found = np.array((found if isinstance(found, mx.array) else found.logits).astype(mx.float32))
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_family_as_transformers_saves_it(family, tmp_path):
    import torch_saves

    equal(tmp_path, torch_saves.save(family, tmp_path))


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_positions_that_are_scaled_in_full_layers_alone(family, tmp_path):
    import torch_saves

    rope = torch_saves.config_of(family).rope_parameters
    scaled = {
        "gemma3_text": {"rope_type": "linear", "factor": 8.0},
        "olmo3": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    }[family]
    rope["full_attention"] |= scaled
    equal(tmp_path, torch_saves.save(family, tmp_path, rope_parameters=rope))
