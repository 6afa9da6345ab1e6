"""Print the lines of each room beside its budget, and how the code is written (`make house`); fail above a limit.

usage: scripts/house.py

A room is a folder of src/deltatune; `root` is the files beside the folders, `kernels` the text of the kernels, `tests`
the Python below tests/. What is added to a room that has reached its budget replaces something in it. A budget only
ever falls; the goal is where it is to come to. Python lines count, kernels' lines in the room `kernels`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "deltatune"


class Budget(NamedTuple):
    """The lines that a room may have, and the lines that it is to come to."""

    lines: int
    goal: int


BUDGETS = {
    "commands": Budget(1_585, 1_400),
    "answering": Budget(555, 1_000),
    "selftest": Budget(2_270, 2_200),
    "demo": Budget(730, 700),
    "recipes": Budget(60, 200),
    "doctor": Budget(1_080, 1_300),
    "export": Budget(1_650, 1_600),
    "plan": Budget(4_430, 3_300),
    "train": Budget(10_210, 8_000),
    "rewards": Budget(655, 600),
    "data": Budget(6_540, 5_300),
    "models": Budget(4_875, 3_600),
    "patches": Budget(3_900, 3_400),
    "lora": Budget(2_285, 2_300),
    "ops": Budget(14_710, 12_000),
    "machine": Budget(2_280, 2_500),
    "options": Budget(1_325, 1_050),
    "root": Budget(630, 450),
    "kernels": Budget(12_015, 10_800),
    "tests": Budget(54_435, 46_000),
}
# The most `what` of 1,000 words of docstrings. Other codebases have fewer than 0.6.
WHATS = 0.1


def lines_of_rooms() -> dict[str, int]:
    """Return the lines of every room of the source, of the kernels' text and of the tests."""
    counts: dict[str, int] = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        room = parts[0] if len(parts) > 1 else "root"
        counts[room] = counts.get(room, 0) + _lines(path)
    counts["kernels"] = sum(map(_lines, SOURCE.rglob("*.h")))
    counts["tests"] = sum(map(_lines, (ROOT / "tests").rglob("*.py")))
    return counts


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def style(trees: list[ast.Module]) -> dict[str, int]:
    """Count constructions that make code harder to read, over the modules of the source, by name."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    words = [word.lower() for text in docstrings(trees) for word in re.findall(r"[A-Za-z']+", text)]
    return {
        "parallel assignments": sum(map(_is_parallel, nodes)),
        "nested conditional expressions": sum(map(_is_nested, nodes)),
        "functions assigned to attributes": sum(map(_hooks, trees)),
        "questions for the device": sum(map(_asks_for_device, nodes)),
        "words of docstrings": len(words),
        "of which `what`": words.count("what"),
    }


def docstrings(trees: list[ast.Module]) -> Iterator[str]:
    """Yield the docstring of every module, class and function that has one."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def _is_parallel(node: ast.AST) -> bool:
    """Whether a statement assigns a written list of values to as many names."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def _is_nested(node: ast.AST) -> bool:
    parts = (node.body, node.test, node.orelse) if isinstance(node, ast.IfExp) else ()
    return any(isinstance(part, ast.IfExp) for part in parts)


def _hooks(tree: ast.Module) -> int:
    """Count the functions that a module assigns to attributes of objects other than `self`.

    An attribute of an imported module is none: MLX and Python take a stand-in in no other way.
    """
    nodes = list(ast.walk(tree))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    finished = {"self"} | {(name.asname or name.name).partition(".")[0] for node in imports for name in node.names}
    return sum(
        isinstance(target, ast.Attribute) and _root(target) not in finished and _is_function(node.value, functions)
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
    )


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return ast.unparse(node)


def _is_function(value: ast.expr, functions: set[str]) -> bool:
    """Whether a value is a lambda, a partial call, or one of the functions and methods of its module, by name."""
    if isinstance(value, ast.Lambda):
        return True
    if isinstance(value, ast.Call):
        return _root(value.func) in ("partial", "functools")
    name = value.attr if isinstance(value, ast.Attribute) else ast.unparse(value)
    return name in functions


def _asks_for_device(node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(function, ast.Attribute) and function.attr == "device" and ast.unparse(function) == "backend.device"
    )


def over_budget(counts: dict[str, int]) -> list[str]:
    """Say which rooms have more lines than their budgets, or none."""
    unknown = [f"{room} has no budget in scripts/house.py" for room in counts if room not in BUDGETS]
    over = [
        f"{room} has {counts[room]:,} lines, and its budget is {budget.lines:,}: let something go"
        for room, budget in BUDGETS.items()
        if counts.get(room, 0) > budget.lines
    ]
    return unknown + over


def headless(counts: dict[str, int]) -> list[str]:
    """Return a sentence if `what` stands in too many of the docstrings' words, by the counts of style()."""
    share = 1000 * counts["of which `what`"] / counts["words of docstrings"]
    if share <= WHATS:
        return []
    return [f"{share:.2f} of 1,000 words of docstrings are `what`, and the limit is {WHATS}: name the thing"]


def main() -> int:
    counts = lines_of_rooms()
    print(f"{'room':10} {'lines':>7} {'budget':>7} {'goal':>7}")
    for room, budget in BUDGETS.items():
        print(f"{room:10} {counts.get(room, 0):7,} {budget.lines:7,} {budget.goal:7,}")
    python = sum(lines for room, lines in counts.items() if room not in ("kernels", "tests"))
    print(f"{'source':10} {python:7,}")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    style_counts = style(trees)
    for name, count in style_counts.items():
        print(f"{name}: {count:,}")
    wrong = over_budget(counts) + headless(style_counts)
    print("\n".join(wrong) or "Every room is within its budget, and docstrings name things.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
