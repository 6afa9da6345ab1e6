"""Imports go one way, and only patches/ and models/ name mlx-lm or mlx-vlm."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "deltatune"
ORDER = ["environment", "errors", "blas", "one_row", "subnormals", "backend", "compiling", "config", "ops", "lora"]
ORDER += ["patches", "models", "data", "train", "diagnose", "demo", "selftest", "commands", "cli", "__main__"]
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def imported(path: Path) -> list[tuple[str, int]]:
    """Absolute dotted names that the file imports, `deltatune.` in front for relative ones, with their lines."""
    package = ["deltatune", *path.relative_to(SOURCE).parent.parts]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    group = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for name, line in imported(path):
        parts = name.split(".")
        if parts[0] == "deltatune" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(group), f"{path}:{line}: {group} imports {name}"
        if parts[0] in ("mlx_lm", "mlx_vlm"):
            # These are programs of their own, to show what mlx-lm or mlx-vlm alone makes of the adapter.
            alone = path.relative_to(SOURCE) in (Path("demo/reload.py"), Path("demo/vision/reload.py"))
            assert alone or group in ("patches", "models"), f"{path}:{line}: only patches and models may name {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert text.count("\n") < 400, f"{path} has {text.count(chr(10))} lines: split it by concept"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines < 60, f"{path}:{node.lineno}: {node.name} has {lines} lines"
