"""Runs the checks of a set of versions, each in its own process, and reads pytest's reports."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from environment import FOLDER, ROOT
from versions import Versions

# pytest's arguments by the name of the run. The patch tests recognise versions by structure, and skip with a reason.
RUNS = {
    "patches": ["tests/patches"],
    "compat": ["-m", "compat", "tests/compat"],
    "metal": ["-m", "compat", "-p", "metal_present", "tests/compat"],
}
_LIMIT = 1800
_ASKED = "import importlib.metadata as m; print(*(m.version(n) for n in ('transformers', 'numpy')), sep='\\n')"


@dataclass(frozen=True)
class Test:
    """A test with its outcome (passed, failed or skipped) and the reason, or the figures that it measured."""

    file: str
    name: str
    outcome: str
    detail: str


@dataclass
class Result:
    """The results of one set; `broken` has the runs that did not end, with pytest's last line."""

    versions: Versions
    transformers: str
    tests: dict[str, list[Test]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def counts(self, run: str) -> str:
        """How many tests of a run passed, were skipped and failed."""
        found = Counter(test.outcome for test in self.tests.get(run, []))
        return ", ".join(f"{found[name]} {name}" for name in ("passed", "skipped", "failed") if found[name]) or "none"

    @property
    def failed(self) -> list[str]:
        tests = [test for run in self.tests.values() for test in run if test.outcome == "failed"]
        return [f"{test.file}::{test.name}: {test.detail}" for test in tests] + self.broken


def check(versions: Versions, python: Path) -> Result:
    """Run every check in the environment of `python`."""
    asked = subprocess.run([str(python), "-c", _ASKED], capture_output=True, text=True, check=True)
    result = Result(versions, asked.stdout.split()[0])
    path = os.pathsep.join([str(ROOT / "tests" / "compat"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    for run, arguments in RUNS.items():
        report = FOLDER / f"{versions.name}.{run}.xml"
        report.unlink(missing_ok=True)
        command = [
            str(python),
            "-m",
            "pytest",
            *arguments,
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
        ]
        print(f"{versions.name}: {run}", flush=True)
        try:
            code = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, timeout=_LIMIT).returncode
        except subprocess.TimeoutExpired:
            code = -1
        result.tests[run] = _read(report) if report.is_file() else []
        if code not in (0, 1) or not result.tests[run]:
            result.broken.append(f"{run}: pytest ended with {code}, {len(result.tests[run])} tests read")
        print(f"{versions.name}: {run}: {result.counts(run)}", file=sys.stderr, flush=True)
    return result


def _read(report: Path) -> list[Test]:
    tests = []
    for case in ElementTree.parse(report).iter("testcase"):
        file = (case.get("classname") or "").rpartition(".")[2] or case.get("name") or ""
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        skipped = case.find("skipped")
        if problem is not None:
            outcome, detail = "failed", (problem.get("message") or "").splitlines()[:1]
        elif skipped is not None:
            outcome, detail = "skipped", [skipped.get("message") or ""]
        else:
            outcome, detail = "passed", [_figure(each) for each in case.iter("property")]
        tests.append(Test(file, case.get("name") or "", outcome, "; ".join(detail)))
    return tests


def _figure(entry: ElementTree.Element) -> str:
    name, value = entry.get("name") or "", entry.get("value") or ""
    if name in ("error", "changed"):
        return f"{name} {float(value):.0e}"
    return f"{name} {value}"
