"""Reads the mapping in a YAML file, and refuses likely mistakes, such as a key that stands there twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError, first_line
from .values import short


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which here reads 1e-5 as a number, as YAML 1.2 does, and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands there twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            # PyYAML passes on the errors of int(), datetime() and its own tables for a text that is none of theirs.
            if isinstance(error, yaml.YAMLError):
                raise
            raise yaml.constructor.ConstructorError(
                None, None, f"{short(node.value)} is not a {node.tag.rpartition(':')[2]}", node.start_mark
            ) from error


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; an empty file is an empty mapping.

    A UserError says that it cannot be read, is not YAML in UTF-8, gives a key twice, or holds no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"config {path}: cannot be read ({error.strerror}); give the path of a YAML file.") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"config {path}: byte {error.start} is not UTF-8 ({error.reason}); save the file in UTF-8."
        ) from error
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"config {path}: the file is not YAML: {_one_line(error)}.") from error
    except RecursionError as error:
        raise UserError(f"config {path}: the YAML is nested too deeply; expected `key: value` lines.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"config {path}: expected `key: value` lines, got {short(content)}.")
    return content


def _one_line(error: yaml.YAMLError) -> str:
    """Describe the mistake in the YAML in one line, with the line of the file."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    text = str(problem or first_line(error))
    return f"{text}, in line {mark.line + 1}" if mark is not None else text
