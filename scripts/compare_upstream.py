#!/usr/bin/env python3
"""Print which functions that deltatune replaces differ between two versions of a package of upstream.

usage: scripts/compare_upstream.py OLD NEW

OLD and NEW are wheels (`pip download --no-deps mlx-lm==0.32.2`) or folders that hold the package. For every target of
the records, its text is compared, and that of its class; annotations and comments count too. Compiled functions of
mlx.core have no text, and are left out. The exit code is 1 if something differs.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

import deltatune  # noqa: F401  (before mlx)
from deltatune import patches

PACKAGES = ("mlx_lm", "mlx_vlm", "mlx")


def source(place: Path, module: str) -> str | None:
    """The text of a module in a wheel or a folder, or None."""
    stem = module.replace(".", "/")
    for name in (f"{stem}.py", f"{stem}/__init__.py"):
        if place.is_dir():
            if (place / name).is_file():
                return (place / name).read_text(encoding="utf-8")
        else:
            with zipfile.ZipFile(place) as wheel:
                if name in wheel.namelist():
                    return wheel.read(name).decode()
    return None


def definition(text: str, name: str) -> str | None:
    """The text of a function, or of the class that a method belongs to, or None."""
    first = name.partition(".")[0]
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in ast.parse(text).body:
        if isinstance(node, kinds) and node.name == first:
            return ast.get_source_segment(text, node)
    return None


def state(old: str | None, new: str | None) -> str:
    """What became of a definition, in a word."""
    if old == new:
        return "absent" if old is None else "same"
    return "new" if old is None else "gone" if new is None else "changed"


def compare(old: Path, new: Path) -> dict[str, str]:
    """What became of each target, by its full name."""
    records = (*patches.PATCHES, *patches.ON_CUDA, *patches.ON_METAL, *patches.ON_CPU)
    held = {package for package in PACKAGES if any(source(place, package) is not None for place in (old, new))}
    found = {}
    for record in records:
        if record.package not in held or record.module == "mlx.core":
            continue
        texts = (source(place, record.module) for place in (old, new))
        found[record.target] = state(*(None if text is None else definition(text, record.name) for text in texts))
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or not all(Path(each).exists() for each in arguments):
        sys.stderr.write("usage: scripts/compare_upstream.py OLD NEW   (wheels, or folders that hold the package)\n")
        return 2
    found = compare(*map(Path, arguments))
    different = {target: what for target, what in found.items() if what not in ("same", "absent")}
    for target, what in different.items():
        print(f"{what:8} {target}")
    print(f"{len(different)} of {len(found)} targets differ.")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
