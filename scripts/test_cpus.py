#!/usr/bin/env python3
"""Run the numeric tests with the BLAS kernels of other CPUs than this one.

OpenBLAS has kernels for several families of CPUs and chooses those of the machine. OPENBLAS_CORETYPE forces others,
where the CPU has their instructions. The usual test suite runs this machine's kernels, so they are left out here.

usage: scripts/test_cpus.py [NAME ...]
Each NAME is a core type below. Only the named ones are run, and this machine's own as well where it is named. Without
names, those that are marked as rare are left out.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The tests that use the BLAS. Tests among them that do not use it have the marker `any_blas`.
FOLDERS = ("tests/ops", "tests/patches", "tests/oracle")
# Tests elsewhere that compare two computations of a layer or a model. They take eight seconds in all.
ALSO = (
    "tests/lora/test_experts.py",
    "tests/lora/test_linear.py",
    "tests/models/test_head.py",
    "tests/train/test_resized.py::test_a_run_from_start_to_merge",
    "tests/train/test_step.py",
    "tests/train/updates/test_routers.py",
)
# These tests run kernel texts on the host machine and compare them with float64, or multiply nothing.
NOT = ("tests/ops/kernels", "tests/ops/pointwise", "tests/ops/decoding", "tests/ops/operator", "tests/ops/tracing")
PROBE = "from deltatune.machine import blas; print(blas.status().kernels)"


@dataclass(frozen=True)
class CoreType:
    """A value of OPENBLAS_CORETYPE, the CPU flags that it needs, and the kernels that smaller builds use instead.

    A `rare` one is of CPUs that hardly anybody trains on.
    """

    name: str
    flags: tuple[str, ...]
    stand_ins: tuple[str, ...] = ()
    rare: bool = False


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
CORE_TYPES = (
    CoreType("Nehalem", ("sse4_2",)),
    CoreType("Sandybridge", ("avx",), rare=True),
    CoreType("Haswell", ("avx2", "fma")),
    CoreType("Zen", ("avx2", "fma"), ("Haswell",)),
    CoreType("SkylakeX", _AVX512),
    CoreType("Cooperlake", (*_AVX512, "avx512_bf16"), ("SkylakeX",)),
    CoreType("SapphireRapids", (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"), ("Cooperlake", "SkylakeX")),
)


def main(names: list[str]) -> int:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        print(f"Nothing to run: core types are tried on x86-64 Linux, and this is {sys.platform} {platform.machine()}.")
        return 0
    unknown = sorted(set(names) - {core.name for core in CORE_TYPES})
    if unknown:
        print(f"{', '.join(unknown)}: not known; expected one of {', '.join(core.name for core in CORE_TYPES)}.")
        return 2
    own = kernels(None)
    if own == "None":
        print("MLX does not run on OpenBLAS here (deltatune doctor says why), so there are no kernels to choose from.")
        return 1
    chosen, wrong = choose(names, own)
    if not chosen:
        print("No other kernels to test." if not wrong else "")
        return int(wrong)
    print(f"Running {', '.join(chosen)}, one BLAS thread a process.", flush=True)
    return int(any([wrong, *(code != 0 for code in run(chosen))]))


def choose(names: list[str], own: str) -> tuple[list[str], bool]:
    """Print what is run and why; returns the core types to run, and whether OpenBLAS failed to give one to this CPU."""
    flags, chosen, wrong = cpu_flags(), [], False
    tested = {} if names else {own: "this machine's own, which `make test` runs"}
    for core in CORE_TYPES:
        if names and core.name not in names:
            continue
        if core.rare and not names:
            print(f"{core.name:15} not run unless it is named: rare")
            continue
        missing = [flag for flag in core.flags if flag not in flags]
        answer = None if missing else kernels(core.name)
        if missing:
            said = f"cannot run: this CPU has no {', '.join(missing)}"
        elif answer not in (core.name, *core.stand_ins):
            said, wrong = f"WRONG: OpenBLAS answers with the kernels of {answer}", True
        elif answer in tested:
            stands = "" if answer == core.name else f"{answer}'s kernels in this OpenBLAS: "
            said = f"not again: {stands}{tested[answer]}"
        else:
            said, tested[answer] = "runs" if answer == core.name else f"runs as {answer}", "run above"
            chosen.append(answer)
        print(f"{core.name:15} {said}")
    return chosen, wrong


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def kernels(core: str | None) -> str:
    """The name of the kernels that OpenBLAS uses in a new process that asks for those of `core` (None: for none)."""
    command = [sys.executable, "-c", PROBE]
    return subprocess.run(command, env=environment(core), capture_output=True, text=True, check=True).stdout.strip()


def environment(core: str | None) -> dict[str, str]:
    env = {**os.environ, "DELTATUNE_THREADS": "1"}
    if core is not None:
        env["OPENBLAS_CORETYPE"] = core
    return env


def run(chosen: list[str]) -> list[int]:
    """Run all core types side by side, and print the output of each when it ends."""
    ignored = [f"--ignore={folder}" for folder in NOT]
    each = len(os.sched_getaffinity(0)) // len(chosen)
    # One core type alone would leave the other cores idle.
    divided = ["-n", str(each), "--dist", "loadfile", "--no-loadscope-reorder"] if each > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for core in chosen:
            output = Path(folder) / core
            command = [sys.executable, "-m", "pytest", *FOLDERS, *ALSO, *ignored, "-m", "not any_blas and not weekly"]
            command += ["--kernels", core, *divided]
            with output.open("w") as file:
                process = subprocess.Popen(command, cwd=ROOT, env=environment(core), stdout=file, stderr=file)
            started.append((core, process, output))
        codes = []
        for core, process, output in started:
            codes.append(process.wait())
            print(f"\n{core}: {'passed' if codes[-1] == 0 else f'FAILED (pytest ends with {codes[-1]})'}")
            print(output.read_text(), flush=True)
    return codes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
