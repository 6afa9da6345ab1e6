"""Writes the self-test's file, and formats the row for docs/hardware.md from it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..doctor import inventory
from ..doctor.examination import Examination
from ..machine import atomic_files, packages
from ..ops.operator import verdicts
from ..plan.device_limits import device_limits
from .outcome import FAILED, NOT_RUN, PASSED, Check, Outcome
from .times import LOOP, NATIVE, OURS, Timing

FILE = "deltatune-selftest.json"
# Environment variables that change results or speed: of MLX, deltatune, Metal's validation layers and BLAS.
_VARIABLES = ("MLX_", "DELTATUNE_", "MTL_", "METAL_", "OPENBLAS_", "OMP_")
HEADER = ("machine", "memory", "date", "versions", "checks", "gated_delta, ms a call", "peak memory of it", "demo")


class SelftestRecord:
    """The results so far. They are written after every check, so that a crash of the machine leaves a file."""

    def __init__(self, path: Path, quick: bool):
        self.path = path
        self.timings: list[Timing] = []
        limit = device_limits()
        self.content: dict[str, Any] = {
            "what": "deltatune selftest",
            "quick": quick,
            "finished": False,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "versions": packages.versions(),
            "machine": inventory.machine(),
            "device": verdicts.machine()["backend"],
            "driver": verdicts.machine()["driver"],
            "memory_bytes": limit.bytes,
            "mlx_build": inventory.mlx_build(),
            "thermal_state": {"before": inventory.thermal_state()},
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
            "checks": [],
        }

    def add(self, section: str, check: Check, outcome: Outcome, seconds: float) -> None:
        """Add the outcome of a check, and write the file."""
        entry = {"section": section, "name": check.name} | asdict(outcome) | {"seconds": round(seconds, 2)}
        self.content["checks"].append(entry)
        self.write()

    def finish(self, seconds: float, examination: Examination) -> None:
        """Add the doctor's full findings and the verdict after the last check, and write the file."""
        self.content |= {"doctor": asdict(examination), "finished": True, "seconds": round(seconds, 1)}
        self.content["thermal_state"]["after"] = inventory.thermal_state()
        self.content["times"] = [asdict(timing) for timing in self.timings]
        self.content["verdict"] = PASSED if self.passed else FAILED
        self.content["line"] = hardware_line(self.content)
        self.write()

    def write(self) -> None:
        """Write the file in one move; raises OSError where that fails."""
        text = json.dumps(_plain(self.content, os.path.expanduser("~")), indent=1, allow_nan=False)
        atomic_files.write(self.path, (text + "\n").encode())

    @property
    def passed(self) -> bool:
        return not self.count(FAILED)

    def count(self, status: str) -> int:
        """How many checks have this status."""
        return _count(self.content, status)


def _count(content: dict[str, Any], status: str) -> int:
    return sum(check["status"] == status for check in content["checks"])


def _plain(value: Any, home: str) -> Any:
    """Return a value that JSON can hold: infinity and NaN become strings. The name of the home folder is private."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(entry, home) for key, entry in value.items()}
    if isinstance(value, str) and home.startswith("/") and home != "/":
        return value.replace(home, "~")
    return [_plain(entry, home) for entry in value] if isinstance(value, list | tuple) else value


def hardware_line(content: dict[str, Any]) -> str:
    """The row for docs/hardware.md: machine, versions, outcomes of the checks, and times of the longest call."""
    facts, versions = content["machine"], content["versions"]
    device = facts["chip"] if content["device"] == "cpu" else facts["device"]
    counts = [f"{_count(content, PASSED)} passed"]
    counts += [f"**{_count(content, FAILED)} failed**"] if _count(content, FAILED) else []
    counts += [f"{_count(content, NOT_RUN)} not for this machine"] if _count(content, NOT_RUN) else []
    demo = next((c["detail"].partition(";")[0] for c in content["checks"] if c["name"] == "demo"), "not run")
    size, times, peaks = _longest(content.get("times", []))
    cells = (
        f"{device}; {facts['system']}",
        f"{content['memory_bytes'] / 2**30:.0f} GiB" if content["memory_bytes"] else "not known",
        content["date"].partition(" ")[0],
        ", ".join(f"{name} {versions[name]}" for name in ("deltatune", "mlx", "mlx-lm") if name in versions),
        ", ".join(counts),
        f"{size}: {times}" if size else "not measured",
        peaks or "not measured",
        demo,
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _longest(times: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Name, times and peaks of the longest size, preferring sizes at which several implementations were measured."""
    measured = [timing for timing in times if timing["milliseconds"] is not None]
    lengths = {timing["size"]: timing["tokens"] for timing in measured}
    counted = [(sum(timing["size"] == size for timing in measured) > 1, lengths[size], size) for size in lengths]
    if not counted:
        return "", "", ""
    size = max(counted)[2]
    here = {timing["implementation"]: timing for timing in measured if timing["size"] == size}
    order = [name for name in (OURS, LOOP, NATIVE) if name in here]
    spent = ", ".join(f"{name} {here[name]['milliseconds']:,.1f}" for name in order)
    return size, spent, ", ".join(f"{name} {here[name]['peak_bytes'] / 1e6:,.0f} MB" for name in order)
