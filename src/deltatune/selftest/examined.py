"""Runs the doctor, with one check for each kind of finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache, partial

from ..doctor import probes
from ..doctor.examination import Examination, examine
from ..doctor.probes import Fault
from .outcome import FAILED, NOT_RUN, PASSED, Check, Outcome

_STATUSES = {"absent": PASSED, "avoided": PASSED, "present": FAILED, "not run": NOT_RUN}


@cache
def examination() -> Examination:
    """The doctor's examination of this machine, which runs once per process."""
    return examine()


def _kernels() -> Outcome:
    """The doctor's trials of every operator; a refused implementation is no failure, as training does not use it."""
    findings = [finding for operator in examination().operators for finding in operator.findings]
    counts = Counter(finding.status for finding in findings)
    wrong = [finding.detail for finding in findings if finding.wrong]
    detail = ", ".join(f"{count} {status}" for status, count in counts.items())
    return Outcome(FAILED if wrong else PASSED, "; ".join([detail, *wrong]))


def _fault(name: str) -> Outcome:
    fault: Fault = next(fault for fault in examination().faults if fault.name == name)
    detail = fault.detail if fault.status == "not run" else f"{fault.status}: {fault.detail}"
    return Outcome(_STATUSES[fault.status], detail)


def _patches() -> Outcome:
    patches = examination().patches
    detail = f"{len(patches.applied)} in force"
    return Outcome(FAILED if patches.left_alone else PASSED, "; ".join([detail, *patches.left_alone]))


def checks(quick: bool) -> Iterator[Check]:
    """The same checks whether `quick` or not, since the doctor takes seconds."""
    yield Check("doctor: kernels", _kernels)
    for name, _ in probes.PROBES:
        yield Check(f"doctor: {name}", partial(_fault, name))
    yield Check("doctor: patches", _patches)
