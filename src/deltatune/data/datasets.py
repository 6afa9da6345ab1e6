"""Loads the examples of a run: chooses the tables that its options name, reads them, and checks their content."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from ssl import SSLError
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

import numpy as np

from ..errors import UserError, reason
from ..machine.environment import expanded
from ..options.conditions import TRAINING, Facts, changed_options, refuse_unread
from ..options.config import DataInMemory, TrainConfig
from ..options.values import THINKING, agreeing, nearest, refuse_address, unknown_names, written_options
from .batches.batch import pack, row_capacity
from .batches.stream_order import ExampleStream, StreamedSplits
from .chats.answers import note_on_ends
from .example import Example, Splits
from .preferences.preference import Preference, completed
from .preferences.preference_rows import CHOSEN, LABEL, messages_of
from .prompts import PromptExample, PromptWriter, messages_to_answer, prompt_example
from .reader import LAST_TURN, Reader, media_placer
from .rows.row_formats import ALPACA, CAPTION, CHAT, COMPLETION, SHAREGPT, TEXT, Features, RowFormats
from .rows.sources import (
    DataTable,
    JsonLines,
    hugging_face,
    in_memory,
    is_format,
    is_saved_dataset,
    json_file,
)
from .text import MediaPlacer
from .vision.media import VisionProcessors
from .vision.messages import VIDEO, media_kind

# More rows than any stream has.
_MOST_ROWS = sys.maxsize
#: The rows of a stream that are read, shuffled and packed at a time.
SHUFFLED_ROWS = 1000
# Seconds to wait for the first answer of the Hugging Face hub.
_PATIENCE = 10.0
# The share of training rows to validate on where nothing else is, and the fewest rows of which some are taken.
_VAL_SPLIT = 0.1
_LEAST_ROWS = 20
_SPLITS = {"train": ("train",), "valid": ("valid", "validation"), "test": ("test",)}
_HF_KEYS = [
    "path", "name", "config", "train_split", "valid_split", "test_split",
    "prompt_feature", "completion_feature", "chat_feature", "text_feature",
]  # fmt: skip
_DATA_FILES = ("*.parquet", "*.arrow", "*.csv", "*.tsv", "*.jsonl", "*.jsonl.gz")


def first_image(config: TrainConfig) -> str | None:
    """Return the source (file and line) of the first image or video in the data, or None if it is text alone.

    Data that is streamed has none: a row with an image is refused when it is read.
    """
    if config.streaming:
        return None
    for parts in _tables(config, _needed_splits(config)).values():
        for table, features in parts:
            formats = RowFormats(features)
            for source, row in table.candidates():
                messages: Any = []
                if config.has_preferences:
                    messages = messages_of(row)
                elif config.loss != "grpo":
                    messages = formats.messages(row, source) or []
                elif asked := messages_to_answer(row, source, features):
                    messages = asked[0]
                if kind := media_kind(row, messages):
                    return f"{source}, in a video" if kind == VIDEO else source
    return None


def load_datasets(config: TrainConfig, tokenizer: Any, processors: VisionProcessors | None = None) -> Splits:
    """Load and tokenise the splits that a run needs: train and valid for training, test for testing.

    The data comes from `hf_dataset` if it is set (with mlx_lm.lora's keys), else from `data`: a folder with
    train.jsonl, valid.jsonl and test.jsonl, a folder of a Hugging Face data set, or a name on the hub. Every row is
    tokenised and every image opened here, so that lengths are known and a bad line is named before the first step.

    Args:
        config: The options of the run.
        tokenizer: mlx-lm's TokenizerWrapper.
        processors: The processors of a model with a vision tower, or None for a text model.

    Raises:
        UserError: The data or an option has a mistake that the user can correct.

    Example:
        >>> splits = load_datasets(TrainConfig(data="my-data"), tokenizer)
        >>> len(splits.train), splits.rule
    """
    if config.streaming:
        return _load_streamed(config, tokenizer)
    needed = _needed_splits(config)
    if processors is not None and config.pack:
        raise UserError("pack: rows with images are not packed; train this model without --pack.")
    tables = _tables(config, needed)
    if config.loss == "grpo":
        if not config.train:
            raise UserError("loss: grpo has rewards in the place of a loss on a test set; leave it out here.")
        return _load_prompts(config, tokenizer, tables, processors)
    reader = Reader(config, tokenizer, processors)
    splits: dict[str, Any] = {
        name: [example for part in tables[name] for example in reader.read(*part)] for name in needed
    }
    _hold_out(config, splits, tables, reader.notes)
    if config.has_preferences:
        splits = {name: completed(read, config, reader.notes) for name, read in splits.items()}
    _check(config, splits, tables, reader.notes)
    facts = Facts(pictures=processors is not None, turns=reader.kinds != {TEXT})
    about = _about(config, tokenizer, reader)
    if config.train:
        refuse_unread(TRAINING, changed_options(config), config, facts)
    return Splits(**splits, **about, facts=facts)


def _load_prompts(
    config: TrainConfig, tokenizer: Any, tables: dict[str, list[Part]], processors: VisionProcessors | None
) -> Splits:
    """Read the prompts of a run that samples its answers; those too long for an answer are refused or left out."""
    pictures = processors is not None
    refuse_unread(TRAINING, changed_options(config), config, Facts(pictures=pictures))
    notes: list[str] = []
    placer = media_placer(config, tokenizer, processors)
    splits: dict[str, Any] = {name: _prompts(config, tokenizer, parts, notes, placer) for name, parts in tables.items()}
    # Without val_split, all prompts are trained on: an evaluation samples answers, which takes time.
    if config.val_split:
        _hold_out(config, splits, tables, notes)
    _check(config, splits, tables, notes)
    rule = f"Loss on {config.num_generations} sampled answers to each prompt"
    facts = Facts(pictures=pictures, turns=not all(prompt.plain for prompt in splits["train"]))
    return Splits(**splits, rule=rule, notes=notes, facts=facts, template_options=config.chat_template_config)


def _prompts(
    config: TrainConfig, tokenizer: Any, parts: list[Part], notes: list[str], placer: MediaPlacer | None
) -> list[PromptExample]:
    """Read the prompts of a split."""
    room = config.max_seq_length - config.max_completion_length
    read: list[PromptExample] = []
    for table, features in parts:
        writer = PromptWriter(tokenizer, config.chat_template_config)
        read += [prompt_example(row, source, features, writer, config, placer) for source, row in table.rows()]
        notes += writer.notes(table.name)
    prompts = [prompt for prompt in read if len(prompt.tokens) <= room]
    if left_out := len(read) - len(prompts):
        longest = max(read, key=lambda prompt: len(prompt.tokens))
        message = (
            f"{longest.source}: the prompt takes {len(longest.tokens):,} tokens, and max_seq_length "
            f"{config.max_seq_length:,} leaves {room:,} before an answer of max_completion_length "
            f"{config.max_completion_length:,}"
        )
        if config.overlong != "skip":
            raise UserError(f"{message}; raise max_seq_length, or leave such prompts out with --overlong skip.")
        notes.append(f"{message}: {left_out:,} of {len(read):,} prompts {agreeing(left_out, 'were')} left out.")
    return prompts


def _load_streamed(config: TrainConfig, tokenizer: Any) -> StreamedSplits | Splits:
    """Open the training data as a stream, and read no more of the other splits than is evaluated."""
    batches = {"valid": config.val_batches, "test": config.test_batches}
    needed = [name for name in _needed_splits(config) if batches.get(name) != 0]
    tables = _tables(config, needed)
    reader = Reader(config, tokenizer)
    splits: dict[str, Any] = {}
    for name in (name for name in needed if name in batches):
        rows = _MOST_ROWS if batches[name] == -1 else batches[name] * config.batch_size
        parts = [(source.read(None, rows)[0], source.name, features) for source, features in tables[name]]
        splits[name] = [example for part in parts for example in _read_rows(reader, *part)]
    if "train" not in needed:
        _check(config, splits, tables, reader.notes)
        return Splits(**splits, rule=_rule(reader.kinds, config), notes=reader.notes)
    if len(tables["train"]) > 1:
        raise UserError(f"streaming: one data set can be read, and hf_dataset names {len(tables['train'])}; give one.")
    if not tables["train"]:
        _check(config, splits | {"train": []}, tables, reader.notes)
    source, features = tables["train"][0]
    size = -(-SHUFFLED_ROWS // config.batch_size) * config.batch_size
    first = ExampleStream(source, partial(_read_rows, reader, features=features), size).window(None)

    def encode(rows: list[tuple[str, Any]], name: str) -> list[Any]:
        # The notes of a reader on rows that are streamed during training are dropped.
        return _read_rows(Reader(config, tokenizer), rows, name, features)

    stream = ExampleStream(source, encode, size)
    splits["train"] = first.examples
    _check(config, splits, tables, reader.notes)
    # Later rows may be of other formats, but none has pictures.
    facts = Facts(pictures=False, turns=reader.kinds != {TEXT})
    refuse_unread(TRAINING, changed_options(config), config, Facts(pictures=False))
    return StreamedSplits(**splits, **_about(config, tokenizer, reader), facts=facts, stream=stream, first=first)


def _about(config: TrainConfig, tokenizer: Any, reader: Reader) -> dict[str, Any]:
    """Return the rule, the notes and the template's variables of splits, with which samples and `generate` ask.

    enable_thinking is that of the prompts before most answers; a note tells of answers behind other prompts.
    """
    options = config.chat_template_config
    thinking = (options or {}).get(THINKING, tokenizer.has_thinking)
    notes = note_on_ends(tokenizer) if reader.prompts else []
    if others := reader.prompts[not thinking]:
        flag = written_options({THINKING: not thinking})
        as_asked, as_learnt = (json.dumps(value) for value in (thinking, not thinking))
        if reader.prompts[thinking] or THINKING in (options or {}):
            asked = (
                f"{others:,} of {reader.prompts.total():,} answers {agreeing(others, 'follow')} the prompt with "
                f"{THINKING} {as_learnt}; samples and `deltatune generate` ask with {as_asked}. {flag} asks as those "
                "answers were learnt."
            )
        else:
            options = {**(options or {}), THINKING: not thinking}
            asked = (
                f"The answers follow the prompt with {THINKING} {as_learnt}, so samples and `deltatune generate` ask "
                f"with it, as {flag} does elsewhere."
            )
        notes = [asked, *notes]
    if config.train:
        reader.notes += notes
    return {"rule": _rule(reader.kinds, config), "notes": reader.notes, "template_options": options}


def _read_rows(reader: Reader, rows: list[tuple[str, Any]], name: str, features: Features) -> list[Any]:
    return reader.read(DataTable(name, len(rows), lambda: iter(rows)), features)


Part = tuple[Any, Features]


def _needed_splits(config: TrainConfig) -> list[str]:
    return (["train", "valid"] if config.train else []) + (["test"] if config.test else [])


def _tables(config: TrainConfig, needed: list[str]) -> dict[str, list[Part]]:
    """Return the tables, or with `streaming` the streams, of each needed split, with the keys of their rows."""
    if config.hf_dataset:
        return _hf_tables(config, needed)
    if config.data is None:
        raise UserError("data: expected a file, a folder with train.jsonl, or the name of a Hugging Face data set.")
    if isinstance(config.data, DataInMemory):
        if config.streaming:
            raise UserError("streaming reads rows from files, and these are in memory; leave streaming out.")
        if unknown := [name for name in config.data.splits if not any(name in names for names in _SPLITS.values())]:
            raise UserError(f"data: expected a list of rows, or lists under train, valid and test, got {unknown[0]!r}.")
        tables: dict[str, Any] = {name: in_memory(label, rows) for name, (label, rows) in config.data.splits.items()}
    else:
        tables = _stored(config.data, needed, streaming=config.streaming)
    features = Features.of(vars(config))
    return {name: [(tables[alias], features) for alias in _SPLITS[name] if alias in tables][:1] for name in needed}


def _stored(data: str, needed: list[str], *, streaming: bool) -> dict[str, Any]:
    """Return the tables of a file, a folder or a data set on the hub, by the names of their splits.

    A file holds the training data, or the data of a command that needs no other split.
    """
    refuse_address(data, data)
    folder = expanded(data)
    if folder.is_file():
        if "train" in needed and "test" in needed:
            raise UserError(f"{data}: test needs a test set, and a file holds one set; give a folder with both.")
        return {needed[0]: _file_table(folder, data, streaming=streaming)}
    files = {name: file for name in _SPLITS if (file := _file_of(folder, name))}
    if files:
        return {name: _file_table(file, data, streaming=streaming) for name, file in files.items() if name in needed}
    if folder.is_dir() and folder.resolve() == folder.resolve().parent:
        raise UserError(f"{data}: expected a file or the folder of the data, and this is the root of all folders.")
    if folder.is_dir() and not is_saved_dataset(folder) and not any(any(folder.rglob(kind)) for kind in _DATA_FILES):
        raise UserError(f"{data}: no train.jsonl in this folder, and no Parquet, Arrow or CSV files; put one there.")
    if not folder.is_dir() and (data.startswith((".", "/", "~")) or data.count("/") > 1 or "\\" in data):
        slashes = " A path has / here, not \\." if "\\" in data else ""
        raise UserError(f"{data}: no such file or folder, and no name of a Hugging Face data set.{slashes}")
    with contextlib.nullcontext() if folder.is_dir() or is_format(data) else hub_lookup(data):
        return hugging_face(data, streaming=streaming)


@contextlib.contextmanager
def hub_lookup(name: str) -> Iterator[None]:
    """Open the data set `name` inside the `with` block: from the hub if it answers, else from its cache alone.

    The datasets library by itself tries an unreachable hub for half a minute, as often as for a mistyped folder.
    """
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not _answers(name)
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


@cache
def _answers(name: str) -> bool:
    """Say that the hub is asked for `name`, once a process, and return whether it answers."""
    import datasets

    folders: list[str] = []
    # A current folder that may not be listed has no name to offer.
    with contextlib.suppress(OSError):
        folders = [entry.name for entry in Path().iterdir() if entry.is_dir()]
    sys.stderr.write(
        f"--data {name}: there is no such folder here{nearest(name, folders)}; asking the Hugging Face hub for a data "
        "set of this name.\n"
    )
    url = f"{datasets.config.HF_ENDPOINT}/api/datasets/{quote(name)}"
    try:
        urlopen(Request(url, method="HEAD"), timeout=_PATIENCE).close()
    except HTTPError:
        # The hub does not know the name, or does not show it to everybody; the datasets library finds out which.
        return True
    except OSError as error:
        if isinstance(error, URLError) and isinstance(error.reason, SSLError):
            return True  # Python may lack certificates that the library has.
        sys.stderr.write(
            f"The hub cannot be reached ({reason(error)}), so only its cache on this machine is searched.\n"
        )
        return False
    return True


def _file_table(file: Path, name: str, *, streaming: bool) -> Any:
    """Return the table of a file; `name` is the file's as the user gave it."""
    if file.suffix in (".jsonl", ".json"):
        if not streaming:
            return json_file(file)
        if file.suffix == ".json":
            raise UserError(f"{file}: streaming reads JSONL; write one object a line into {file.stem}.jsonl.")
        return JsonLines(file)
    if not any(file.match(kind) for kind in _DATA_FILES):
        raise UserError(f"{name}: expected a .jsonl, .json, .csv, .tsv or .parquet file, or a folder with some.")
    (table,) = hugging_face(str(file), streaming=streaming).values()
    return table


def _file_of(folder: Path, split: str) -> Path | None:
    files = [path for kind in ("jsonl", "json") if (path := folder / f"{split}.{kind}").exists()]
    if len(files) > 1:
        raise UserError(f"{folder}: both {files[0].name} and {files[1].name} hold the {split} split; keep one of them.")
    return files[0] if files else None


def _hf_tables(config: TrainConfig, needed: list[str]) -> dict[str, list[Part]]:
    tables: dict[str, list[Part]] = {name: [] for name in needed}
    entries = config.hf_dataset if isinstance(config.hf_dataset, list) else [config.hf_dataset]
    for number, entry in enumerate(entries, 1):
        where = f"hf_dataset {number}" if len(entries) > 1 else "hf_dataset"
        if not isinstance(entry, dict):
            raise UserError(f"{where}: expected keys such as path and text_feature, got {entry!r}.")
        if unknown := unknown_names(entry, _HF_KEYS, where):
            raise UserError("\n".join(unknown))
        for key in entry:
            if key != "config" and not isinstance(entry[key], str):
                raise UserError(f"{where}: {key}: expected a string, got {entry[key]!r}.")
        if ("path" in entry) == ("name" in entry):
            raise UserError(f"{where}: expected path, the data set's name; a subset's name goes under config.")
        path, options = entry.get("path") or entry["name"], entry.get("config") or {}
        if not isinstance(options, dict):
            raise UserError(f"{where}: config: expected a mapping of options of load_dataset, got {options!r}.")
        splits = {"train": "train[:80%]", "valid": "train[-10%:]"}
        for name in needed:
            split = entry.get(f"{name}_split", splits.get(name))
            if split is None:
                raise UserError(f"{where}: {name}_split is needed to {name}; give the name of a split of {path}.")
            features = Features.of(vars(config) | entry)
            opened = hugging_face(path, split, options, streaming=config.streaming)
            tables[name] += [(table, features) for table in opened.values()]
    return tables


def _hold_out(
    config: TrainConfig, splits: dict[str, list[Example | Preference]], tables: dict[str, list[Part]], notes: list[str]
) -> None:
    """Move the share `val_split` of the training rows into the validation set, drawn by the run's seed.

    By default rows are held out where the data have no validation set, but enough rows.
    """
    if "train" not in splits:
        return
    if config.val_split and tables["valid"]:
        raise UserError(f"val_split: {tables['valid'][0][0].name} holds validation data already; leave val_split out.")
    share = _VAL_SPLIT if config.val_split is None else config.val_split
    if not share or tables["valid"] or config.val_batches == 0:
        return
    # A conversation may make several examples.
    examples = [(example.documents[0].row, example) for example in splits["train"]]
    rows = list(dict.fromkeys(row for row, _ in examples))
    count = max(round(share * len(rows)), 1)
    if config.val_split is None and len(rows) < max(_LEAST_ROWS, config.batch_size + count):
        return
    drawn = np.random.default_rng(config.seed).permutation(len(rows))[:count]
    held_out = {rows[index] for index in drawn}
    splits["train"] = [example for row, example in examples if row not in held_out]
    splits["valid"] = [example for row, example in examples if row in held_out]
    notes.append(
        f"Validation: {count:,} of {len(rows):,} training rows, drawn by the seed, {agreeing(count, 'are')} held out, "
        "since the data have no validation set; --val-split 0 trains on all."
    )


def _check(
    config: TrainConfig, splits: dict[str, list[Example | Preference]], tables: dict[str, list[Part]], notes: list[str]
) -> None:
    """Refuse splits without examples and training data without a full batch; note a missing validation set."""
    for name in (name for name, examples in splits.items() if not examples):
        names = ", ".join(table.name for table, _ in tables[name])
        if name == "valid":
            why = f"{names}: no example left to validate on" if names else "No validation set"
            notes.append(f"{why}: training goes on without validation.")
        elif names:
            raise UserError(f"{names}: no example left to {name} on; expected at least one.")
        else:
            folder = Path(config.data or "")
            where = folder / f"{name}.jsonl" if folder.is_dir() else f"{config.data}, {name} split"
            file = "" if config.train else "; --data may also name the file to test on"
            raise UserError(f"{where}: no such data; it is needed to {name}{file}.")
    # The rows that are left of a window after its full batches make one that is completed with blank rows.
    if "train" not in splits or config.streaming:
        return
    examples = splits["train"]
    rows = len(examples)
    if config.packs_data:
        rows = len(pack([example.positions for example in examples], row_capacity(config)))
        if rows < config.batch_size:
            notes.append(
                f"Training data: {rows:,} packed {agreeing(rows, 'rows')} of {row_capacity(config):,} positions, fewer "
                f"than batch_size {config.batch_size}, so blank rows complete every batch; a batch_size of {rows} "
                "takes less memory."
            )
    elif rows < config.batch_size:
        raise UserError(
            f"training data: {rows} {agreeing(rows, 'examples')}, fewer than batch_size {config.batch_size} (rows over "
            f"all workers); give more data or batch_size {rows} or less."
        )


def _rule(kinds: set[str], config: TrainConfig) -> str:
    if config.mask_prompt is False and kinds - {TEXT}:
        return "Loss on every token, prompts included (--no-mask-prompt)."
    turns = "the last assistant turn" if config.chat_turns == LAST_TURN else "every assistant turn"
    parts = {
        "completions only": {COMPLETION, ALPACA, CAPTION},
        f"{turns} only": {CHAT, SHAREGPT},
        "every token of text lines" if len(kinds) > 1 else "every token": {TEXT},
        "the answers of pairs": {CHOSEN},
        "answers with a label": {LABEL},
    }
    if unknown := kinds.difference(*parts.values()):
        raise ValueError(f"the formats {', '.join(sorted(unknown))} lack words on the tokens that count.")
    counted = ", ".join(words for words, of in parts.items() if of & kinds)
    how = "; --no-mask-prompt counts every token" if kinds - {TEXT, CHOSEN, LABEL} else ""
    return f"Loss on {counted}{how}."
