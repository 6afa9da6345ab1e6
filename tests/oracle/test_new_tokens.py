"""Rows for new tokens go to PEFT, train on there with our losses, and come back. Live, under `make oracle`."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path
from test_peft import our_logits, saved, their_logits, theirs_loaded

from deltatune.export.new_token_rows import OPTION
from deltatune.export.peft_adapter import write_peft
from deltatune.export.peft_import import import_peft
from deltatune.lora import adapters, convert_to_lora, load_adapters, save_adapters
from deltatune.lora.new_rows import add_rows, grown_tables
from deltatune.models.load import load_model
from deltatune.models.vocabulary import token_tables
from deltatune.options.config import LoraConfig
from deltatune.selftest.parity import ours, seeded
from deltatune.selftest.parity.cases import CASES, LOSS_TOLERANCE
from deltatune.train.batch_loss import chunked_loss

pytestmark = pytest.mark.oracle

NEW = 2
# Tokens of the batches of parity, which stand for the new ones here.
REPLACED = {7: seeded.VOCAB, 10: seeded.VOCAB + 1}
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    ("name", "tied"),
    [("qwen3", False), ("qwen3", True), ("qwen3_5", True), ("gemma3", True), ("bailing_hybrid", False)],
)
def test_rows_of_new_tokens(name, tied, tmp_path, monkeypatch):
    import peft
    from parity import theirs as reference

    case, plain_batch = CASES[name], seeded.batch
    monkeypatch.setattr(seeded, "batch", lambda step: with_new_tokens(plain_batch(step)))
    monkeypatch.setattr("test_peft.TOKENS", seeded.batch(0).tokens[:2, :19].astype(np.int64))
    folder = saved(tmp_path, name, tie_word_embeddings=tied)
    model, _ = load_model(folder)
    tables = token_tables(model)
    assert len(tables) == 2 - tied
    add_rows(model, dict.fromkeys(tables, NEW))
    convert_to_lora(model, LoraConfig(rank=3, scale=1.5, keys=["*.down_proj", "*.[qkvo]_proj"]))
    model.update(tree_map_with_path(drawn, model.trainable_parameters()))
    save_adapters(model, tmp_path / "adapter", {})
    found = write_peft(folder, tmp_path / "adapter", tmp_path / "peft", str(folder))
    assert found.config[OPTION]["embed_tokens"] == [seeded.VOCAB, seeded.VOCAB + 1]
    assert any(f"resize_token_embeddings({seeded.VOCAB + NEW})" in note for note in found.notes)

    base = theirs_loaded(folder)
    base.resize_token_embeddings(seeded.VOCAB + NEW)
    trained = peft.PeftModel.from_pretrained(base, tmp_path / "peft", is_trainable=True)
    assert np.abs(their_logits(trained) - our_logits(model)).max() < TOLERANCE

    parameters = {(key, "value"): value for key, value in trained.named_parameters() if value.requires_grad}
    loss = partial(reference.text_loss, trained)
    run = reference.train(loss, trained, parameters, case.family.learning_rate, steps=6)
    grown = grown_tables(model)
    modules = adapters(model) | grown
    mine = ours.train(
        model,
        modules,
        str,
        case.family.learning_rate,
        lambda: chunked_loss(*ours.parts(model)),
        lambda index: ours.as_batch(seeded.batch(index)),
        steps=6,
    )
    assert np.abs(np.subtract(run.losses, mine.losses)).max() < LOSS_TOLERANCE
    trained.save_pretrained(tmp_path / "saved")
    import_peft(folder, tmp_path / "saved", tmp_path / "imported")
    back, _ = load_model(folder)
    load_adapters(back, tmp_path / "imported")
    for path, table in grown_tables(back).items():
        assert mx.abs(table.new_rows - grown[path].new_rows).max().item() < TOLERANCE
    assert np.abs(our_logits(back) - their_logits(trained)).max() < TOLERANCE


def drawn(path: str, value: mx.array) -> mx.array:
    return value + mx.array(seeded.spread(f"new tokens {path}", value.shape, 0.05))


def with_new_tokens(rows: seeded.Rows) -> seeded.Rows:
    tokens = rows.tokens.copy()
    for old, new in REPLACED.items():
        tokens[tokens == old] = new
    return seeded.Rows(tokens, rows.counts, rows.lengths)
