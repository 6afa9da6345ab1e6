"""The state of a scan stays in registers on Metal: no array of tiles is left in memory once the text is optimised.

A loop that is not unrolled indexes its array at run time, and Apple's compiler keeps such an array in memory.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from beside import load
from deltatune.ops.gated_delta import fused
from deltatune.ops.gated_delta.tiling import choose_tiling
from deltatune.ops.kernels.launch import header

HOST = load(Path(__file__).with_name("host_machine.py"))
# Everything is inlined, as on a GPU.
OPTIONS = ["-O2", "-Wno-everything", "-mllvm", "-inline-threshold=100000", "-S", "-emit-llvm"]


def launches():
    tiling = choose_tiling("metal", (1, 70, 1, 1, 128, 128), mx.bfloat16, masked=False, segmented=False)
    q, gates = mx.zeros((1, 70, 1, 128), mx.bfloat16), mx.zeros((1, 70, 1))
    x = fused.KernelInputs(q, q, q, gates, gates, fused.no_initial_state(), None, None)
    prepared = {name: mx.zeros(*kind) for name, kind in fused.prepare(tiling, x).outputs.items()}
    last = mx.zeros((1, 1, 128, 128))
    return fused.scan(tiling, x, prepared), fused.reverse(tiling, x, prepared, {"dy": q, "d_last": last})


@pytest.mark.parametrize("launch", launches(), ids=lambda launch: launch.name)
def test_no_array_of_tiles_is_kept_in_memory(launch, tmp_path):
    source, made = tmp_path / "kernel.cpp", tmp_path / "kernel.ll"
    source.write_text(f'#include "{HOST.RUNTIME}"\n{header("metal")}{HOST.specialise(launch)[1]}')
    flags = [flag for flag in HOST.FLAGS + HOST.METAL if not flag.startswith("-O")]
    subprocess.run([*HOST.compiler(), *flags, *OPTIONS, str(source), "-o", str(made)], check=True)
    text = made.read_text()
    assert "4Tile" in text, "the kernel is there"
    assert not re.findall(r"alloca (\[\d+ x %struct\.Tile\w*\])", text)
