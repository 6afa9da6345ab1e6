"""Tokens that were added where the embedding has rows to spare: their rows train, are saved, merged and exported."""

import json

import mlx.core as mx
import pytest
from tokenizers import Tokenizer

from checkpoint_copies import copied, rewrite, rewritten
from deltatune.lora import convert_to_lora, save_adapters
from deltatune.lora.new_rows import grown_tables
from deltatune.models.adapted_base import load as load_with_adapter
from deltatune.models.load import load, load_model
from deltatune.models.vocabulary import resize_embeddings
from deltatune.options.config import LoraConfig
from new_tokens import TOKENS, write_data

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
def test_a_wrong_place_is_refused(run, base, tmp_path, value):
    folder, loaded = tmp_path / "out", load(base)
    resize_embeddings(loaded)
    convert_to_lora(loaded.model, LoraConfig(rank=2, keys=["*.o_proj"]))
    save_adapters(loaded.model, folder, {})
    rewrite(folder / "adapter_config.json", new_rows_from=value)
    code, _, error = run("generate", "--model", base, "--adapter-path", folder, "--prompt", "a")
    assert (code, error.count("\n")) == (2, 1)
    assert "new_rows_from: expected a number from 1 to 320" in error
