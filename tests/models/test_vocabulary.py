"""Tokens without rows in the embedding are refused or get rows; rows to spare train, are saved and exported."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from tokenizers import Tokenizer

from checkpoint_copies import copied, rewrite, rewritten
from deltatune.errors import UserError
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.lora.new_rows import grown_tables
from deltatune.models.adapted_base import load as load_with_adapter
from deltatune.models.load import load, load_model
from deltatune.models.vocabulary import (
    resize_embeddings,
    token_rows,
    token_tables,
    with_vocab_size,
)
from deltatune.options.config import LoraConfig
from families import FAMILIES, VOCABULARY
from new_tokens import TOKENS, with_new_tokens, write_data

REFUSAL = "the token '<call>' has the id 320, and the model's embedding has 320 rows, for ids 0 to 319."


@pytest.mark.parametrize("family", FAMILIES)
def test_the_embedding_is_the_module_that_reads_tokens(tiny_model, family, monkeypatch):
    model, tokens, read = tiny_model(family), mx.array([[5, 6]]), []
    paths = {id(module): path for path, module in model.named_modules()}
    upstream = nn.Embedding.__call__

    def call(self, ids):
        read.extend([paths[id(self)]] if ids is tokens else [])
        return upstream(self, ids)

    tables = token_tables(model)
    monkeypatch.setattr(nn.Embedding, "__call__", call)
    width = model(tokens).shape[-1]
    assert list(tables)[:1] == read
    assert token_rows(model) == width == VOCABULARY
    tied = FAMILIES[family].get("tie_word_embeddings", False)
    assert [path.rpartition(".")[2] for path in tables][1:] == ["lm_head"] * (not tied)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint, tmp_path_factory):
    base = tiny_checkpoint("qwen3_5", num_hidden_layers=2, full_attention_interval=2)
    return with_new_tokens(base, tmp_path_factory.mktemp("new") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("new") / "data")


@pytest.mark.bad_input("`{command}` on data with a token that the embedding has no row for")
@pytest.mark.parametrize(
    ("command", "flags", "where"),
    [
        ("train", [], "train.jsonl:2: "),
        ("train", ["--from-scratch"], "train.jsonl:2: "),
        ("train", ["--show-batch"], "train.jsonl:2: "),
        ("plan", [], "train.jsonl:2: "),
        ("eval", [], "test.jsonl:2: "),
    ],
)
def test_data_with_a_token_without_a_row(complaint, checkpoint, data, tmp_path, command, flags, where):
    out = [] if command == "eval" else ["--adapter-path", tmp_path / "out"]
    error = complaint(command, "--model", checkpoint, "--data", data, "--batch-size", 2, *out, *flags)
    assert where + REFUSAL in error
    assert "Train with --resize-embeddings" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.bad_input("`generate --prompt` with a token that the embedding has no row for")
def test_a_prompt_with_a_token_without_a_row(run, complaint, checkpoint):
    assert f"--prompt: {REFUSAL}" in complaint("generate", "--model", checkpoint, "--prompt", "a <call> b")
    assert run("generate", "--model", checkpoint, "--prompt", "a b", "--max-tokens", 1)[0] == 0


def test_data_without_such_tokens_are_trained(run, checkpoint, tmp_path):
    data = write_data(tmp_path / "data", new=False)
    flags = ["--model", checkpoint, "--data", data, "--batch-size", 2, "--iters", 1]
    assert run("train", *flags, "--adapter-path", tmp_path / "out")[0] == 0


@pytest.mark.bad_input("images and a prompt with a token that the embedding has no row for")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl_moe"])
def test_vision_data_with_a_token_without_a_row(complaint, tiny_vision_checkpoint, tmp_path, family):
    from PIL import Image

    path = with_new_tokens(tiny_vision_checkpoint(family), tmp_path / "model")
    rows = token_rows(load(path, image="a test").model)
    (tmp_path / "data").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "data" / "a.png")
    turns = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a <call> b"}]
    for split in ("train", "valid"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(json.dumps({"messages": turns, "images": ["a.png"]}) + "\n")
    flags = ["--model", path, "--data", tmp_path / "data", "--batch-size", 1, "--iters", 1]
    error = complaint("train", *flags, "--adapter-path", tmp_path / "out")
    assert f"train.jsonl:1: the token '<call>' has the id {rows}, and the model's embedding has {rows} rows" in error
    error = complaint("generate", "--model", path, "--prompt", "a <call>", "--image", tmp_path / "data" / "a.png")
    assert "--prompt: the token '<call>'" in error


# Every second one of a config alone, and of weights.
@pytest.mark.parametrize(
    ("family", "scratch"),
    [
        pytest.param(name, None if at % 2 else 0, marks=() if at < 4 else pytest.mark.weekly)
        for at, name in enumerate(FAMILIES)
    ],
)
def test_every_family_grows(tiny_checkpoint, tmp_path, family, scratch):
    base = tiny_checkpoint(family)
    path = with_new_tokens(base, tmp_path / "model")
    loaded, before = load(path), load(base).model
    resize_embeddings(loaded, scratch)
    tokens = mx.array([[5, 320, 7, 321]])
    logits = loaded.model(tokens)
    assert logits.shape == (1, 4, 322)
    assert mx.isfinite(logits).all()
    text = loaded.config.get("text_config", loaded.config)
    assert text["vocab_size"] == 322
    if scratch is None:
        old = mx.array([[5, 6]])
        # The products may be computed in other blocks, so the logits agree to rounding and not to the bit.
        assert mx.abs(loaded.model(old)[..., :320] - before(old)).max() < 1e-5


def test_a_model_that_does_not_follow_is_refused(checkpoint, monkeypatch):
    loaded = load(checkpoint)
    upstream = type(loaded.model)

    class Cut(upstream):
        def __call__(self, *inputs, **more):
            return super().__call__(*inputs, **more)[..., :320]

    loaded.model.__class__ = Cut
    with pytest.raises(UserError, match=r"does not follow: for 322 tokens it has 322 rows and gives 320 logits"):
        resize_embeddings(loaded)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 4}, {"vocab_size": 5}),
        ({"vocab_size": 4, "text_config": {"vocab_size": 4}}, {"vocab_size": 5, "text_config": {"vocab_size": 5}}),
        ({"vocab_size": 9, "text_config": {"vocab_size": 4}}, {"vocab_size": 9, "text_config": {"vocab_size": 5}}),
        ({"text_config": {}}, {"text_config": {"vocab_size": 5}}),
        ({}, {"vocab_size": 5}),
    ],
)
def test_the_size_in_a_config(config, expected):
    assert with_vocab_size(config, 4, 5) == expected


LAST = 308  # The tokens of the base have the ids below; the rows from here on are spare.


@pytest.fixture(scope="module", params=["qwen3_5", pytest.param("olmo_hybrid", marks=pytest.mark.weekly)])
def base(request, tiny_checkpoint, tmp_path_factory):
    """A checkpoint with spare rows that are small, as decay leaves those that nobody trains, and two tokens there."""
    folder = copied(tiny_checkpoint(request.param), tmp_path_factory.mktemp("spare") / "model")
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["id"] < LAST]
    vocabulary = stored["model"]["vocab"]
    stored["model"]["vocab"] = {token: number for token, number in vocabulary.items() if number < LAST}
    kept = stored["model"]["vocab"]
    stored["model"]["merges"] = [pair for pair in stored["model"]["merges"] if "".join(pair) in kept]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    with rewritten(folder / "model.safetensors") as weights:
        for name, array in weights.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weights[name] = mx.concatenate([array[:LAST], 0.01 * array[LAST:]])
    return folder


def test_from_training_to_merge_and_export(run, base, tmp_path):
    loaded = load(base)
    assert loaded.tokenizer.convert_tokens_to_ids(TOKENS) == [LAST, LAST + 1]
    before = loaded.model(mx.array([[5, 6, 7]]))
    resize_embeddings(loaded)
    tables = grown_tables(loaded.model)
    assert {(table.first, table.end, table.rows) for table in tables.values()} == {(LAST, LAST + 2, 320)}
    after = loaded.model(mx.array([[5, 6, 7]]))
    assert mx.array_equal(after[..., :LAST], before[..., :LAST])
    assert mx.array_equal(after[..., LAST + 2 :], before[..., LAST + 2 :])
    data, folder, merged = write_data(tmp_path / "data"), tmp_path / "out", tmp_path / "merged"
    flags = ["--model", base, "--adapter-path", folder]
    options = ["--batch-size", 2, "--iters", 2, "--learning-rate", 1e-2, "--resize-embeddings"]
    code, said, error = run("train", *flags, "--data", data, *options)
    assert code == 0, error
    assert f"New rows: 2 in {next(iter(tables))}, for the token ids from {LAST}" in said
    assert run("merge", *flags, "--save-path", merged)[0] == 0
    theirs, ours = load_model(merged)[0], load_with_adapter(base, str(folder)).model
    prompt = mx.array([[5, LAST, 7, LAST + 1]])
    assert mx.abs(theirs(prompt) - ours(prompt)).max() < 1e-3
    old, new = (load_model(path)[0] for path in (base, merged))
    for path in tables:
        first, second = (dict(model.named_modules())[path].weight for model in (old, new))
        moved = mx.abs(first - second).max(axis=-1) > 0
        assert [number for number in range(320) if moved[number].item()] == [LAST, LAST + 1]
    assert run("export", "--to", "peft", *flags, "--save-path", tmp_path / "peft")[0] == 0
    indices = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["trainable_token_indices"]
    assert set(map(tuple, indices.values())) == {(LAST, LAST + 1)}


def test_trained_rows_and_full_tables_stay(base, tiny_checkpoint):
    loaded = load(base)
    for path, module in loaded.model.named_modules():
        if path.endswith(("embed_tokens", "lm_head")):
            module.weight = mx.concatenate([module.weight[:LAST], module.weight[1:3], module.weight[LAST + 2 :]])
    resize_embeddings(loaded)
    assert grown_tables(loaded.model) == {}
    full = load(tiny_checkpoint("qwen3_5"))
    resize_embeddings(full)
    assert grown_tables(full.model) == {}


@pytest.mark.bad_input("an adapter with new_rows_from {value}")
@pytest.mark.parametrize("value", [0, 321, "x"])
def test_a_wrong_place_is_refused(complaint, base, tmp_path, value):
    folder, loaded = tmp_path / "out", load(base)
    resize_embeddings(loaded)
    convert_to_lora(loaded.model, LoraConfig(rank=2, keys=["*.o_proj"]))
    save_adapters(loaded.model, folder, {})
    rewrite(folder / "adapter_config.json", new_rows_from=value)
    error = complaint("generate", "--model", base, "--adapter-path", folder, "--prompt", "a")
    assert "new_rows_from: expected a number from 1 to 320" in error
