"""Formats the results of all types as the table of docs/reference/families.md, and compares them with known.json."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packages import MLX_LM, MLX_VLM, package_of

# The columns of the table, and the results that each of them stands for.
COLUMNS = {
    "LoRA": ("lora",),
    "full": ("full",),
    "4 bits": ("4 bits",),
    "checkpoints": ("checkpoints", "long rows"),
    "packing": ("packed fp32", "packed bf16"),
    "resume": ("resumed",),
    "merge": ("merged",),
    "images": ("images",),
}
# Types without a tower that deltatune trains have no result here.
_OPTIONAL = "images"
RESULTS = [name for names in COLUMNS.values() for name in names]
# The result of what needs a run with LoRA where there was none.
NO_RUN = "no run with LoRA"
# What did not work when the page was last written, by type and result.
KNOWN = Path(__file__).with_name("known.json")
_BEGIN, _END = "<!-- made by scripts/families -->\n", "\n<!-- end -->"


def word(value: Any) -> str:
    """Return "yes", "refused", "wrong" or "fails" for a result."""
    if not isinstance(value, str):
        return "yes" if value is not False and value is not None else "wrong"
    return next((name for name in ("refused", "wrong") if value.startswith(name)), "fails")


def found(result: dict[str, Any]) -> dict[str, str]:
    """Return the word for each result of a type; "fails" for all of one that could not be made."""
    names = [name for name in RESULTS if name != _OPTIONAL or name in result]
    if "made" in result:
        return dict.fromkeys(names, "fails")
    # What needs a run with LoRA is as that run is.
    return {name: word(result["lora" if result.get(name) == NO_RUN else name]) for name in names}


def line(result: dict[str, Any]) -> str:
    """Return a line on a type, for the screen."""
    words = found(result)
    bad = {name: str(result.get("made", result.get(name))) for name in words if words[name] != "yes"}
    return f"{result['type']}: " + ("; ".join(f"{name}: {text[:160]}" for name, text in bad.items()) or "all")


def worse(results: list[dict[str, Any]]) -> list[str]:
    """Return a sentence on each result that worked when known.json was written and does not now."""
    known = json.loads(KNOWN.read_text())
    sentences = []
    for result in results:
        for name, now in found(result).items():
            if now != "yes" and known.get(result["type"], {}).get(name) != now:
                text = result.get("made", result.get(name))
                sentences.append(f"{result['type']}, {name}: {text}")
    return sentences


def remember(results: list[dict[str, Any]]) -> None:
    """Write known.json from results, with what does not work alone."""
    known = {
        result["type"]: bad
        for result in results
        if (bad := {name: now for name, now in found(result).items() if now != "yes"})
    }
    KNOWN.write_text(json.dumps(known, indent=1) + "\n")


def write(page: Path, results: list[dict[str, Any]]) -> None:
    """Put the tables of the packages' types into the page, between its two marks."""
    before, _, rest = page.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    tables = []
    for package, rows in ((MLX_LM, table), (MLX_VLM, counts)):
        own = [result for result in results if package_of(result["type"]) is package]
        tables.append("\n".join([_head(package.name, own), "", *rows(own)]))
    page.write_text(before + _BEGIN + "\n\n".join(tables) + _END + after)


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table with a row for all types that have the same results."""
    groups: dict[tuple[str, ...], list[str]] = {}
    columns = {column: names for column, names in COLUMNS.items() if column != _OPTIONAL}
    for result in results:
        words = found(result)
        groups.setdefault(tuple(_joined([words[name] for name in names]) for names in columns.values()), []).append(
            result["type"]
        )
    rows = [_row(["model types", *columns]), "|---" * (len(columns) + 1) + "|"]
    for number, (cells, kinds) in enumerate(sorted(groups.items(), key=lambda group: -len(group[1]))):
        # The docs have a limit of words: the largest group is those that no other row names.
        names = ", ".join(kinds) if number else f"the {len(kinds)} others"
        rows.append(_row([names, *cells]))
    return rows


def counts(results: list[dict[str, Any]]) -> list[str]:
    """Return a line that says how many types have which result; known.json names them."""
    answers = ("yes", "refused", "fails", "wrong")
    each = list(map(found, results))
    columns = []
    for column, names in COLUMNS.items():
        words = [_worst([words[name] for name in names if name in words]) for words in each]
        columns.append(f"{column} {'/'.join(str(words.count(answer)) for answer in answers)}")
    return [textwrap.fill(f"Types by {'/'.join(answers)}: {', '.join(columns)}.", 118)]


def _worst(words: list[str]) -> str:
    return next((word for word in ("wrong", "fails", "refused", "yes") if word in words), "")


def _head(package: str, results: list[dict[str, Any]]) -> str:
    text = (
        f"`make families`, {date.today().isoformat()}, mlx {version('mlx')}, {package} {version(package)}, "
        f"{platform.system()} {platform.machine()}, CPU: {len(results)} model types, gradients within "
        f"{_largest(results):.0e}."
    )
    return textwrap.fill(text, 118)


def _largest(results: list[dict[str, Any]]) -> float:
    names = ("full", "checkpoints", "long rows", "packed fp32", "4 bits", "images")
    found = [value for result in results for name in names if isinstance(value := result.get(name), float)]
    return max(found, default=0.0)


def _joined(words: list[str]) -> str:
    return words[0] if len(set(words)) == 1 else ", ".join(dict.fromkeys(words))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
