"""Reads the layout of a block's shared memory from the struct in the kernel's header, which alone declares it.

A layout is a struct template of constants: `static constexpr constant int NAME = EXPRESSION`. Expressions are sums,
products, comparisons and conditions of template values, of other constants, and of functions with one expression. The
compiler evaluates the same struct, and a static_assert in the kernel's text compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx

FOLDER = files(__package__)
_TOKEN = re.compile(r"::|&&|\|\||[<>=!]=|\w+|[^\s\w]")
_TEMPLATE = r"(?:template <([^<>]*)>\s*)?"
_STRUCT = re.compile(_TEMPLATE + r"struct (\w+) \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
_FUNCTION = re.compile(_TEMPLATE + r"(?:\w+ )*constexpr (?:int|bool) (\w+)\(([^()]*)\) \{([^{}]*)\}")
_ENUM = re.compile(r"^enum[\w :]*\{([^{}]*)\}", re.MULTILINE)
_MEMBER = re.compile(r"(?:constexpr (?:constant )?(?:int|bool)|using) ([^;]*?);")
_OPERATORS = {"&&": " and ", "||": " or ", "!": " not ", "/": "//", "::": ".", "true": "True", "false": "False"}


class SharedMatrix(NamedTuple):
    """A type of matrices in shared memory: the bytes of an element, and the planes of bf16 in which it is held."""

    bytes: int
    planes: int


_PLAIN = SharedMatrix(4, 0)
_SINGLE = SharedMatrix(2, 1)
_PAIR = SharedMatrix(4, 2)


@cache
def bytes_of(
    struct: str, arguments: tuple[str, ...], bodies: tuple[str, ...], values: tuple[tuple[str, Any], ...], machine: str
) -> int:
    """Return the bytes of a layout: of the struct template, the text of its arguments, and the values that those name.

    `bodies` are the files of the kernel's bodies. On machines other than `cuda` each number is held in its own dtype.
    """
    layouts = _layouts("cuda" if machine == "cuda" else "metal", bodies)
    operands = [layouts.value(text, dict(values)) for text in arguments]
    return int(layouts.names[struct](*operands).bytes)


class _Scope:
    """The constants of a struct or of a function, each computed when it is first read."""

    def __init__(self, layouts: _Layouts, values: dict[str, Any], members: dict[str, str]):
        self._layouts = layouts
        self._values = values
        self._members = members

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._layouts.value(self._members[name], self)
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        return self[name]


class _Layouts:
    """The structs, functions and enumerations of some headers: in Python, each struct is a function of its values."""

    def __init__(self, machine: str, bodies: tuple[str, ...]):
        files = (f"{machine}.h", "tiles.h", *bodies)
        text = without_comments("".join((FOLDER / name).read_text(encoding="utf-8") for name in files))
        constants = {name: value for enum in _ENUM.finditer(text) for name, value in _assignments(enum[1])}
        functions = {name: (first, more, body) for first, name, more, body in _FUNCTION.findall(text)}
        structs = {name: (first, body) for first, name, body in _STRUCT.findall(text)}
        self.templates = frozenset({*structs, *functions, "Exact", "Wide", "Saved", "Choose"})
        self.names: dict[str, Any] = _types(machine)
        for name, (first, body) in structs.items():
            self.names[name] = self._function(first, "", body, "")
        for name, (first, more, body) in functions.items():
            self.names[name] = self._function(first, more, body, body.rpartition("return ")[2].rstrip("; \n"))
        scope = _Scope(self, {}, constants)
        self.names |= {name: scope[name] for name in constants}

    def value(self, text: str, scope: Any = None) -> Any:
        """Return the value of an expression, with the constants of a scope."""
        return eval(_code(text, self.templates), self.names, scope)

    def _function(self, first: str, more: str, body: str, result: str) -> Callable[..., Any]:
        """Return what a struct or a function is for some values: a scope or, with a `result`, its value there."""
        parameters = [word for word in (*first.split(","), *more.split(",")) if word.strip()]
        names = [word.partition("=")[0].split()[-1] for word in parameters]
        defaults = [word.partition("=")[2].strip() for word in parameters]
        members = {name: value for member in _MEMBER.findall(body) for name, value in _assignments(member)}

        def call(*values: Any) -> Any:
            omitted = [self.value(text) for text in defaults[len(values) :] if text]
            scope = _Scope(self, dict(zip(names, [*values, *omitted], strict=False)), members)
            return self.value(result, scope) if result else scope

        return call


_layouts = cache(_Layouts)


def _types(machine: str) -> dict[str, Callable[..., Any]]:
    """Return the types that matrices have in shared memory (metal.h, cuda.h): on CUDA, fp16 is a pair of bf16."""
    half = (_PAIR if machine == "cuda" else _SINGLE, _PAIR, _PAIR)
    stores = {mx.float32: (_PLAIN, _PLAIN, _PLAIN), mx.bfloat16: (_SINGLE, _PAIR, _SINGLE), mx.float16: half}
    return {
        "Exact": lambda dtype: stores[dtype][0],
        "Wide": lambda dtype: stores[dtype][1],
        "Saved": lambda dtype: stores[dtype][2],
        "Choose": lambda first, one, other: SimpleNamespace(type=one if first else other),
    }


def without_comments(text: str) -> str:
    """Return the text of a header without its comments."""
    return re.sub(r"//[^\n]*", "", text)


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r",\s*(?=\w+ = )", text):
        name, _, value = part.partition("=")
        yield name.strip(), value.strip(" \n,")


@cache
def _code(text: str, templates: frozenset[str]) -> CodeType:
    return compile(_Expression(text, templates).python(), text, "eval")


class _Expression:
    """An expression of C++ in Python: a recursive descent that knows conditions, templates and parentheses."""

    def __init__(self, text: str, templates: frozenset[str]):
        self.tokens = [token for token in _TOKEN.findall(text) if token != "typename"]
        self.templates = templates

    def python(self, end: str = "") -> str:
        """Return the expression up to `end`, or to the next comma or colon; those stay among the tokens."""
        words: list[str] = []
        while self.tokens and self.tokens[0] not in (end, ",", ":", ")"):
            token = self.tokens.pop(0)
            if token == "?":
                first = self.python(end)
                self.tokens.pop(0)
                return f"({first} if {''.join(words)} else {self.python(end)})"
            if token == "(":
                words.append(f"({self._list(')')})")
            elif token == "sizeof":
                self.tokens.pop(0)
                words.append(f"{self._list(')')}.size")
            elif token in self.templates and self.tokens[:1] == ["<"]:
                words.append(self._template(token))
            else:
                words.append(_OPERATORS.get(token, token))
        return "".join(words)

    def _list(self, end: str) -> str:
        parts = [self.python(end)]
        while self.tokens[0] == ",":
            self.tokens.pop(0)
            parts.append(self.python(end))
        self.tokens.pop(0)
        return ", ".join(parts)

    def _template(self, name: str) -> str:
        self.tokens.pop(0)
        arguments = self._list(">")
        if self.tokens[:1] != ["("]:
            return f"{name}({arguments})"
        self.tokens.pop(0)
        more = self._list(")")
        return f"{name}({', '.join(part for part in (arguments, more) if part)})"
