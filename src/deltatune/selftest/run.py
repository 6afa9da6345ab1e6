"""Runs the whole self-test: one check after another, each printed and recorded when it ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from rich.console import Console

from ..doctor import probes
from ..doctor.examination import Examination, examine
from ..doctor.probes import Fault
from ..errors import UserError
from ..ops import operators
from . import controls, experts, hardware, implementations, replays, times, training
from .outcome import FAILED, NOT_RUN, PASSED, Check, Outcome, attempt
from .record import FILE, SelftestRecord
from .screen import SelftestScreen
from .times import Timing

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


def doctor_checks(quick: bool) -> Iterator[Check]:
    """The same checks whether `quick` or not, since the doctor takes seconds."""
    yield Check("doctor: kernels", _kernels)
    for name, _ in probes.PROBES:
        yield Check(f"doctor: {name}", partial(_fault, name))
    yield Check("doctor: patches", _patches)


def sections(quick: bool, console: Console, timings: list[Timing]) -> Iterator[tuple[str, Iterator[Check]]]:
    """Yield the title of each section and its checks; quick and decisive ones come first.

    timings: the checks of times append their measurements to this list.
    """
    yield "Doctor", doctor_checks(quick)
    for operator in operators.OPERATORS:
        yield f"{operator.title.capitalize()} against float64", implementations.checks(operator, quick)
    yield "Experts against float64", experts.checks(quick)
    yield "Kernels against float64", implementations.kernel_checks(quick)
    yield "What upstream does alone", controls.checks(quick)
    yield "gated_delta forward and backward: time and memory", times.checks(quick, timings)
    yield "Times that decide which code is fast here", hardware.checks(quick)
    yield "Thirty steps against transformers and PEFT", replays.checks(quick)
    yield "Training", training.checks(quick)
    yield "Demo", training.demo_checks(quick, console)


def names(quick: bool = False) -> list[str]:
    """The names of all checks, none of which is run."""
    console = Console(quiet=True)
    return [check.name for _, checks in sections(quick, console, []) for check in checks]


def run_selftest(quick: bool = False, console: Console | None = None) -> int:
    """Run every check on this machine, and write deltatune-selftest.json to the current folder.

    A `quick` one has small sizes, one replay for each kind of adapter and no demo, and takes twenty seconds. Returns
    the exit code: 0 where no check failed, else 1. UserError if the file cannot be written.
    """
    console = console or Console(highlight=False)
    started = time.perf_counter()
    record, screen = SelftestRecord(Path(FILE), quick), SelftestScreen(console)
    try:
        record.write()
    except OSError as error:
        raise UserError(
            f"{FILE}: cannot be written here ({error.strerror}); change to a folder that you may write to."
        ) from error
    screen.start(record.content["machine"], record.content["versions"], FILE)
    for title, checks in sections(quick, console, record.timings):
        for index, check in enumerate(checks):
            if index == 0:
                screen.section(title)
            begun = time.perf_counter()
            with screen.working(check):
                outcome = attempt(check)
            seconds = time.perf_counter() - begun
            record.add(title, check, outcome, seconds)
            screen.outcome(check, outcome, seconds)
        if title.endswith("time and memory"):
            screen.times(record.timings)
    record.finish(time.perf_counter() - started, examination())
    screen.end(record)
    return 0 if record.passed else 1
