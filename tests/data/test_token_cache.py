"""Tokens are kept between starts: the same examples come back, and any change of their sources makes new ones."""

import os
from dataclasses import replace

import datasets
import numpy as np
import pytest

from deltatune.data import load_datasets, token_cache
from deltatune.data.text import TextEncoder

CHAT = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "an answer", "reasoning_content": "so"},
]
ROWS = [{"messages": CHAT * (number % 3 + 1)} for number in range(6)] + [{"text": "a text"}] * 2


@pytest.fixture
def encoded(monkeypatch):
    """The number of tables that were encoded, as a list of one."""
    calls = [0]
    stream = TextEncoder.stream

    def counting(*arguments):
        calls[0] += 1
        return stream(*arguments)

    monkeypatch.setattr(TextEncoder, "stream", counting)
    return calls


def same(left, right) -> bool:
    """Whether two splits hold the same examples, in the same order and with the same words."""
    assert (left.rule, left.notes) == (right.rule, right.notes)
    for ours, theirs in zip(left.train, right.train, strict=True):
        assert ours.tokens.dtype == theirs.tokens.dtype
        assert ours.targets.dtype == theirs.targets.dtype
        assert (ours.tokens.tolist(), ours.targets.tolist(), ours.source) == (
            theirs.tokens.tolist(), theirs.targets.tolist(), theirs.source,
        )  # fmt: skip
    return True


def test_the_second_start_reads_the_kept_tokens(tokenizers, folder, encoded, tmp_path):
    tokenizer = tokenizers("thinking")
    config = folder(train=ROWS)
    first = load_datasets(config, tokenizer)
    assert encoded == [1]
    assert any("take several rows" in note for note in first.notes)
    assert same(load_datasets(config, tokenizer), first)
    # Lengths are cut when the examples are read, and the folder may have another name.
    assert all(
        len(example.tokens) <= 16 for example in load_datasets(replace(config, max_seq_length=16), tokenizer).train
    )
    assert encoded == [1]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.jsonl").rename(tmp_path / "elsewhere" / "train.jsonl")
    moved = load_datasets(replace(config, data=str(tmp_path / "elsewhere")), tokenizer)
    assert encoded == [1]
    assert [example.source.split("/")[-1] for example in moved.train] == [
        example.source.split("/")[-1] for example in first.train
    ]
    assert all(example.source.startswith(f"{tmp_path}/elsewhere/train.jsonl:") for example in moved.train)


def test_a_change_of_data_options_or_tokenizer_encodes_anew(tokenizers, folder, encoded):
    tokenizer = tokenizers("thinking")
    config = folder(train=ROWS)
    load_datasets(config, tokenizer)
    changes = [replace(config, chat_turns="last"), replace(config, mask_prompt=False), folder(train=ROWS[:-1])]
    for number, changed in enumerate(changes, 2):
        load_datasets(changed, tokenizer)
        assert encoded == [number]
    inner, template = tokenizer._tokenizer, tokenizer.chat_template
    config = folder(train=ROWS)
    try:
        inner.chat_template = template.replace("<think>\n' + m", "<think>\n ' + m")
        changed = load_datasets(config, tokenizer)
        assert encoded == [5]
    finally:
        inner.chat_template = template
    assert not all(
        left.tokens.tolist() == right.tokens.tolist()
        for left, right in zip(changed.train, load_datasets(config, tokenizer).train, strict=True)
    )
    assert encoded == [5]
    load_datasets(config, tokenizers("closing"))
    assert encoded == [6]
    config = folder(train=[{"text": "a text", "other": "another"}])
    for named in (None, "text", "other"):
        load_datasets(replace(config, text_feature=named), tokenizers("closing"))
    assert encoded == [8]


def test_a_template_with_the_date_is_rendered_anew_every_day(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", "{{ strftime_now('%d') }}")
    today = token_cache.encoding_digest(tokenizer)
    assert token_cache.encoding_digest(tokenizer) == today

    class Tomorrow(token_cache.date):
        @classmethod
        def today(cls):
            return token_cache.date(2999, 1, 1)

    monkeypatch.setattr(token_cache, "date", Tomorrow)
    assert token_cache.encoding_digest(tokenizer) != today


def test_a_damaged_file_is_made_anew(tokenizer, folder, encoded, own_cache):
    config = folder(train=ROWS)
    first = load_datasets(config, tokenizer)
    (file,) = (own_cache / "tokens").iterdir()
    content = file.read_bytes()
    random = np.random.default_rng(0)
    damaged = [b"", content[:-1], content[: len(content) // 2], b"PK" + bytes(100)]
    for place in random.integers(0, 8 * len(content), 12).tolist():
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        damaged.append(bytes(flipped))
    for number, wrong in enumerate(damaged):
        file.write_bytes(wrong)
        assert same(load_datasets(config, tokenizer), first), number
    assert encoded == [1 + len(damaged)]
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_no_hindrance(tokenizer, folder, encoded, own_cache):
    own_cache.mkdir()
    (own_cache / "tokens").write_text("not a folder")
    config = folder(train=ROWS)
    assert same(load_datasets(config, tokenizer), load_datasets(config, tokenizer))
    assert encoded == [2]


def test_the_folder_stays_small(tokenizer, folder, encoded, own_cache, monkeypatch):
    load_datasets(folder(train=ROWS[:1]), tokenizer)
    (first,) = (own_cache / "tokens").iterdir()
    os.utime(first, (1, 1))
    monkeypatch.setattr(token_cache, "LARGEST_BYTES", 2 * first.stat().st_size + 500)
    load_datasets(folder(train=ROWS[:2]), tokenizer)
    load_datasets(folder(train=ROWS[:1]), tokenizer)
    assert encoded == [2]
    assert first.stat().st_mtime > 1
    for count in (1, 2, 3):
        load_datasets(folder(train=[{"text": "another text"}] * count), tokenizer)
    kept = list((own_cache / "tokens").iterdir())
    assert sum(file.stat().st_size for file in kept) <= token_cache.LARGEST_BYTES
    monkeypatch.setattr(token_cache, "LARGEST_BYTES", 10)
    load_datasets(folder(train=ROWS[:5]), tokenizer)
    assert sorted((own_cache / "tokens").iterdir()) == sorted(kept)


def test_rows_of_the_datasets_library(tokenizer, folder, encoded, tmp_path):
    config = folder()
    for number, rows in enumerate((ROWS[:4], ROWS[:4], ROWS[:3] + ROWS[4:5]), 1):
        path = tmp_path / f"saved {number}"
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
        load_datasets(replace(config, data=str(path)), tokenizer)
    # The same rows in another folder are the same data.
    assert encoded == [2]


def test_a_tokenizer_in_python_is_known_by_its_files(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(type(tokenizer._tokenizer), "backend_tokenizer", None)
    monkeypatch.setattr(tokenizer._tokenizer, "name_or_path", str(tmp_path))
    before = token_cache.encoding_digest(tokenizer)
    (tmp_path / "tiktoken.model").write_text("a 1")
    assert token_cache.encoding_digest(tokenizer) not in (before, None)
    monkeypatch.setattr(tokenizer._tokenizer, "name_or_path", "some/name")
    assert token_cache.encoding_digest(tokenizer) is None
