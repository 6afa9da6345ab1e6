"""Runs clang on the text of kernels: for errors, for implicit conversions, and for LLVM's language.

The clang is that of the ziglang package. No machine code is made.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

from deltatune.ops.kernels.launch import Launch

from . import text

_ZIG = Path(importlib.util.find_spec("ziglang").origin).with_name("zig")  # type: ignore[union-attr, arg-type]
_CLANG = [str(_ZIG), "clang", "-cc1", "-triple", "spir64-unknown-unknown"]
# C++ for OpenCL has methods for address spaces, which MLX's prelude needs; plain C++ has no generic pointers.
_STRICT = ["-x", "clcpp", "-cl-std=clc++2021", "-cl-ext=+cl_khr_fp16", "-Wno-everything"]
_PLAIN = ["-x", "c++", "-std=c++14", "-fnative-half-type", "-O2", "-Wno-everything", "-emit-llvm"]
# Everything is inlined, and equal stores of two branches stay where they are: joined, they hide which element is meant.
_PLAIN += ["-mllvm", "-inline-threshold=1000000", "-mllvm", "-simplifycfg-sink-common=false"]
_START = '\n#line 1 "kernel.metal"\n'
# A conversion to bf16 that nobody wrote down.
_TO_BF16 = re.compile(r"ImplicitCastExpr.*'(?:\w+':')?__bf16' <(?:Floating|IntegralToFloating)")
_FUNCTION = re.compile(r"(?:Function|CXXMethod|CXXConversion)Decl .* ([~\w]+|operator\S+) '")


class RefusedError(ValueError):
    """What clang says of a text that it does not take."""


def _ran(source: str, flags: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return _ran_in(Path(folder), source, [*flags, "-o", "-"])


def _ran_in(folder: Path, source: str, flags: list[str]) -> str:
    file = folder / "kernel.cpp"
    file.write_text(source)
    ended = subprocess.run([*_CLANG, *flags, str(file)], capture_output=True, text=True)
    if ended.returncode:
        raise RefusedError(ended.stderr[:3000])
    return ended.stdout


def _conversions(source: str, *flags: str) -> Counter[str]:
    """Count implicit conversions to bf16, by the function that each is in."""
    found, function = Counter(), ""
    for line in _ran(source, [*_STRICT, *flags, "-ast-dump"]).splitlines():
        if "Decl 0x" in line and (named := _FUNCTION.search(line)):
            function = named[1]
        elif "__bf16' <" in line and _TO_BF16.search(line) and "part_of_explicit_cast" not in line:
            found[function] += 1
    return found


@cache
def _prelude() -> tuple[tempfile.TemporaryDirectory[str], Counter[str]]:
    """Return a folder with what comes before every kernel, compiled, and the conversions in it."""
    folder, source = tempfile.TemporaryDirectory(), text.before_kernels()
    _ran_in(Path(folder.name), source, [*_STRICT, "-emit-pch", "-o", f"{folder.name}/prelude.pch"])
    return folder, _conversions(source)


def check(launch: Launch, kernel: str | None = None) -> list[str]:
    """Compile a launch's kernel after MLX's prelude, and return the functions that convert to bf16 implicitly.

    Clang accepts such a conversion, and Metal refuses it. Those in MLX's own text are not among them: its stand-in for
    Metal's library is to blame. `kernel` is another text of the kernel; RefusedError where clang does not take it.
    """
    folder, of_prelude = _prelude()
    compiled = ("-include-pch", str(Path(folder.name) / "prelude.pch"))
    found = _conversions(_START + (kernel or text.kernel(launch)), *compiled)
    return sorted((found - of_prelude).elements())


def lowered(launch: Launch, kernel: str | None = None) -> str:
    """Return the text of a launch's kernel in LLVM's language, with everything inlined."""
    return _ran(text.library() + _START + (kernel or text.kernel(launch)), _PLAIN)
