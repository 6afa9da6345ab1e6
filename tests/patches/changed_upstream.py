"""Makes a stand-in for a package of upstream: its own files under another version, with some of its code changed."""

import importlib.util
import os
import re
import shutil
from pathlib import Path

# Gives mlx.core another version when it is imported, since its library cannot be copied.
_SITE = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mlx.core":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.__version__ = {version!r}
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def stand_in(
    folder: Path,
    version: str,
    changes: dict[str, list[tuple[str, str, str]]],
    mlx: str | None = None,
    name: str = "mlx_lm",
    renamed: dict[str, str] | None = None,
) -> str:
    """Write a package's files into a folder; return a PYTHONPATH under which they come before all others.

    `changes` replace, by module of its `models`, the second text, behind the first, by the third, or write a module;
    `mlx` is the version that mlx states, and `renamed` are names that all files have in another form.
    """
    package = Path(importlib.util.find_spec(name).origin).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / name, copy_function=os.symlink, ignore=ignored)
    stated = folder / name / ("_version.py" if name == "mlx_lm" else "version.py")
    _write(stated, f"__version__ = {version!r}\n")
    for old, new in (renamed or {}).items():
        for path in (folder / name).rglob("*.py"):
            text = path.read_text()
            if re.search(rf"\b{old}\b", text):
                _write(path, re.sub(rf"\b{old}\b", new, text))
    for module, edits in changes.items():
        path = folder / name / "models" / f"{module}.py"
        text = path.read_text() if path.exists() else ""
        for after, old, new in edits:
            at = text.index(old, text.index(after))
            text = text[:at] + new + text[at + len(old) :]
        _write(path, text)
    if mlx is not None:
        (folder / "sitecustomize.py").write_text(_SITE.format(version=mlx))
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # The file of the installed package is only linked.
    path.write_text(text)
