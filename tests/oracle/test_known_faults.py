"""Folders with weights of two builds, and the known faults of mlx-lm's models, beside transformers. Live."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from deltatune.models.known_faults import known_faults
from deltatune.models.load import load_model
from weight_builds import CASES, arrange

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("saves")]

WINDOW = 16
ROWS = np.random.default_rng(0).integers(10, 300, (2, 40))
# As in test_saved_families.py, which shows the same families without the fault.
TOLERANCE = 1e-4
KINDS = {"layer_types": ["sliding_attention"] * 4, "sliding_window": WINDOW, "use_sliding_window": True}
WINDOWS = ["mistral", "mixtral", "phi3", "phimoe", "starcoder2"]
WINDOWS_OF_KINDS = ["dots1", "gemma2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# A family, options with its fault, and the length up to which rows are right.
FAULTS: list[tuple[str, dict[str, Any], int]] = [
    *((family, {"sliding_window": WINDOW}, WINDOW) for family in WINDOWS),
    *((family, KINDS, WINDOW) for family in WINDOWS_OF_KINDS),
    ("starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, 0),
    ("qwen2_moe", {"norm_topk_prob": True}, 0),
    ("jamba", {"num_experts_per_tok": 2}, 0),
    ("ernie4_5_moe", {"moe_k": 2}, 0),
    ("falcon_h1", {"key_multiplier": 0.5}, 0),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2}, 0),
    ("mamba2", {"n_groups": 2}, 0),
    # Transformers reads "gelu" in a config of Gemma as the approximation, too.
    ("gemma", {}, 0),
    ("gpt_bigcode", {"activation_function": "gelu_pytorch_tanh"}, 0),
    ("gpt_neox", {"hidden_act": "gelu"}, 0),
    ("glm", {"rope_parameters": PARTIAL}, 0),
]


def difference(family: str, folder: Path, options: dict[str, Any]) -> tuple[np.ndarray, list[int]]:
    """The largest difference of the logits at each position, and the lengths of the known faults."""
    import torch_saves

    model = torch_saves.save(family, folder, **options)
    expected = torch_saves.logits(model, ROWS)
    ours, _ = load_model(folder)
    found = np.array(ours(mx.array(ROWS)).astype(mx.float32))
    faults = known_faults(json.loads((folder / "config.json").read_text()))
    return np.abs(found - expected).max(axis=(0, 2)), [fault.lengths.start - 1 for fault in faults]


@pytest.mark.parametrize(("family", "options", "length"), FAULTS)
def test_a_known_fault(family, options, length, tmp_path):
    off, beyond = difference(family, tmp_path, options)
    assert beyond == [length]
    assert off[:length].max(initial=0) < TOLERANCE
    assert off[length:].max() > 5 * TOLERANCE


@pytest.mark.parametrize(("short", "lengths"), [(1.0, [0]), (3.0, [])])
def test_positions_that_are_scaled_by_length(short, lengths, tmp_path):
    """Transformers takes short_factor for rows up to the original length."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    rope |= {"partial_rotary_factor": 1.0, "short_factor": [short] * 8, "long_factor": [3.0] * 8}
    off, beyond = difference("phi3", tmp_path, {"rope_parameters": rope, "original_max_position_embeddings": 64})
    assert beyond == lengths
    assert off.max() > 1.0 if lengths else off.max() < TOLERANCE


TOKENS = [[5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_the_same_build(tmp_path, case):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    for seed in (0, 1):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(tmp_path / str(seed))
    folder = arrange(case, tmp_path / "0", tmp_path / "1", tmp_path / "model")
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(folder)(torch.tensor(TOKENS)).logits.numpy()
    ours = np.array(load_model(folder)[0](mx.array(TOKENS)))
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
