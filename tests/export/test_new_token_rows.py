"""Rows for new tokens go to PEFT and come back; rows that an adapter of MLX cannot hold are refused by name.

tests/oracle/test_new_tokens.py does the same with PEFT itself, live.
"""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from checkpoint_copies import rewrite, rewritten
from deltatune.cli import main
from deltatune.export.new_token_rows import OPTION
from deltatune.export.peft_adapter import PEFT_CONFIG, PEFT_WEIGHTS
from deltatune.lora import load_adapters
from deltatune.models.load import load_model
from saved_adapters import adapted

FIRST, NEW = 320, 3
TOKENS = mx.array([[5, FIRST, 7, FIRST + 2, 9]])
TABLE = "base_model.model.model.language_model.embed_tokens"
ROWS = f"{TABLE}.token_adapter.trainable_tokens_delta"


def grown(base: Path, folder: Path) -> nn.Module:
    """Save a random adapter with rows for new tokens in folder/adapter; returns the model."""
    return adapted(base, folder / "adapter", rows=NEW, keys=["*.o_proj"])


def exported(base: Path, folder: Path) -> int:
    words = ["export", "--to", "peft", "--model", str(base), "--adapter-path", str(folder / "adapter")]
    return main([*words, "--save-path", str(folder / "peft")])


def imported(base: Path, folder: Path) -> int:
    return main(["import", "--model", str(base), "--peft", str(folder / "peft"), "--save-path", str(folder / "back")])


def changed(folder: Path, tensors: dict[str, mx.array], config: dict) -> None:
    """Write the exported files anew, with changes."""
    with rewritten(folder / "peft" / PEFT_WEIGHTS) as both:
        both.update(tensors)
    rewrite(folder / "peft" / PEFT_CONFIG, **config)


@pytest.mark.parametrize(
    ("family", "tables"), [("qwen3_5", ["embed_tokens"]), ("kimi_linear", ["embed_tokens", "lm_head"])]
)
def test_there_and_back(family, tables, tiny_checkpoint, tmp_path, capsys):
    base = tiny_checkpoint(family)
    model = grown(base, tmp_path)
    assert exported(base, tmp_path) == 0
    said = capsys.readouterr().out
    assert "rows for 3 new tokens: call model.resize_token_embeddings(323)" in said
    config = json.loads((tmp_path / "peft" / PEFT_CONFIG).read_text())
    assert config[OPTION] == {key: [320, 321, 322] for key in tables}
    assert imported(base, tmp_path) == 0
    assert "3 new tokens" in capsys.readouterr().out
    back, _ = load_model(base)
    load_adapters(back, tmp_path / "back")
    assert mx.array_equal(back(TOKENS), model(TOKENS))


@pytest.fixture
def export(tiny_checkpoint, tmp_path):
    """(base, folder with an export, the model) of a model with a head tied to its embedding."""
    base = tiny_checkpoint("qwen3_5")
    model = grown(base, tmp_path)
    assert exported(base, tmp_path) == 0
    return base, tmp_path, model


def test_tables_that_peft_saves_beside_new_rows_are_ignored(export):
    """Indices in another order or as a list, the rows of a tied head, and whole tables, as PEFT saves them."""
    base, folder, model = export
    rows = model.language_model.model.embed_tokens.new_rows
    table = mx.concatenate([load_model(base)[0].language_model.model.embed_tokens.weight, rows])
    shuffled = rows[mx.array([2, 0, 1])]
    more = {ROWS: shuffled, ROWS.replace(TABLE, "base_model.model.lm_head"): shuffled}
    more |= {f"{TABLE}.token_adapter.base_layer.weight": table, "base_model.model.lm_head.weight": table}
    changed(folder, more, {OPTION: [322, 320, 321]})
    assert imported(base, folder) == 0
    back, _ = load_model(base)
    load_adapters(back, folder / "back")
    assert mx.array_equal(back(TOKENS), model(TOKENS))


@pytest.mark.bad_input(
    "import: rows of old tokens, of one of two tables, of another width, beside LoRA, without a place"
)
def test_peft_rows_that_mlx_cannot_hold_are_refused(export, tiny_checkpoint, capsys):
    base, folder, _ = export
    rows, width = mx.load(str(folder / "peft" / PEFT_WEIGHTS))[ROWS], 64
    head = ROWS.replace(TABLE, "base_model.model.lm_head")
    whole = f"{TABLE}.token_adapter.base_layer.weight"
    low_rank = {f"{TABLE}.lora_embedding_A": mx.ones((2, 320)), f"{TABLE}.lora_embedding_B": mx.ones((width, 2))}
    low_rank |= {"base_model.model.lm_head.lora_A.weight": mx.ones((2, width))}
    low_rank |= {"base_model.model.lm_head.lora_B.weight": mx.ones((320, 2))}
    for tensors, indices, said in (
        ({}, [5, 320, 321], "whose indices start at 320 here"),
        ({}, {"other": [320, 321, 322]}, "embed_tokens is []"),
        ({ROWS: mx.ones((3, 5))}, [320, 321, 322], "have 5 columns, the model's 64"),
        ({head: rows + 1}, [320, 321, 322], "other new rows for each"),
        ({head: rows, whole: mx.ones((323, width))}, [320, 321, 322], f"the old rows of {whole} are not the model's"),
        ({whole: low_rank[f"{TABLE}.lora_embedding_A"]}, [320, 321, 322], "are not the model's"),
    ):
        kept = {name: (folder / "peft" / name).read_bytes() for name in (PEFT_CONFIG, PEFT_WEIGHTS)}
        changed(folder, tensors, {OPTION: indices})
        assert imported(base, folder) == 2
        assert said in capsys.readouterr().err
        for name, content in kept.items():
            (folder / "peft" / name).write_bytes(content)
    changed(folder, low_rank, {})
    assert imported(base, folder) == 2
    assert "has new rows and a low-rank update" in capsys.readouterr().err
    untied = tiny_checkpoint("kimi_linear")
    assert imported(untied, folder) == 2
    assert "has new rows of embed_tokens; expected embed_tokens and lm_head" in capsys.readouterr().err
