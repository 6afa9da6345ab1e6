"""Makes flags from the fields of TrainConfig, and reads a command's options from its flags and a YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from ..config import NO_TYPE_FROM_SCRATCH, TrainConfig, build, nearest, read_yaml
from ..errors import UserError

_SIZES = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and names the nearest known flag or command in its errors."""

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
        # argparse reports a command's unknown flags through the outer parser, which knows none of its flags.
        arguments, rest = self.parse_known_args(args, namespace)
        if rest:
            getattr(arguments, "parser", self).error(f"unrecognized arguments: {' '.join(rest)}")
        return arguments


def size(text: str) -> int:
    """Return the bytes that a text such as `4GB`, `500MB` or a plain number stands for."""
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text.strip())
    try:
        if match:
            return int(Decimal(match[1]) * _SIZES[match[2].upper()])
    except (InvalidOperation, KeyError):
        pass
    raise argparse.ArgumentTypeError(f"expected a size such as 4GB or 500MB, got {text!r}")


def _add_option(group: Any, field: dataclasses.Field) -> None:
    """Add the flag of one option. Its default is None, so that the YAML file decides where it is not given."""
    name = "--" + field.name.replace("_", "-")
    default = field.default
    has_default = not (default is None or default is dataclasses.MISSING or isinstance(default, bool))
    default_text = f" (default: {default})" if has_default else ""
    text = (field.metadata["help"] + default_text).replace("%", "%%")
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
    """Give `parser` the flag -c for a YAML file and the flags of TrainConfig's fields, or of those in `names` alone."""
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file with options; flags override it")
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        if not field.metadata["flag"] or (names is not None and field.name not in names):
            continue
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_option(groups[title], field)


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flag that names an adapter for the model."""
    parser.add_argument("--adapter-path", metavar="DIR", help="adapter to put on the model (default: none)")


def config_from(arguments: argparse.Namespace) -> TrainConfig:
    """Return the options of a run: a flag overrides the YAML file, which overrides the default.

    Raises:
        UserError: the YAML file cannot be read, or an option is unknown, of the wrong type, or excluded by another.
    """
    values: dict[str, Any] = {}
    file = getattr(arguments, "config", None)
    if file is not None:
        values = read_yaml(file)
        # The example file of mlx_lm.lora writes null for an option that keeps its default.
        values = {key: value for key, value in values.items() if value is not None}
    build(TrainConfig, values, str(file))
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    values |= {key: value for key, value in vars(arguments).items() if key in names and value is not None}
    config = build(TrainConfig, values, str(file or "options"))
    # Where nobody chose a type, the default gives way to from_scratch; a choice that it excludes is a mistake.
    if config.from_scratch and values.get("fine_tune_type", "full") != "full":
        raise UserError(NO_TYPE_FROM_SCRATCH.format(config.fine_tune_type))
    return config
