"""Which values an option may have: its type, its range and its choices, stated once with the field of a dataclass.

`fix` checks the fields of a dataclass when it is made, and `build` makes one from a mapping, such as one read from
YAML. Both refuse a value in one message that names the option, the expected value and the actual one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import os
import re
import reprlib
import shlex
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from ..errors import UserError
from .other_names import answer_to, option_meant

# Where a range has no largest number of its own: MLX counts in 32 bits, and computes in fp32.
_MOST_INT = 2**31 - 1
_MOST_FLOAT = 3.4e38
# The name of a text that counts bytes, and the bytes of one of each unit.
SIZE = "a size such as 4GB, 12GiB or 500MB"
_SIZES = {"": 1, "M": 10**6, "MB": 10**6, "MIB": 2**20, "G": 10**9, "GB": 10**9, "GIB": 2**30, "TB": 10**12}
# A smaller size than this is meant in another unit.
_LEAST_SIZE = 1000


class _ShortRepr(reprlib.Repr):
    """Writes values cut to the length of a message, since YAML can describe one that takes gigabytes to write out."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxlevel = 3

    def repr_int(self, number: int, level: int) -> str:
        # Python refuses to write numbers of more than 4,300 digits, and a YAML file can hold them in hexadecimal.
        return super().repr_int(number, level) if number.bit_length() < 1000 else "a number of more than 300 digits"


_SHORT = _ShortRepr()
# The most characters of a value in a message: lists of lists have many, however few of each are written.
_LONGEST = 120


@dataclass(frozen=True)
class Range:
    """The numbers that an option may have: from `least` to `most`, or between `above` and `below`, these excluded.

    `most` is None for as large as MLX can count, or as fp32 can hold. `also` are numbers outside the range with a
    meaning of their own, such as -1 for "all". With `size` the numbers count bytes, and a text such as 4GB may stand
    for one.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    size: bool = False

    def __contains__(self, number: float) -> bool:
        most = _MOST_INT if isinstance(number, int) else _MOST_FLOAT
        inside = math.isfinite(number) and abs(number) <= (most if self.most is None else self.most)
        inside = inside and (self.least is None or number >= self.least)
        inside = inside and (self.above is None or number > self.above)
        inside = inside and (self.below is None or number < self.below)
        return inside or number in self.also

    def __str__(self) -> str:
        if self.least is not None:
            text = f"from {self.least}" if self._upper() else f"{self.least} or more"
        else:
            text = "" if self.above is None else f"above {self.above}"
        text = f"{text} {self._upper()}".strip() or "that is finite"
        return ", or ".join([text, *map(str, self.also)])

    def _upper(self) -> str:
        if self.most is None:
            return "" if self.below is None else f"{'to ' if self.least is not None else ''}below {self.below}"
        return f"to {self.most}" if self.above is None else f"and up to {self.most}"


FINITE = Range()
COUNT = Range(least=1)
NOT_NEGATIVE = Range(least=0)
POSITIVE = Range(above=0)


def option(
    group: str,
    default: Any,
    text: str,
    *,
    flag: bool | str = True,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    range: Range | None = None,
    **more: Any,
) -> Any:
    """Return the field of a dataclass that is an option, listed in a group, with its default or a function that makes
    one.

    `flag` says whether it is a command-line flag, or names the flag where that differs. It may be one of `choices`, or
    hold some of `words` separated by commas, or be a number in `range`. `more` holds `empty`, whether a text may be
    empty; and of the flag `short`, a second name, `metavar`, the word for its value, and `negated`, False where there
    is no flag with no- before the name.
    """
    about = {"group": group, "help": text, "flag": flag, "choices": choices, "words": words, "range": range, **more}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=about)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=about)
    return dataclasses.field(default=default, metadata=about)


def short(value: object) -> str:
    """Return a value as Python writes it, cut to a length that fits a message."""
    text = _SHORT.repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


_SINGULAR = {"are": "is", "were": "was", "have": "has"}


def agreeing(count: int, words: str) -> str:
    """Return words that are written for several things, such as `rows have`, as they are for one, if `count` is 1."""
    if count != 1:
        return words
    return " ".join(_SINGULAR.get(word) or (word[:-1] if word.endswith("s") else f"{word}s") for word in words.split())


# One of these is among the known words where an option or its value is meant, and no column of data.
_OF_OPTIONS = {"--model", "model", "lora", "sft"}


def nearest(word: str, known: list[str]) -> str:
    """Return " (did you mean 'x'?)" for the known word closest to `word`, or an empty string if none is close.

    The dashes before a flag do not count, since they make any two short flags alike. The name that another trainer has
    for an option is close to ours.
    """
    if meant := option_meant(word, known):
        return f" (did you mean {meant!r}?)"
    if _OF_OPTIONS & {*known} and (answer := answer_to(word)):
        return f" ({answer})"
    if word.startswith("--no-") and f"--{word[5:]}" in known:
        return f" (leave --{word[5:]} out)"
    by_name = {name.lstrip("-").lower(): name for name in known}
    lower = word.lstrip("-").lower()
    # One is the beginning of the other: --temp, or adamw_torch.
    closest = [name for name in by_name if name.startswith(lower) or lower.startswith((f"{name}_", f"{name}-"))]
    if len(closest) != 1:
        closest = difflib.get_close_matches(lower, list(by_name), n=1, cutoff=0.66)
    return f" (did you mean {by_name[closest[0]]!r}?)" if closest else ""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON, as `object_pairs_hook`; UserError for a key that is there twice, where json drops one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise UserError(f"the key {short(repeated)} stands there twice; keep one of the two.")
    return made


def refuse_address(text: str, where: str) -> None:
    """Raise UserError for an address, such as https://huggingface.co/OWNER/MODEL, where a folder or a name is meant."""
    if "://" in text:
        name = re.match(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([\w.-]+/[\w.-]+)", text)
        remedy = f"give the name on the hub, {name[1]}" if name else "download it, and give the folder"
        raise UserError(f"{where}: this is the address of a page; {remedy}.")


def fix(instance: Any) -> None:
    """Check every field of a dataclass in place; a whole number becomes a float, and a path text, where one is meant.

    A UserError names a value of another type than the field's annotation says, or one that its metadata does not allow
    (see option(); `choices` hold for the whole text or each member of a list).
    """
    cls: type = type(instance)
    for name, (hint, metadata) in fields_of(cls).items():
        object.__setattr__(instance, name, checked(getattr(instance, name), hint, metadata, name))


def build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """Make a dataclass from a mapping of its fields' names to values; a field that is a dataclass may be a mapping.

    Messages name the source of the values by `where`, such as a file's path; with an empty text the option alone.

    Raises:
        UserError: A name is unknown, or a value is refused (see `fix`).
    """
    check_values(cls, values, where)
    return cls(**values)


# How many unknown keys of a file are named, since a file may hold any number.
_NAMED = 12


def check_values(cls: type, values: Mapping[str, Any], where: str) -> None:
    """Check a mapping as `build` does, without making the dataclass. One message names all that is wrong in it."""
    fields = fields_of(cls)
    messages = unknown_names(values, list(fields), where)
    for name, value in values.items():
        if name in fields:
            try:
                checked(value, *fields[name], f"{where}: {name}" if where else name)
            except UserError as error:
                messages.append(str(error))
    if messages:
        raise UserError("\n".join(messages))


def unknown_names(names: Iterable[Any], known: list[str], where: str) -> list[str]:
    """Return a message for each unknown name, with the nearest known one; of many, for the first."""
    before = f"{where}: " if where else ""
    unknown = [name for name in names if name not in known]
    messages = [f"{before}unknown key {short(name)}{nearest(str(name), known)}." for name in unknown[:_NAMED]]
    return messages + [f"{before}{len(unknown) - _NAMED:,} more unknown keys."] * (len(unknown) > _NAMED)


def checked(value: Any, hint: Any, metadata: Mapping[str, Any], name: str) -> Any:
    """Return a value, `name` in messages, in the type that `hint` asks for; UserError if it is not one that is allowed.

    The hint is a type, such as `int`, `float | None`, `list[str]` or, for one that may also be a word, `bool | str` or
    `dict[str, Any] | str | None`. `metadata` holds further requirements: `range`, `choices`, `words` and `empty`.
    """
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if Any in options or (value is None and type(None) in options):
        return value
    *others, kind = (option for option in options if option is not type(None))
    for other in others:
        if isinstance(value, typing.get_origin(other) or other):
            return checked(value, other, metadata, name)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return build(typing.cast(type, kind), value, name)
    outer = typing.get_origin(kind) or kind
    if outer in (list, tuple) and isinstance(value, list | tuple):
        member = typing.get_args(kind)[0]
        return outer(
            checked(member_value, member, metadata, f"{name}: entry {i}") for i, member_value in enumerate(value, 1)
        )
    if outer is dict and isinstance(value, dict):
        of_key, of_value = typing.get_args(kind)
        return {
            checked(key, of_key, {}, f"{name}: key"): checked(entry, of_value, metadata, f"{name}: {short(key)}")
            for key, entry in value.items()
        }
    scalar = _scalar(value, outer, metadata)
    if scalar is None:
        before = {bool: "true, false or ", dict: "a mapping or "}
        answer = answer_to(value) if isinstance(value, str) else None
        hint = f" ({answer})" if answer else ""
        words = "".join(before[typing.get_origin(other) or other] for other in others)
        raise UserError(f"{name}: expected {words}{_expected(value, outer, metadata)}, got {short(value)}{hint}.")
    if metadata.get("range") and metadata["range"].size and 0 < scalar < _LEAST_SIZE:
        raise UserError(f"{name}: {scalar} counts bytes; write {scalar}GB if gigabytes are meant.")
    return scalar


def bytes_of(text: str) -> int | None:
    """Return the bytes that a text such as `4GB`, `500MB` or a plain number stands for; None if it stands for none."""
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text.strip())
    try:
        return int(Decimal(match[1]) * _SIZES[match[2].upper()]) if match else None
    except (InvalidOperation, KeyError):
        return None


def _scalar(value: Any, kind: Any, metadata: Mapping[str, Any]) -> Any:
    """Return the value as a `kind`, or None if it is not one that is allowed."""
    limits: Range = metadata.get("range") or FINITE
    if limits.size and isinstance(value, str):
        value = bytes_of(value)
    if kind in (int, float):
        whole = isinstance(value, numbers.Integral)
        if isinstance(value, bool) or not (whole or (kind is float and isinstance(value, numbers.Real))):
            return None
        number = int(value) if whole else float(value)
        # A whole number that is too large for a float is outside every range, and cannot be compared with one.
        return kind(number) if abs(number) < 1e300 and number in limits else None
    if kind is str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(text, str):
            return None
        if metadata.get("words"):
            text = ",".join(word.strip().lower() for word in text.split(",") if word.strip())
        return text if _is_allowed(text, metadata) else None
    return value if isinstance(value, kind) else None


def _is_allowed(text: str, metadata: Mapping[str, Any]) -> bool:
    """Whether a text can be written in UTF-8, is not empty, and is one of the choices, if there are any."""
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        return False
    words = text.split(",") if metadata.get("words") else [text]
    known = metadata.get("words") or metadata.get("choices")
    filled = metadata.get("empty") or (text and not text.isspace())
    return bool(filled) and (not known or set(words) <= set(known))


def _expected(value: Any, kind: Any, metadata: Mapping[str, Any]) -> str:
    """Describe the expected value in place of one, such as `a whole number of 1 or more`."""
    if metadata.get("words"):
        return f"any of {', '.join(metadata['words'])}, separated by commas"
    if kind is str and metadata.get("choices"):
        return f"{'one of ' if len(metadata['choices']) > 1 else ''}{', '.join(metadata['choices'])}"
    limits: Range = metadata.get("range") or FINITE
    if limits.size and isinstance(value, str):
        return SIZE
    if kind in (int, float):
        most = _MOST_INT if kind is int else _MOST_FLOAT
        if limits.most is None and limits.below is None and isinstance(value, int | float) and most < value < math.inf:
            limits = dataclasses.replace(limits, most=most)
        number = "whole number" if kind is int else "number"
        return f"a {number}{' of' if str(limits)[0].isdigit() else ''} {limits}"
    words = {str: "text in UTF-8 that is not empty", bool: "true or false", list: "a list", dict: "a mapping"}
    return words.get(kind, "a mapping of options")


@cache
def fields_of(cls: type) -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
    """The type and the metadata of each field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: (hints[field.name], field.metadata) for field in dataclasses.fields(cls)}


THINKING = "enable_thinking"
# Arguments of transformers' apply_chat_template that deltatune sets, or that would change its result.
_OWN = {
    "conversation", "tokenize", "add_generation_prompt", "continue_final_message", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "messages",
}  # fmt: skip
# Arguments that a single prompt may set, and rows of data have otherwise.
_OF_PROMPTS = {"tools", "chat_template"}


def checked_options(options: Any, where: str, *, prompt: bool = False) -> dict[str, Any]:
    """Return variables of a chat template, by name, after a check; one `prompt` may set tools and the template, too.

    A UserError refuses other things than a mapping, values that JSON lacks, and arguments that deltatune sets itself.
    """
    if not isinstance(options, Mapping):
        raise UserError(f"{where}: expected a JSON object, got {short(options)}.")
    names = [name for name in options if not isinstance(name, str)]
    if names:
        raise UserError(f"{where}: expected names of variables, got {short(names[0])}.")
    if refused := options.keys() & (_OWN if prompt else _OWN | _OF_PROMPTS):
        raise UserError(f"{where}: {min(refused)!r} is set by this command; leave it out.")
    if not isinstance(options.get(THINKING, True), bool):
        raise UserError(f"{where}: {THINKING}: expected true or false, got {short(options[THINKING])}.")
    try:
        json.dumps(options)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected values of JSON ({error}), got {short(dict(options))}.") from error
    return dict(options)


def parsed_options(text: str, where: str, *, prompt: bool = False) -> dict[str, Any]:
    """Return the variables that a JSON text holds, checked as by checked_options."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where}: not JSON ({error}); give an object such as {{"{THINKING}": false}}.') from error
    return checked_options(options, where, prompt=prompt)


def written_options(options: Mapping[str, Any]) -> str:
    """Return variables as a flag to be pasted into a shell: --chat-template-config '{...}'."""
    return f"--chat-template-config {shlex.quote(json.dumps(dict(options)))}"
