"""Print the rooms of src/deltatune from top to bottom, with what each imports and what its files hold (`make tree`).

usage: scripts/tree.py [ROOM ...]

A room is a folder, or a file beside the folders; without a name, all are printed. What a file holds is the first
sentence of its docstring. The exit code is 1 where an import goes up or in a circle, and the lines that do so are
printed; tests/test_imports.py checks the same.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "deltatune"
# From bottom to top: a group imports only groups before it. A group is a folder, or a file beside the folders.
ORDER = ["errors", "upstream", "options", "machine", "ops", "layers", "lora", "patches"]
ORDER += ["models", "data", "rewards", "train", "answering", "export", "plan", "doctor"]
ORDER += ["demo", "selftest", "recipes", "commands", "cli", "__main__"]


@dataclass(frozen=True)
class Import:
    """A line of the module `importer` that imports from `imported`, both dotted names; `imported` may be external."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}, imports {self.imported}"


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Every module of the package by its dotted name without the package's; the package itself has the name ''."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def group_of(module: str) -> str:
    """The group to which a module belongs."""
    return module.partition(".")[0]


def imports(source: Path = SOURCE) -> list[Import]:
    """Every import in the package, inside functions as well; its own modules are named without the package's name."""
    known = modules(source)
    return [each for name, path in known.items() for each in _imports_of(name, path, known)]


def _imports_of(name: str, path: Path, known: dict[str, Path]) -> list[Import]:
    package = ["deltatune", *name.split(".")] if name else ["deltatune"]
    if path.stem != "__init__":
        package = package[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            base = base if node.level else str(node.module)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [Import(name, _module(target, known), node.lineno) for target in targets]
    return found


def _module(target: str, known: dict[str, Path]) -> str:
    """The module that a dotted name stands for or is defined in; a name of another package is returned as it is."""
    if target != "deltatune" and not target.startswith("deltatune."):
        return target
    own = target.removeprefix("deltatune").removeprefix(".")
    return own if own in known else own.rpartition(".")[0]


def upward(found: list[Import]) -> list[Import]:
    """The imports that go up, and those from or into a group that ORDER does not list."""
    known = modules()

    def goes_up(each: Import) -> bool:
        if each.imported not in known or not each.importer:
            return False
        groups = group_of(each.importer), group_of(each.imported)
        return not set(groups) <= set(ORDER) or ORDER.index(groups[1]) > ORDER.index(groups[0])

    return [each for each in found if goes_up(each)]


def between_rooms(found: list[Import]) -> list[Import]:
    """The imports between rooms of one group, which are its folders and the files beside these, by the rooms' names."""
    known = modules()
    pairs = [(_room(each.importer), _room(each.imported), each.line) for each in found if each.imported in known]
    return [Import(*pair) for pair in pairs if pair[0] != pair[1] and group_of(pair[0]) == group_of(pair[1])]


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def circles(found: list[Import]) -> list[list[str]]:
    """Lists of modules that import one another, directly or through others."""
    known = modules()
    graph: dict[str, set[str]] = defaultdict(set)
    for each in found:
        # A package's __init__ imports from its modules, and these do not import the package.
        if each.imported in known and each.imported != each.importer:
            graph[each.importer].add(each.imported)
    reached = {name: _reached(name, graph) for name in known}
    together = {frozenset(other for other in reached[name] if name in reached[other]) for name in known}
    return sorted(sorted(each) for each in together if len(each) > 1)


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found


def phrase(path: Path) -> str:
    """What a module says of itself: the first paragraph of its docstring, or nothing where it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0]


def main(rooms: list[str]) -> int:
    unknown = sorted(set(rooms) - set(ORDER))
    if unknown:
        print(f"No room: {', '.join(unknown)}. The rooms are {', '.join(reversed(ORDER))}.", file=sys.stderr)
        return 2
    found, known = imports(), modules()
    arrows: dict[str, set[str]] = defaultdict(set)
    for each in found:
        if each.imported in known and each.importer:
            arrows[group_of(each.importer)].add(group_of(each.imported))
    for group in reversed(ORDER):
        if not rooms or group in rooms:
            below = [other for other in reversed(ORDER) if other in arrows[group] - {group}]
            _print_room(group, {name: path for name, path in known.items() if group_of(name) == group}, below)
    wrong = [str(each) for each in upward(found)] + [f"a circle: {', '.join(each)}" for each in circles(found)]
    print("\n".join(wrong) or "No import goes up, and none goes in a circle.")
    return int(bool(wrong))


def _print_room(room: str, files: dict[str, Path], below: list[str]) -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files.values())
    print(f"{room}: {len(files)} files, {lines:,} lines; imports {', '.join(below) or 'nothing'}")
    for path in sorted(files.values(), key=lambda path: (path.parent, path.stem != "__init__", path.stem)):
        place = path.relative_to(SOURCE)
        print(f"  {f'{place.parent}/' if path.stem == '__init__' else place!s:42} {phrase(path)}")
    print()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
