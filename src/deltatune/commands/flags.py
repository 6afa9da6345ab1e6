"""Makes flags from the fields of TrainConfig, and reads a command's options from its flags and a YAML file."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import UserError
from ..machine import ranks
from ..machine.wrapping import say
from ..options.conditions import TRAINING, Facts, changed_options, refuse_unread
from ..options.config import NO_TYPE_FROM_SCRATCH, LoraConfig, TrainConfig
from ..options.values import Range, build, check_values, checked, fields_of, nearest, parsed_options
from ..options.yaml_files import read_yaml


@contextlib.contextmanager
def _of_argument() -> Iterator[None]:
    """Raise a UserError on a nameless value as argparse's error, which names the flag."""
    try:
        yield
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from error


@_of_argument()
def _text(text: str) -> str:
    """Return the text of an argument that may not be empty; type=str takes any."""
    return checked(text, str, {}, "")


@_of_argument()
def _template_variables(text: str) -> dict[str, Any]:
    return parsed_options(text, "")


def _ranks(text: str) -> Any:
    """Return the value of a JSON text, which is checked as a file's value is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f'not JSON ({error}); give an object such as {{"q_proj": 4}}') from error


def _switch(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and names the nearest known flag or command in its errors."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False} | options)
        # argparse looks up None for an argument without a type.
        self.register("type", None, _text)
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        flags_here = [string for action in self._actions for string in action.option_strings]
        if re.match("the following arguments are required|argument (?!COMMAND|-).*invalid choice", message):
            # The flag that is missing, or whose value stands for an argument without one, may be there, misspelt.
            words = itertools.takewhile(lambda word: word != "--", self._words)
            flags = [word for word in words if word.startswith("--")]
            wrong = [flag for flag in flags if flag.split("=")[0] not in flags_here]
            message = f"unrecognized arguments: {' '.join(wrong)}" if wrong else message
        unknown = re.match(r"unrecognized arguments: (-.*)", message, re.DOTALL)
        if unknown:
            flags = [word for word in unknown[1].split() if word.startswith("-")]
            message = ", ".join(f"unknown option {flag}{nearest(flag.split('=')[0], flags_here)}" for flag in flags)
        value = re.match(r"unrecognized arguments: ([^-\s]\S*)", message)
        if value and value[1] in self._words[1:]:
            place = max(number for number, word in enumerate(self._words) if word == value[1])
            flag = next((word for word in self._words[place - 1 :: -1] if word in flags_here), "")
            opposite = f", or give --no-{flag[2:]}" if f"--no-{flag[2:]}" in flags_here else ""
            if flag == self._words[place - 1]:
                message = f"{flag} takes no value, got {value[1]!r}; leave it out{opposite}"
            elif flag:
                message = f"{flag} takes one value, and {value[1]!r} is a second one; quote a value that has blanks"
        command = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if command:
            known = [word.strip(" '") for word in command[2].split(",")]
            message = message.split(": ", 1)[0] + f": {command[1]!r} is not one of {', '.join(known)}"
            message += nearest(command[1], known)
        message = re.sub("invalid int value: (.*)", r"expected a whole number, got \1", message)
        message = re.sub("invalid float value: (.*)", r"expected a number such as 0.1, got \1", message)
        ranks.say_error(f"{self.prog}: {message}\nSee {self.prog} --help.")
        raise SystemExit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse reports a command's unknown flags through the outer parser, which knows none of its flags.
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(arguments, "parser", self).error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments


@_of_argument()
def size(text: str) -> int:
    """Return the bytes that a text such as `4GB`, `500MB` or a plain number stands for."""
    return checked(text, int, {"range": Range(least=0, most=2**63 - 1, size=True)}, "")


# The options with flags that take another form than their type's.
_CONVERT = {
    ("dict[str, Any] | None", "chat_template_config"): _template_variables,
    ("dict[str, int]", "rank_pattern"): _ranks,
}


def flag_name(option: str, metadata: Mapping[str, Any]) -> str:
    """Return the flag of an option with this metadata."""
    flag = metadata.get("flag")
    return flag if isinstance(flag, str) else "--" + option.replace("_", "-")


def _add_option(group: Any, field: dataclasses.Field, of_adapter: bool = False) -> None:
    """Add the flag of one option. Its default is None, so that the YAML file decides where it is not given."""
    about = field.metadata
    name = flag_name(field.name, about)
    default = field.default
    has_default = not (default in (None, ()) or default is dataclasses.MISSING or isinstance(default, bool))
    default_text = f" (default: {default})" if has_default else ""
    text = (about["help"] + default_text).replace("%", "%%")
    text = text.replace("default: ", "default: the adapter's, else ") if of_adapter else text
    kind = str(field.type)
    if not about.get("negated", True) and kind == "bool":
        group.add_argument(name, action="store_true", default=None, help=text)
    elif kind == "bool | str":
        words = ["true", "false", *about["choices"]]
        group.add_argument(name, type=_switch, nargs="?", const=True, default=None, metavar="|".join(words), help=text)
        group.add_argument(f"--no-{name[2:]}", dest=field.name, action="store_const", const=False, help=f"{name} false")
    elif kind.startswith("bool"):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        convert: Callable[[str], Any] = {"int": int, "float": float, "list[float]": float}.get(kind.split(" ")[0], str)
        counts_bytes = about["range"] is not None and about["range"].size
        convert = size if counts_bytes else _CONVERT.get((kind, field.name), convert)
        choices = about["choices"] or None
        metavars = {int: "N", float: "X", size: "SIZE", _template_variables: "JSON", _ranks: "JSON"}
        more = {
            "dest": field.name,
            "choices": choices,
            "metavar": None if choices else about.get("metavar") or metavars.get(convert, "TEXT"),
            "required": default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            "nargs": "+" if kind.startswith(("list", "tuple")) else None,
        }
        names = [name, about["short"]] if "short" in about else [name]
        # An empty text is refused by the option's own check where it may not be.
        group.add_argument(*names, type=convert, default=None, help=text, **more)


def add_fields(group: Any, options: type) -> None:
    """Give a parser, or a group of its flags, the flags of a dataclass with options, inherited ones last."""
    fields = dataclasses.fields(options)
    for field in sorted(fields, key=lambda field: field.name not in options.__annotations__):
        if field.metadata.get("flag"):
            _add_option(group, field)


def add_options(
    parser: argparse.ArgumentParser, names: Sequence[str] | None = None, of_adapter: Sequence[str] = ()
) -> None:
    """Give `parser` the flag -c for a YAML file and the flags of options.

    `names` are the fields of TrainConfig that get a flag; None stands for all of them, and LoraConfig's. The defaults
    of those in `of_adapter` are the values with which an adapter was trained.
    """
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file with options; flags override it")
    groups: dict[str, Any] = {}
    for field in option_fields() if names is None else dataclasses.fields(TrainConfig):
        if not field.metadata["flag"] or (names is not None and field.name not in names):
            continue
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_option(groups[title], field, field.name in of_adapter)


def option_fields() -> list[dataclasses.Field]:
    """Return the fields of TrainConfig, with those of LoraConfig behind `lora_parameters`, and inherited ones last."""
    fields: list[dataclasses.Field] = []
    for field in sorted(
        dataclasses.fields(TrainConfig), key=lambda field: field.name not in TrainConfig.__annotations__
    ):
        fields += [field, *(dataclasses.fields(LoraConfig) if field.name == "lora_parameters" else ())]
    return fields


def add_model(parser: argparse.ArgumentParser, help: str = "folder of the base model") -> None:
    """Give `parser` the required flag that names a model."""
    parser.add_argument("--model", required=True, metavar="TEXT", help=f"{help}, or its name on the Hugging Face hub")


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flag that names an adapter for the model."""
    parser.add_argument("--adapter-path", metavar="DIR", help="adapter to put on the model (default: none)")


def add_ends(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Give `parser` the flag that names further tokens at which a merged model stops."""
    parser.add_argument(
        "--extra-eos-token",
        nargs="+",
        metavar="TEXT",
        help=f"further tokens at which the merged model stops, written into its generation_config.json{more}",
    )


def config_from(arguments: argparse.Namespace, *, trains: bool = True) -> TrainConfig:
    """Return the options of a run: a flag overrides the YAML file, which overrides the default.

    A UserError names an option that is unknown, has a value that it may not have, is excluded by another or, where
    `trains`, would not be read by a training run.
    """
    file = getattr(arguments, "config", None)
    values = {} if file is None else read_yaml(file)
    known = fields_of(TrainConfig)
    # The example file of mlx_lm.lora writes null for an option that keeps its default.
    values = {name: value for name, value in values.items() if value is not None or name not in known}
    check_values(TrainConfig, values, str(file))
    lora = values.pop("lora_parameters", {})
    flags, lora_flags = given_flags(TrainConfig, arguments), given_flags(LoraConfig, arguments)
    _choose("iters", "epochs", values, flags, str(file))
    if "data" in flags:
        values.pop("hf_dataset", None)
    _choose("scale", "alpha", lora, lora_flags, f"{file}: lora_parameters")
    # Where nobody chose a type, the default gives way to from_scratch; a choice that it excludes is a mistake.
    chosen = values | flags
    if chosen.get("from_scratch") and chosen.get("fine_tune_type", "full") != "full":
        raise UserError(NO_TYPE_FROM_SCRATCH.format(chosen["fine_tune_type"]))
    config: TrainConfig = build(TrainConfig, chosen | {"lora_parameters": lora | lora_flags}, "")
    if trains:
        # A value such as 0 or false, where it is the default, asks for nothing.
        asked = changed_options(config)
        in_file = {name: name for name, value in {**values, **lora}.items() if value or name in asked}
        on_line = flag_names(TrainConfig, flags) | flag_names(LoraConfig, lora_flags)
        # Options that others imply are not asked for.
        of_schedule = {name: label for name, label in asked.items() if "." in name}
        notes = refuse_unread(TRAINING, of_schedule | in_file | on_line, config, Facts())
        for note in [] if ranks.number() else notes:
            say(note)
    return config


def require(config: TrainConfig, command: str, *names: str) -> None:
    """Raise UserError, with an example, unless the options named are given; hf_dataset stands for data, too."""
    missing = [name for name in names if vars(config)[name] is None and not (name == "data" and config.hf_dataset)]
    if missing:
        flags = " and ".join(f"--{name}" for name in missing)
        keys = " and ".join(missing)
        raise UserError(
            f"{flags} {'is' if len(missing) == 1 else 'are'} missing (in the YAML file: {keys}); for example: "
            f"deltatune {command} --model Qwen/Qwen3.5-0.8B --data my-data, where the folder my-data holds "
            f"{'test' if command == 'eval' else 'train'}.jsonl."
        )


def given_flags(cls: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that are fields of the dataclass; UserError, by the flag's name, for a value it may not have."""
    fields = fields_of(cls)
    flags = {name: value for name, value in vars(arguments).items() if name in fields and value is not None}
    for name, value in flags.items():
        checked(value, *fields[name], flag_name(name, fields[name][1]))
    return flags


def flag_names(cls: type, flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the flag of each option of a dataclass that a command line gives a value, unless it is a default no."""
    fields = fields_of(cls)
    asked = [name for name, value in flags.items() if value or value != getattr(cls, name, value)]
    return {name: flag_name(name, fields[name][1]) for name in asked}


def _choose(first: str, second: str, in_file: dict[str, Any], on_line: dict[str, Any], source: str) -> None:
    """Of two options for the same thing, drop from the file the one that a flag overrides; UserError for both."""
    for values, one, other in ((in_file, first, second), (on_line, f"--{first}", f"--{second}")):
        if values.get(first) is not None and values.get(second) is not None:
            where = f"{source}: " if values is in_file else ""
            raise UserError(f"{where}{one} and {other} set the same thing in two ways; give one of them.")
    for winner, overridden in ((first, second), (second, first)):
        if winner in on_line:
            in_file.pop(overridden, None)
