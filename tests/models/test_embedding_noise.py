"""NEFTune's noise: its size, where it is, and where it is not."""

import mlx.core as mx
import pytest

from deltatune.lora.linear import LoRAEmbedding
from deltatune.models.embedding_noise import noisy_embedding

ALPHA, TOKENS = 5.0, mx.array([[3, 9, 4, 7, 9], [1, 2, 3, 4, 5]])
BOUND = ALPHA / (5 * 64) ** 0.5


def kinds(embedding):
    quantized = embedding.to_quantized(64, 4)
    return {"dense": embedding, "quantized": quantized, "adapted": LoRAEmbedding(quantized)}


@pytest.mark.parametrize("kind", ["dense", "quantized", "adapted"])
def test_noise_is_uniform_and_only_in_training(tiny_model, kind):
    model = tiny_model("qwen3_5", num_hidden_layers=2, full_attention_interval=2)
    trunk = model.language_model.model
    trunk.embed_tokens = embedding = kinds(trunk.embed_tokens)[kind]
    before, clean = type(embedding), embedding(TOKENS)
    model.train()
    with noisy_embedding(model, ALPHA):
        mx.random.seed(3)
        noise = trunk.embed_tokens(TOKENS) - clean
        other = trunk.embed_tokens(TOKENS) - clean
        mx.random.seed(3)
        again = trunk.embed_tokens(TOKENS) - clean
        model.eval()
        quiet = trunk.embed_tokens(TOKENS)
        hidden = mx.ones((1, 1, 64))
        assert mx.array_equal(embedding.as_linear(hidden), before.as_linear(embedding, hidden))
    # Of 640 uniform numbers the largest is below 0.97 of the bound once in 10^8 draws; their mean has sigma 0.023.
    assert 0.97 * BOUND < mx.abs(noise).max() <= BOUND * (1 + 1e-6)
    assert abs(noise.mean().item()) < 0.12 * BOUND
    assert mx.array_equal(noise, again)
    assert not mx.array_equal(noise, other)
    assert mx.array_equal(quiet, clean)
    assert mx.array_equal(embedding(TOKENS), clean)
    assert type(embedding) is before
