"""Tiny models that transformers itself draws and saves have the same logits here. Live."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from deltatune.layers import logits_of
from deltatune.models.document_isolation import check_packing
from deltatune.models.load import load_model
from deltatune.ops.segments import segments
from deltatune.patches import patched

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
    "gpt_oss",
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
# Families whose documents may share a row, and the length of the first document of two.
PACKED = [
    "apertus",
    "exaone4",
    "gemma3_text",
    "gemma4_text",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mellum",
    "minimax_m2",
    "ministral3",
    "olmo3",
    "olmo_hybrid",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
]
FIRST = 16
# mlx-lm's Ministral 3 has no window (known_faults.py).
OPTIONS = {"ministral3": {"sliding_window": None}}
# Differences of 1e-7 a sum, of logits up to 6, over four layers of sums of up to 96 products.
TOLERANCE = 1e-4
# The loss of a token is off by twice as much as a logit at most, and each is some 5.
LOSS_TOLERANCE = 2e-5


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


def loss(logits, rows) -> float:
    """The cross-entropy of rows, summed in float64."""
    logits = logits[:, :-1].astype(np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    sums = np.log(np.exp(logits - largest).sum(axis=-1)) + largest[..., 0]
    return float((sums - np.take_along_axis(logits, rows[:, 1:, None], axis=-1)[..., 0]).sum())


@pytest.mark.parametrize("family", PACKED)
def test_the_loss_of_packed_documents_of_a_family(family, tmp_path):
    """The second document is longer than every window; transformers sees each document alone."""
    import torch_saves

    model = torch_saves.save(family, tmp_path, **OPTIONS.get(family, {}))
    documents = [ROWS[:, :FIRST], ROWS[:, FIRST:]]
    expected = sum(loss(torch_saves.logits(model, rows), rows) for rows in documents)
    ours, _ = load_model(tmp_path)
    with patched(ours):
        check_packing(ours, ROWS.shape[1])
        ours.train()
        owners = np.repeat([[0, 1]], [FIRST, ROWS.shape[1] - FIRST], axis=1).repeat(len(ROWS), axis=0)
        with segments(mx.array(owners, mx.int32)):
            packed = np.array(logits_of(ours, mx.array(ROWS)).astype(mx.float32))
    found = loss(packed[:, :FIRST], documents[0]) + loss(packed[:, FIRST:], documents[1])
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)


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
