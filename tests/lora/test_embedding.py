"""LoRA and DoRA on embeddings, as an embedding and as a tied head, against float64 NumPy and mlx-lm's own layers."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRAEmbedding as UpstreamDoRAEmbedding
from mlx_lm.tuner.lora import LoRAEmbedding as UpstreamLoRAEmbedding

import adapter_checks
from adapter_checks import assert_agree, float64
from deltatune.lora import DoRAEmbedding, LoRAEmbedding
from deltatune.lora.weights import dense_weight

VOCABULARY, DIMS, RANK, SCALE = 50, 64, 4, 1.3
PACKINGS = [None, {"bits": 3}, {"bits": 4}, {"bits": 6}]


def adapted(kind, packing=None) -> nn.Module:
    mx.random.seed(0)
    embedding = nn.Embedding(VOCABULARY, DIMS)
    if packing is not None:
        embedding = nn.QuantizedEmbedding.from_embedding(embedding, 32, packing["bits"])
    return adapter_checks.adapted(kind, embedding, RANK, SCALE)


def adapted_weight(adapter: nn.Module) -> np.ndarray:
    weight = float64(dense_weight(adapter.embedding)) + SCALE * float64(adapter.lora_a) @ float64(adapter.lora_b)
    if "m" in adapter:
        weight *= (float64(adapter.m) / np.linalg.norm(weight, axis=1))[:, None]
    return weight


@pytest.mark.parametrize("packing", PACKINGS, ids=["dense", "3bit", "4bit", "6bit"])
@pytest.mark.parametrize("kind", [LoRAEmbedding, DoRAEmbedding])
def test_values_against_float64(kind, packing):
    adapter = adapted(kind, packing)
    weight = adapted_weight(adapter)
    ids, x = mx.array([[3, 1, 49], [0, 3, 3]]), mx.random.normal((2, 3, DIMS))
    assert np.abs(float64(adapter(ids)) - weight[np.array(ids)]).max() < 2e-6
    assert np.abs(float64(adapter.as_linear(x)) - float64(x) @ weight.T).max() < 1e-5
    assert np.abs(float64(adapter.fuse(dequantize=True).weight) - weight).max() < 2e-6
    assert type(adapter.fuse()) is type(adapter.embedding)


@pytest.mark.parametrize("kind", [LoRAEmbedding, DoRAEmbedding])
@pytest.mark.parametrize("use", ["embed", "head"])
def test_gradients_against_float64(kind, use):
    adapter = adapted(kind)
    ids, x = mx.array([3, 1, 49, 3]), mx.random.normal((4, DIMS))
    dy = mx.random.normal((4, DIMS if use == "embed" else VOCABULARY))

    def loss(parameters):
        adapter.update(parameters)
        return ((adapter(ids) if use == "embed" else adapter.as_linear(x)) * dy).sum()

    parameters = adapter.trainable_parameters()
    found = dict(tree_flatten(mx.grad(loss)(parameters)))
    adapter.update(parameters)
    a, b = float64(adapter.lora_a), float64(adapter.lora_b)
    if use == "embed":
        d_weight = np.zeros((VOCABULARY, DIMS))
        np.add.at(d_weight, np.array(ids), float64(dy))
    else:
        d_weight = float64(dy).T @ float64(x)
    plain = float64(adapter.embedding.weight) + SCALE * a @ b
    expected = {}
    if "m" in adapter:
        norm = np.linalg.norm(plain, axis=1)
        expected["m"] = (d_weight * plain).sum(1) / norm
        d_weight = d_weight * (float64(adapter.m) / norm)[:, None]
    expected["lora_a"], expected["lora_b"] = SCALE * d_weight @ b.T, SCALE * a.T @ d_weight
    assert_agree(found, expected)


@pytest.mark.parametrize(
    ("kind", "upstream"), [(LoRAEmbedding, UpstreamLoRAEmbedding), (DoRAEmbedding, UpstreamDoRAEmbedding)]
)
def test_same_names_shapes_and_values_as_mlx_lm(kind, upstream):
    adapter = adapted(kind)
    theirs = upstream.from_base(adapter.base, r=RANK, scale=SCALE)
    ours = dict(tree_flatten(adapter.parameters()))
    assert {name: (value.shape, value.dtype) for name, value in ours.items()} == {
        name: (value.shape, value.dtype) for name, value in tree_flatten(theirs.parameters())
    }
    theirs.load_weights(list(ours.items()))
    ids, x = mx.array([[3, 1, 49]]), mx.random.normal((1, 3, DIMS))
    assert mx.allclose(adapter(ids), theirs(ids), atol=1e-6)
    assert mx.allclose(adapter.as_linear(x), theirs.as_linear(x), atol=1e-5)


@pytest.mark.parametrize("kind", [LoRAEmbedding, DoRAEmbedding])
def test_half_precision_stays_half(kind):
    adapter = adapted(kind)
    adapter.embedding.set_dtype(mx.bfloat16)
    assert adapter(mx.array([1, 2])).dtype == mx.bfloat16
    assert adapter.as_linear(mx.zeros((2, DIMS), dtype=mx.bfloat16)).dtype == mx.bfloat16
