"""Finds the statements of deltatune that only a Mac runs, by reading the source.

A condition on the device (`backend.device() == "metal"`, `here == "cpu"`, `mx.metal.is_available()`, a fact of
machine/backend.py such as `backend.launches_ahead()`) is evaluated as on a CPU and as on a Mac. Statements that a CPU
never reaches and a Mac may reach are a Mac's, and so are statements that choose within an expression. Functions that
nothing but such statements names are a Mac's as a whole.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltatune.machine import backend

DEVICES = {"cpu", "cuda", "metal", "hopper"}
# Expressions that give the name of a device: calls of functions, variables and attributes with these names.
_NAMING = {"device", "here", "machine", "_machine"}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Statement:
    """A statement that only a Mac runs: its file, its line, the function that it is in, and its first line's text."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.function}: {self.text}"


def truth(test: ast.expr, device: str) -> bool | None:
    """Whether a condition holds where MLX computes on `device`; None where that depends on something else."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            found = truth(operand, device)
            return None if found is None else not found
        case ast.BoolOp(operator, values):
            parts = [truth(value, device) for value in values]
            decides = isinstance(operator, ast.Or)
            if decides in parts:
                return decides
            return None if None in parts else not decides
        case ast.Call(ast.Attribute(ast.Attribute(attr="metal"), "is_available")):
            return device == "metal"
        case ast.Call(ast.Attribute(ast.Name("backend"), fact)) if fact in FACTS:
            return truth(FACTS[fact], device)
        case ast.Compare(left, [ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn() as operator], [right]):
            names = _devices_in(right)
            if _names_device(left) and names is not None:
                return (device in names) == isinstance(operator, ast.Eq | ast.In)
    return None


def _facts() -> dict[str, ast.expr]:
    """The conditions that functions of machine/backend.py return, by the function's name."""
    functions = ast.parse(Path(backend.__file__).read_text(encoding="utf-8")).body
    returned = {one.name: one.body[-1] for one in functions if isinstance(one, ast.FunctionDef)}
    conditions = {name: last.value for name, last in returned.items() if isinstance(last, ast.Return)}
    return {name: value for name, value in conditions.items() if isinstance(value, ast.Compare)}


FACTS = _facts()


def _names_device(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)) in _NAMING


def _devices_in(node: ast.expr) -> set[str] | None:
    elements = node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else [node]
    found = {each.value for each in elements if isinstance(each, ast.Constant)}
    return found if len(found) == len(elements) and found <= DEVICES else None


def _chooses(statement: ast.stmt) -> bool:
    """Whether an expression in the statement itself depends on whether the device is a Mac's GPU."""
    return any(isinstance(x, ast.expr) and truth(x, "metal") not in (None, truth(x, "cpu")) for x in _own(statement))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through what belongs to a statement itself, and not to statements within it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            yield child
            yield from _own(child)


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    return blocks + [handler.body for handler in getattr(statement, "handlers", [])]


class _Reader:
    """Collects from one file the lines of a Mac's statements, by function, and the names that others and they use."""

    def __init__(self, file: str, source: str):
        self.file, self.lines = file, source.splitlines()
        self.found: dict[int, Statement] = {}
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        # (name used, whether by a Mac's statement, the function that uses it)
        self.uses: list[tuple[str, bool, str]] = []
        self.read(ast.parse(source).body, False, "")

    def add(self, statement: ast.stmt, function: str) -> None:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        text = self.lines[statement.lineno - 1].strip()
        self.found[statement.lineno] = Statement(self.file, statement.lineno, function or "module", text)

    def read(self, block: list[ast.stmt], of_mac: bool, function: str) -> None:
        for statement in block:
            defines = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if of_mac or _chooses(statement):
                self.add(statement, function)
            self._use(statement, of_mac, function)
            if defines and not isinstance(statement, ast.ClassDef):
                self.functions.setdefault(statement.name, []).append(statement)
            if isinstance(statement, ast.If):
                on_cpu, on_mac = (truth(statement.test, device) for device in ("cpu", "metal"))
                self.read(statement.body, (of_mac or on_cpu is False) and on_mac is not False, function)
                self.read(statement.orelse, (of_mac or on_cpu is True) and on_mac is not True, function)
                # What follows an `if` whose body leaves the block is what its `else` would be.
                if isinstance(statement.body[-1], _LEAVES):
                    of_mac = (of_mac or on_cpu is True) and on_mac is not True
                continue
            inner = f"{function}.{statement.name}".lstrip(".") if defines else function
            for each in _blocks(statement):
                self.read(each, of_mac, inner)

    def _use(self, statement: ast.stmt, of_mac: bool, function: str) -> None:
        for node in _own(statement):
            name = getattr(node, "id", None) or (node.attr if isinstance(node, ast.Attribute) else None)
            if name:
                self.uses.append((name, of_mac, function))


def statements(package: Path) -> list[Statement]:
    """Return the statements of a package that only a Mac runs."""
    readers = [_Reader(str(file.relative_to(package)), file.read_text()) for file in sorted(package.rglob("*.py"))]
    whole: set[str] = set()
    while True:
        users: dict[str, list[bool]] = {}
        for reader in readers:
            for name, of_mac, function in reader.uses:
                users.setdefault(name, []).append(of_mac or any(part in whole for part in function.split(".")))
        defined = Counter(name for reader in readers for name in reader.functions)
        new = {name for name, times in defined.items() if times == 1 and users.get(name) and all(users[name])} - whole
        if not new:
            break
        whole |= new
    for reader in readers:
        for name in whole & set(reader.functions):
            reader.read([x for f in reader.functions[name] for x in f.body], True, name)
    return [each for reader in readers for each in _sorted(reader)]


def _sorted(reader: _Reader) -> Iterator[Statement]:
    for line in sorted(reader.found):
        yield reader.found[line]
