"""Prints the tokens of a batch as text and marks those that count in the loss, for `train --show-batch`."""

from __future__ import annotations

import unicodedata
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from .batch import Batch

COUNTED = "bold green"
MASKED = "dim"
SPECIAL = "bold magenta"
OPEN = "⟦"
CLOSE = "⟧"


def show_batch(batch: Batch, tokenizer: Any, console: Console | None = None) -> None:
    """Print the source, the token counts and the text of every document of a batch, by default to standard output.

    Text that counts in the loss is marked by colour where the terminal has colours, and by ⟦ ⟧ elsewhere. Special
    tokens are written out, and control characters are escaped, so that nothing in the data reaches the terminal as a
    command.
    """
    console = console or Console()
    # A dumb terminal has no styles at all.
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    rows, width = batch.inputs.shape
    mark = "is green, end tokens underlined" if coloured else f"stands in {OPEN} {CLOSE}"
    head = f"First batch: {rows} row{'s' * (rows > 1)} of {width:,} positions. What counts in the loss {mark}."
    console.print(Text(head, style="bold"))
    for row, (sources, sizes) in enumerate(zip(batch.sources, batch.positions, strict=True)):
        start = 0
        if not sources:
            console.print(Text(f"row {row + 1}: blank (weight 0)"))
        for source, size in zip(sources, sizes, strict=True):
            end = start + size
            tokens = [int(batch.inputs[row, start]), *batch.targets[row, start:end].tolist()]
            counts = [False, *(batch.weights[row, start:end] > 0).tolist()]
            head = f"row {row + 1}: {printable(source)}: {size + 1:,} tokens, {sum(counts):,} count in the loss"
            console.print(Text(head, style="bold"), soft_wrap=True)
            console.print(_marked(tokens, counts, tokenizer, coloured), soft_wrap=True)
            start = end


def _marked(tokens: list[int], counts: list[bool], tokenizer: Any, coloured: bool) -> Text:
    """Return marked text; each run of like tokens is decoded whole, since a character may take several."""
    marked = Text()
    special = set(tokenizer.all_special_ids)
    keys = [(counted, token in special) for token, counted in zip(tokens, counts, strict=True)]
    for (counted, is_special), group in groupby(zip(keys, tokens, strict=True), key=lambda pair: pair[0]):
        text = printable(tokenizer.decode([token for _, token in group], skip_special_tokens=False))
        if not coloured:
            marked.append(f"{OPEN}{text}{CLOSE}" if counted else text)
        elif is_special:
            marked.append(text, style=SPECIAL + " underline" * counted)
        else:
            marked.append(text, style=COUNTED if counted else MASKED)
    return marked


def printable(text: str) -> str:
    r"""Escape control and format characters (categories Cc, Cf, Cs, Co, Zl and Zp); "\n" also starts a new line."""
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if character == "\n":
        return "\\n\n"
    if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}:
        return character.encode("unicode_escape").decode("ascii")
    return character
