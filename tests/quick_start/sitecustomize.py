"""Makes the programs that tests start take less processor time, and do the same.

Python imports this module when it starts, from PYTHONPATH (tests/conftest.py). The structure of transformers' 1,640
model files is cached in a file, mlx.launch waits for its programs' output where it would poll their input, and files
are not brought to the disk.
"""

import marshal
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from select import select
from types import ModuleType

os.fsync = lambda descriptor: None
# pytest keeps its own cache there.
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".pytest_cache", "names_in_transformers")


def keep(reader: ModuleType, folder: str = FOLDER) -> None:
    """Let transformers' module `reader` keep in `folder` where the files of all models say that their names are."""
    plain = getattr(reader, "define_import_structure", None)
    known: dict[str, dict[frozenset[str], dict[str, object]]] = {}

    def kept(module_path: str, prefix: str | None = None) -> object:
        models = os.path.dirname(module_path) if os.path.isfile(module_path) else os.fspath(module_path)
        if os.path.basename(models) != "models":
            # The files of a single model.
            return plain(module_path, prefix)
        if models not in known:
            file = os.path.join(folder, _key(models, reader.__file__))
            known[models] = _read(file)
            if known[models] is None:
                known[models] = plain(models)
                _write(file, known[models])
        if prefix is None:
            return known[models]
        return {needs: {f"{prefix}.{name}": has for name, has in each.items()} for needs, each in known[models].items()}

    if plain is not None:
        reader.define_import_structure = kept


def wait(launcher: ModuleType) -> None:
    """Let mlx.launch's module `launcher` wait only for its programs' output; nothing is ever given to them."""
    launcher.select = lambda readable, _, failed, seconds: select([fd for fd in readable if fd], [], failed, seconds)


MENDED = {"transformers.utils.import_utils": keep, "mlx._distributed_utils.launch": wait}


class Finder:
    """Finds the modules in MENDED as Python would, and mends each once it is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in MENDED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            plain = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                MENDED[name](module)

            spec.loader.exec_module = exec_module
        return spec


def _key(*files: str) -> str:
    """Return a name that changes when transformers is installed anew."""
    found = [os.stat(file) for file in files]
    return "-".join([*(f"{each.st_ino:x}-{each.st_mtime_ns:x}" for each in found), sys.implementation.cache_tag])


def _read(file: str) -> object:
    try:
        with open(file, "rb") as stream:
            return marshal.loads(stream.read())
    except (OSError, EOFError, ValueError, TypeError):
        return None


def _write(file: str, found: object) -> None:
    """Write a file at once, if the folder can be written: the program goes on without it."""
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(f"{file}.{os.getpid()}", "wb") as stream:
            stream.write(marshal.dumps(found))
        os.replace(f"{file}.{os.getpid()}", file)
    except OSError:
        pass


sys.meta_path.insert(0, Finder())
