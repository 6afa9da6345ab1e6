"""Makes tables of the documentation, such as that of the options, from the code when the site is built.

MkDocs calls `on_page_markdown` for every page (`hooks` in mkdocs.yml). A line `<!-- made here: NAME -->` in a page is
replaced by what `PARTS[NAME]` returns. `on_page_content` and `on_post_page` prepare the page for narrow screens,
keyboards and screen readers.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

from deltatune.cli import parser
from deltatune.commands.flags import flag_name, option_fields
from deltatune.options.config import LoraConfig

MARKER = re.compile(r"^<!-- made here: (\w+) -->$", re.MULTILINE)
_CODE = re.compile(r"<code>[^<]*</code>")
_TABLE = re.compile("<table>.*?</table>", re.DOTALL)
#: The pages for those who change deltatune.
DEVELOPERS = ("decisions/", "reference/checks.md", "how/code.md", "how/trace.md", "how/kernels.md", "how/patches.md")
_FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def options() -> str:
    """A table of options for each group of TrainConfig, in the order of the dataclass, with those of the adapters."""
    groups: dict[str, list[str]] = {}
    adapters = {field.name for field in dataclasses.fields(LoraConfig)}
    for field in option_fields():
        flag = field.metadata["flag"]
        about = field.metadata["help"] + ("" if flag is True else f". The flag is `{flag}`" if flag else ". YAML only")
        about += ". In YAML under `lora_parameters`" if field.name in adapters else ""
        row = f"| `{field.name}` | {_default(field)} | {_values(field)} | {_cell(about)}. |"
        groups.setdefault(field.metadata["group"], []).append(row)
    head = "| option | default | values | meaning |\n|---|---|---|---|\n"
    return "\n\n".join(f"## {_title(group)}\n\n{head}" + "\n".join(rows) for group, rows in groups.items())


def flags() -> str:
    """The flags of every command but train and plan, whose flags are the options."""
    parts = []
    for name, command in commands().items():
        rows = [_flag(action) for action in command._actions if not isinstance(action, argparse._HelpAction)]
        if name in ("train", "plan"):
            rows = [row for row in rows if row is not None and not _is_option(row)]
        text = "\n".join(row for row in rows if row is not None)
        if text:
            parts.append(f"### deltatune {name}\n\n| flag | meaning |\n|---|---|\n{text}")
    return "\n\n".join(parts)


PARTS: dict[str, Callable[[], str]] = {"options": options, "flags": flags}


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    for action in parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise LookupError("the command line has no commands")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace every marker of a page, and keep the pages for developers out of the readers' search."""
    if page.file.src_uri.startswith(DEVELOPERS):
        page.meta["search"] = {"exclude": True}
    return MARKER.sub(lambda match: PARTS[match[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark the flags within code, and name the column in each cell.

    docs/extra.css keeps a flag whole, since browsers end a line behind any hyphen, and lays the cells of a row one
    below the other where a table of three columns or more finds no room.
    """
    html = _CODE.sub(lambda code: _FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)
    return _TABLE.sub(lambda table: _with_names(table[0]), html).replace("<th></th>", "<td></td>")


def on_post_page(output: str, **_: Any) -> str:
    """Give the dialog of the search its name, which the theme leaves out."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def _with_names(table: str) -> str:
    """Return a table of three columns or more with the name of its column in each cell, any other as it is."""
    names = [re.sub("<[^>]*>", "", name) for name in re.findall("<th[^>]*>(.*?)</th>", table, re.DOTALL)]
    if len(names) < 3:
        return table
    columns = itertools.cycle(names)
    table = re.sub(r"<td(?=[ >])", lambda _: f'<td data-name="{next(columns)}"', table)
    return table.replace("<table>", "<table data-wide>")


def _title(group: str) -> str:
    return group[0].upper() + group[1:]


def _values(field: dataclasses.Field) -> str:
    words = field.metadata["choices"] or field.metadata["words"]
    return ", ".join(f"`{word}`" for word in words) or str(field.metadata["range"] or "")


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return {"lora_parameters": "see below", "exclude": "none"}.get(field.name, "`{}`")
    if field.default is None:
        return "none"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return f"`{field.default}`"


def _flag(action: argparse.Action) -> str | None:
    name = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar or action.dest}`"
    if action.nargs == argparse.REMAINDER:
        return None
    return f"| {name} | {_cell((action.help or '').replace('%%', '%'))} |"


def _is_option(row: str) -> bool:
    names = {flag_name(field.name, field.metadata) for field in option_fields()}
    found = re.search(r"`--(?:no-)?([\w-]+)`", row)
    return found is not None and f"--{found[1]}" in names


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
