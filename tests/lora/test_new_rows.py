"""Rows added to embeddings and heads: values and gradients against float64, and the plain tables made of them."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from adapter_checks import assert_agree, float64
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora, load_adapters, save_adapters
from deltatune.lora.adapter_files import load_adapter_weights
from deltatune.lora.new_rows import (
    GrownEmbedding,
    GrownLinear,
    add_rows,
    grown_tables,
    plain_parameters,
    row_count,
    unfreeze_new_rows,
)
from deltatune.lora.weights import dense_weight
from deltatune.models.load import load_model
from deltatune.options.config import LoraConfig

OLD, NEW, DIMS = 50, 3, 64
PACKINGS = [None, {"bits": 3}, {"bits": 4, "mode": "mxfp4"}]
NAMES = ["dense", "3bit", "mxfp4"]
EMBEDDING = "language_model.model.embed_tokens"


def grown(kind: type, packing: dict | None = None, bias: bool = False) -> nn.Module:
    """A table with random new rows."""
    mx.random.seed(0)
    base = nn.Embedding(OLD, DIMS) if kind is GrownEmbedding else nn.Linear(DIMS, OLD, bias=bias)
    table = kind(base if packing is None else base.to_quantized(32, **packing), NEW)
    table.new_rows = mx.random.normal(table.new_rows.shape)
    if bias:
        table.new_bias = mx.random.normal((NEW,))
    table.freeze()
    table.unfreeze(recurse=False)
    return table


def whole(table: nn.Module, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    """All rows, the new ones rounded to a dtype."""
    return np.concatenate([float64(dense_weight(table.base)), float64(table.new_rows.astype(dtype))])


@pytest.mark.parametrize("packing", PACKINGS, ids=NAMES)
@pytest.mark.parametrize("ids_dtype", [mx.int32, mx.uint32])
def test_values_against_float64(packing, ids_dtype):
    embedding, head = grown(GrownEmbedding, packing), grown(GrownLinear, packing, bias=True)
    ids, x = mx.array([[3, 52, 49], [50, 0, 51]], ids_dtype), mx.random.normal((2, 3, DIMS))
    assert np.array_equal(float64(embedding(ids)), whole(embedding, embedding(ids).dtype)[np.array(ids)])
    # A sum of DIMS products in fp32 is off by at most DIMS roundings of its terms, which are below 4 * 4 here.
    bound = DIMS * 2**-24 * 16 * DIMS**0.5
    assert np.abs(float64(embedding.as_linear(x)) - float64(x) @ whole(embedding).T).max() < bound
    bias = np.concatenate([float64(head.base.bias), float64(head.new_bias)])
    assert np.abs(float64(head(x)) - float64(x) @ whole(head).T - bias).max() < bound


@pytest.mark.parametrize("use", ["embed", "tied", "head"])
def test_gradients_against_float64(use):
    table = grown(GrownLinear if use == "head" else GrownEmbedding, bias=use == "head")
    ids, x = mx.array([[3, 52, 52], [50, 52, 3]]), mx.random.normal((2, 3, DIMS))
    run = {"embed": lambda: table(ids), "tied": lambda: table.as_linear(x), "head": lambda: table(x)}[use]
    dy = mx.random.normal((2, 3, DIMS if use == "embed" else OLD + NEW))

    def loss(parameters):
        table.update(parameters)
        return (run() * dy).sum()

    parameters = table.trainable_parameters()
    found = dict(tree_flatten(mx.grad(loss)(parameters)))
    table.update(parameters)
    flat = float64(dy).reshape(-1, dy.shape[-1])
    expected = np.zeros((OLD + NEW, DIMS))
    if use == "embed":
        np.add.at(expected, np.array(ids).reshape(-1), flat)
    else:
        expected = flat.T @ float64(x).reshape(-1, DIMS)
    wanted = {"new_rows": expected[OLD:]} | ({"new_bias": flat.sum(0)[OLD:]} if use == "head" else {})
    assert_agree(found, wanted)


@pytest.mark.parametrize("kind", [GrownEmbedding, GrownLinear])
@pytest.mark.parametrize("packing", PACKINGS, ids=NAMES)
def test_new_rows_start_at_the_mean(kind, packing, monkeypatch):
    monkeypatch.setattr("deltatune.lora.new_rows._BLOCK", 16)
    base = nn.Embedding(OLD, DIMS) if kind is GrownEmbedding else nn.Linear(DIMS, OLD)
    base = base if packing is None else base.to_quantized(32, **packing)
    table = kind(base, NEW)
    mean = float64(dense_weight(base)).mean(0)
    assert table.new_rows.dtype == mx.float32
    assert np.abs(float64(table.new_rows) - mean).max() < OLD * 2**-24 * np.abs(float64(dense_weight(base))).max()
    if kind is GrownLinear:
        assert np.allclose(float64(table.new_bias), float64(base.bias).mean(), atol=1e-6)


@pytest.mark.parametrize("kind", [GrownEmbedding, GrownLinear])
@pytest.mark.parametrize("packing", PACKINGS, ids=NAMES)
def test_the_plain_table_keeps_the_old_rows_bit_for_bit(kind, packing):
    table = grown(kind, packing, bias=kind is GrownLinear)
    plain = table.plain()
    assert type(plain) is type(table.base)
    assert row_count(plain) == OLD + NEW
    for name, array in table.base.parameters().items():
        assert mx.array_equal(plain[name][:OLD], array)
    dense = table.plain(dequantize=True)
    assert type(dense) is kind.dense_class
    assert np.array_equal(float64(dense.weight), whole(table, dense.weight.dtype))
    packed = float64(dense_weight(plain))[OLD:]
    # A group of 32 random numbers spans about 5, and 3 bits make seven steps of that.
    assert np.abs(packed - float64(table.new_rows)).max() < (0 if packing is None else 1.5) + 1e-6
    assert set(table.base.parameters()) == set(plain.parameters())


def test_half_precision_stays_half():
    table = grown(GrownEmbedding)
    table.base.set_dtype(mx.bfloat16)
    assert table(mx.array([1, 52])).dtype == mx.bfloat16
    assert table.as_linear(mx.zeros((2, DIMS), dtype=mx.bfloat16)).dtype == mx.bfloat16
    assert table.plain().weight.dtype == mx.bfloat16


def test_only_new_rows_train_beside_adapters(tiny_checkpoint):
    for kind in ("lora", "full"):
        model, _ = load_model(tiny_checkpoint("qwen3_5"))
        add_rows(model, {EMBEDDING: 2})
        convert_to_lora(model, LoraConfig(rank=2), fine_tune_type=kind)
        trained = dict(tree_flatten(model.trainable_parameters()))
        assert [name for name in trained if name.startswith(EMBEDDING)] == [f"{EMBEDDING}.new_rows"]
        assert len(trained) > 1


def changed(model: nn.Module, seed: int = 4) -> nn.Module:
    mx.random.seed(seed)
    for table in grown_tables(model).values():
        table.new_rows = mx.random.normal(table.new_rows.shape)
    return model


@pytest.mark.parametrize(("kind", "quantize"), [("lora", {}), ("dora", None), ("full", {})])
def test_saved_rows_are_loaded_again(tiny_checkpoint, tmp_path, kind, quantize):
    path = tiny_checkpoint("olmo_hybrid", quantize=quantize)
    model, _ = load_model(path)
    add_rows(model, {"model.embed_tokens": 2, "lm_head": 2})
    convert_to_lora(model, LoraConfig(rank=2), fine_tune_type=kind)
    save_adapters(changed(model), tmp_path, {})
    again, _ = load_model(path)
    load_adapters(again, tmp_path)
    tokens = mx.array([[5, 320, 321, 7]])
    assert mx.array_equal(again(tokens), model(tokens))
    assert again(tokens).shape[-1] == 322
    other, _ = load_model(path)
    add_rows(other, {"model.embed_tokens": 2, "lm_head": 2})
    convert_to_lora(other, LoraConfig(rank=2), fine_tune_type=kind)
    load_adapter_weights(other, tmp_path / "adapters.safetensors")
    assert mx.array_equal(other(tokens), model(tokens))


def test_an_adapter_with_other_rows_is_refused(tiny_checkpoint, tmp_path):
    path = tiny_checkpoint("qwen3_5")
    model, _ = load_model(path)
    add_rows(model, {EMBEDDING: 2})
    convert_to_lora(model, LoraConfig(rank=2))
    save_adapters(model, tmp_path, {})
    file = tmp_path / "adapters.safetensors"
    for count, words in ((0, f"the model has no {EMBEDDING}.new_rows"), (3, "new_rows has shape")):
        other, _ = load_model(path)
        add_rows(other, {EMBEDDING: count} if count else {})
        convert_to_lora(other, LoraConfig(rank=2))
        with pytest.raises(UserError, match=words):
            load_adapter_weights(other, file)
    with pytest.raises(UserError, match="is for another model"):
        load_adapters(load_model(tiny_checkpoint("qwen3"))[0], tmp_path)
    narrow, _ = load_model(tiny_checkpoint("qwen3_5", hidden_size=96))
    with pytest.raises(UserError, match=f"{EMBEDDING}.new_rows has shape"):
        load_adapters(narrow, tmp_path)


def test_plain_parameters_have_the_names_of_a_checkpoint(tiny_checkpoint):
    model, _ = load_model(tiny_checkpoint("olmo_hybrid", quantize={}))
    names = {name for name, _ in tree_flatten(model.parameters())}
    add_rows(model, {"model.embed_tokens": 2, "lm_head": 2})
    plain = plain_parameters(model)
    assert set(plain) == names
    assert {plain[f"{path}.{leaf}"].shape[0] for path in ("lm_head", "model.embed_tokens")
            for leaf in ("weight", "scales", "biases")} == {322}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "words"),
    [("model.norm", "cannot be added to this RMSNorm"), ("model.layers.0.mlp.up_proj", "has an adapter already")],
)
def test_module_that_takes_no_new_rows_is_refused(tiny_checkpoint, path, words):
    model, _ = load_model(tiny_checkpoint("qwen3"))
    convert_to_lora(model, LoraConfig(rank=2))
    with pytest.raises(UserError, match=words):
        add_rows(model, {path: 1})


def test_a_table_with_a_directly_read_weight_is_refused(tiny_checkpoint, monkeypatch):
    model, _ = load_model(tiny_checkpoint("qwen3"))
    upstream = type(model.model)

    class Reading(upstream):
        def __call__(self, inputs, *rest, **more):
            return super().__call__(inputs, *rest, **more) + self.embed_tokens.weight[inputs]

    model.model.__class__ = Reading
    with pytest.raises(UserError, match=r"model.embed_tokens: .* reads its weight directly"):
        add_rows(model, {"model.embed_tokens": 1})


def test_a_grown_table_takes_no_adapter(tiny_checkpoint):
    model, _ = load_model(tiny_checkpoint("qwen3_5"))
    add_rows(model, {EMBEDDING: 2})
    with pytest.raises(UserError, match=r"keys: .*embed_tokens' gets rows for new tokens"):
        convert_to_lora(model, LoraConfig(rank=2, keys=[EMBEDDING]))
    unfreeze_new_rows(model)
