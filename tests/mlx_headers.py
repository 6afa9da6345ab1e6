"""Lets g++ read MLX's headers once, in place of once for each kernel that mx.compile builds on a CPU.

Such a kernel takes half a second of a core, of which four fifths are headers. Kernels and their flags stay as they are:
a g++ that comes first on PATH, also for programs that tests start, adds the folder with the headers as g++ keeps them.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

import mlx.core as mx

HEADER = "mlx/backend/cpu/compiled_preamble.h"
INCLUDE = Path(mx.__file__).parent / "include"
# MLX's own, by which g++ decides whether what it has kept may serve.
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC")
# The first kernel makes it. A process that makes it at the same time puts the same in its place.
_PROGRAM = """#!/bin/sh
if [ ! -e {kept} ]; then
    {compiler} {flags} -I {include} -x c++-header {header} -o {kept}.$$ 2>/dev/null && mv {kept}.$$ {kept}
fi
exec {compiler} -I {folder} "$@"
"""


def kept_in(environment: Path) -> Path:
    """Return the folder for an environment: g++ does not notice headers that have changed since."""
    return environment / f"mlx-headers-{mx.__version__}"


def read_once(folder: Path) -> bool:
    """Put a g++ into `folder`, and the folder first on PATH; return whether that can be done here."""
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None or not (INCLUDE / HEADER).is_file():
        return False
    program, kept = folder / "g++", folder / f"{HEADER}.gch"
    if Path(compiler) == program:
        return True
    words = {"kept": kept, "compiler": compiler, "include": INCLUDE, "header": INCLUDE / HEADER, "folder": folder}
    text = _PROGRAM.format(flags=" ".join(FLAGS), **{name: shlex.quote(str(word)) for name, word in words.items()})
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = folder / f"g++.{os.getpid()}"
        made.write_text(text, encoding="utf-8")
        made.chmod(0o755)
        made.replace(program)
    except OSError:
        return False
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    return True
