"""How the commands read their options: flags made from the fields of TrainConfig, and the YAML file under them."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from ..config import TrainConfig, build, nearest, read_yaml

_SIZES = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}


class Parser(argparse.ArgumentParser):
    """argparse, with the nearest known flag or command in its errors, and no abbreviations."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown and unknown[1].startswith("-"):
            known = [string for action in self._actions for string in action.option_strings]
            message = f"unknown option {unknown[1]}{nearest(unknown[1].split('=')[0], known)}"
        command = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if command:
            known = [word.strip(" '") for word in command[2].split(",")]
            message = message.split(": ", 1)[0] + f": {command[1]!r} is not one of {', '.join(known)}"
            message += nearest(command[1], known)
        sys.stderr.write(f"{self.prog}: {message}\nSee {self.prog} --help.\n")
        raise SystemExit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Python's own sends leftovers of a subcommand to the outer parser, which knows none of its flags.
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            getattr(found, "parser", self).error(f"unrecognized arguments: {' '.join(rest)}")
        return found


def size(text: str) -> int:
    """Bytes from `4GB`, `500MB` or a plain number."""
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text.strip())
    try:
        if match:
            return int(Decimal(match[1]) * _SIZES[match[2].upper()])
    except (InvalidOperation, KeyError):
        pass
    raise argparse.ArgumentTypeError(f"expected a size such as 4GB or 500MB, got {text!r}")


def _add_option(group: Any, field: dataclasses.Field) -> None:
    """The flag of one option. Its own default is None, so that a YAML file can tell what was given."""
    name = "--" + field.name.replace("_", "-")
    default = field.default
    shown = "" if default in (None, False, True, dataclasses.MISSING) else f" (default: {default})"
    text = (field.metadata["help"] + shown).replace("%", "%%")
    kind = str(field.type)
    if field.name == "train":
        group.add_argument(name, action="store_true", default=None, help=text)
    elif kind.startswith("bool"):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        convert: Callable[[str], Any] = {"int": int, "float": float}.get(kind.split(" ")[0], str)
        if field.name == "clear_cache_threshold":
            convert = size
        choices = field.metadata["choices"] or None
        metavar = None if choices else {int: "N", float: "X", size: "SIZE"}.get(convert, "TEXT")
        group.add_argument(name, type=convert, default=None, choices=choices, metavar=metavar, help=text)


def add_options(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """Give `parser` the flags of TrainConfig's fields, those of `names` alone where given, and -c for a YAML file."""
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file with options; flags win over it")
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        if not field.metadata["flag"] or (names is not None and field.name not in names):
            continue
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_option(groups[title], field)


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flag of an adapter that a model may have."""
    parser.add_argument("--adapter-path", metavar="DIR", help="adapter to put on the model (default: none)")


def config_from(arguments: argparse.Namespace) -> TrainConfig:
    """The options of a run: flags first, then the YAML file's, then the defaults."""
    values: dict[str, Any] = {}
    file = getattr(arguments, "config", None)
    if file is not None:
        values = read_yaml(file)
        # mlx_lm.lora's own default file writes null where it means its default.
        values = {key: value for key, value in values.items() if value is not None}
    build(TrainConfig, values, str(file))
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    values |= {key: value for key, value in vars(arguments).items() if key in names and value is not None}
    return build(TrainConfig, values, str(file or "options"))
