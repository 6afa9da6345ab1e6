"""Notes which statements of a program run, by a call that an import puts in front of each.

A tracer, which sees every line, takes half as long again as the program.
"""

import ast
import atexit
import builtins
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

Lines = dict[str, list[int]]
_CALL = "__statement_runs__"


def write(file: Path, lines: Lines) -> None:
    """Write for `install` which statements to mark: the lines at which they start, by file of deltatune."""
    file.write_text(json.dumps(lines))


def read(file: Path) -> dict[str, set[int]]:
    """Return which statements have run in the programs that marked those of `file`."""
    ran: dict[str, set[int]] = defaultdict(set)
    for left in file.parent.glob(f"{file.name}.*"):
        for name, lines in json.loads(left.read_text()).items():
            ran[name].update(lines)
    return ran


def install(file: Path) -> None:
    """Mark the statements that `file` names, before deltatune is imported; what has run is written beside it."""
    lines, ran = json.loads(file.read_text()), defaultdict(set)
    package = Path(find_spec("deltatune").origin).parent
    setattr(builtins, _CALL, lambda name, line: ran[name].add(line))
    files = {str(package / name): (name, set(found)) for name, found in lines.items()}
    sys.meta_path.insert(0, Finder(files.__contains__, lambda path, text: marked(text, *files[path])))
    left = Path(f"{file}.{os.getpid()}")
    atexit.register(lambda: left.write_text(json.dumps({name: sorted(found) for name, found in ran.items()})))


def marked(source: str | bytes, name: str, lines: set[int]) -> ast.Module:
    """Return the program `source` with a call in front of each statement that starts in one of `lines`."""
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        for field, block in ast.iter_fields(node):
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                setattr(node, field, [each for statement in block for each in _behind_call(statement, name, lines)])
    return ast.fix_missing_locations(tree)


def _behind_call(statement: ast.stmt, name: str, lines: set[int]) -> list[ast.stmt]:
    if statement.lineno not in lines:
        return [statement]
    (call,) = ast.parse(f"{_CALL}({name!r}, {statement.lineno})").body
    return [ast.copy_location(call, statement), statement]


class Finder:
    """Finds deltatune's modules as Python would; those at paths that `changes` names are compiled from `changed`."""

    def __init__(self, changes: Callable[[str], bool], changed: Callable[[str, bytes], bytes | ast.Module]):
        self._changes, self._changed = changes, changed

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "deltatune":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.origin and self._changes(spec.origin):
            spec.loader = _Loader(name, spec.origin, self._changed)
        return spec


class _Loader(SourceFileLoader):
    """Compiles a changed module, and keeps no bytecode of it."""

    def __init__(self, module: str, path: str, changed: Callable[[str, bytes], bytes | ast.Module]):
        super().__init__(module, path)
        self._changed = changed

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self._changed(path, self.get_data(path)), path, "exec", dont_inherit=True)
