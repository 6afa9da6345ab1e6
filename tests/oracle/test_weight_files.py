"""Folders with weights of two builds: the build that transformers loads is the one that is loaded here. Live."""

import mlx.core as mx
import numpy as np
import pytest

from deltatune.models.load import load_model
from weight_builds import CASES, arrange

pytestmark = pytest.mark.oracle

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
