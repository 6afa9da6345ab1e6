"""`deltatune doctor`: shows the doctor's findings, on one screen or as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..ops.operator.operator import title_of
from ..upstream import Probed
from .examination import Examination, Forward, Layers, Patches, examine
from .implementations import Finding, Times

_GOOD, _WARNING, _BAD, _SKIPPED = ("✓", "green"), ("!", "yellow"), ("✗", "bold red"), ("–", "dim")
_MARKS = {
    "right": _GOOD,
    "TF32": _WARNING,
    "refused": _WARNING,
    "wrong": _BAD,
    "not covered": _SKIPPED,
    "absent": _GOOD,
    "avoided": _WARNING,
    "present": _BAD,
    "not run": _SKIPPED,
}


def print_examination(machine_readable: bool = False, model: str | None = None) -> int:
    """Examine this machine, and a model by its folder or repository, and print the result, if asked as JSON.

    Returns the exit code: 1 where training here would compute wrong numbers or the model cannot be trained, else 0.
    UserError if the model cannot be loaded.
    """
    if machine_readable:
        examination = examine(model)
        print(as_json(examination))
    else:
        console = Console(highlight=False)
        with console.status("Examining this machine: some seconds, or a minute or two the first time on a GPU"):
            examination = examine(model)
        if console.is_terminal:
            console.print(screen(examination))
        else:
            # Tables fill their lines with spaces, which nobody wants in a file or an issue.
            with console.capture() as captured:
                console.print(screen(examination))
            print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return int(examination.wrong)


def as_json(examination: Examination) -> str:
    """Everything found, as JSON; an infinite error or one that is NaN becomes a string."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, list) else value

    return json.dumps(plain(asdict(examination) | {"wrong": examination.wrong}), indent=1, allow_nan=False)


def screen(examination: Examination) -> RenderableType:
    """Everything found, in sections for the terminal; the verdict comes last."""
    faults = _marked((one.status, one.name, "" if one.status == "absent" else one.detail) for one in examination.faults)
    parts = [
        _section("This machine", _facts(examination.machine)),
        _section("Versions", Text(", ".join(f"{name} {version}" for name, version in examination.versions.items()))),
        *(
            _section(
                f"{title_of(operator.name).capitalize()}: {operator.order}", _marked(map(_finding, operator.findings))
            )
            for operator in examination.operators
        ),
        *_times(examination.times),
        _section("Known faults, looked for here", faults),
        _section("Patches", _patches(examination.patches)),
        _section("Private names of upstream", _private_names(examination.private_names)),
    ]
    if examination.model is not None:
        parts.append(_section(f"Model: {examination.model.path}", _model(examination.model)))
    return Group(*parts, _verdict(examination))


def _times(comparisons: list[Times]) -> list[RenderableType]:
    table = _columns(None)
    for times in comparisons:
        table.add_row(Text(times.calls).append(f"\n{times}", style="dim"))
    return [_section("Times of a forward and a backward pass", table)] if comparisons else []


def _section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold"), Padding(body, (0, 0, 1, 2)))


def _columns(*widths: int | None) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for width in widths:
        table.add_column(width=width, overflow="fold")
    return table


def _facts(facts: dict[str, str]) -> Table:
    table = _columns(None, None)
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), Text(value))
    return table


# Status, the subject of the examination, and the reason for the status.
Line = tuple[str, str, str]


def _marked(lines: Iterable[Line]) -> Table:
    """One row for each line, with a mark for its status; a status that is not good is named, with its reason below."""
    table = _columns(1, None)
    for status, what, why in lines:
        sign, style = _MARKS[status]
        text = Text(what)
        if (sign, style) == _GOOD:
            text.append(f"  {why}", style="dim")
        else:
            text.append(f"  {status}", style=style)
            text.append(f"\n{why}", style="dim" if style == "dim" else "")
        table.add_row(Text(sign, style=style), text)
    return table


def _finding(finding: Finding) -> Line:
    what = f"{finding.implementation}: {finding.shape}"
    if finding.status == "right":
        worst = finding.errors[finding.worst] if finding.worst else 0.0
        return finding.status, what, f"error {worst:.0e}, {finding.bound:.0e} allowed"
    return finding.status, what, finding.detail


def _add(table: Table, mark: tuple[str, str], text: str, *, style: str = "", dim: str = "") -> None:
    """Add a row with a mark, a text in a style, and further text that is dim."""
    sign, of_sign = mark
    table.add_row(Text(sign, style=of_sign), Text.assemble((text, style), (dim, "dim")))


def _patches(patches: Patches) -> RenderableType:
    table = _columns(1, None)
    if patches.applied:
        counts = Counter(patch.package for patch in patches.applied)
        packages = ", ".join(f"{count} of {package}" for package, count in counts.most_common())
        _add(table, _GOOD, f"{len(patches.applied)} functions replaced: {packages}", dim="\n--json names each")
    for message in patches.untried:
        _add(table, _SKIPPED, message)
    for message in patches.left_alone:
        _add(table, _WARNING, message)
    for message in patches.absent or ([] if table.row_count else ["none applies"]):
        _add(table, _SKIPPED, message, style="dim")
    return table


def _private_names(names: list[Probed]) -> RenderableType:
    table, gone = _columns(1, None), [name for name in names if not name.present]
    _add(table, _GOOD, f"{len(names) - len(gone)} of {len(names)} are as deltatune knows them")
    for name in gone:
        _add(table, _WARNING, f"{name.name} is gone. {name.without}")
    return table


def _model(layers: Layers) -> RenderableType:
    table = _columns(1, None)
    kinds = ", ".join(f"{count} {kind}" for kind, count in layers.kinds.items())
    experts = f"; experts in {layers.experts}" if layers.experts else ""
    _add(table, _GOOD, f"{sum(layers.kinds.values())} layers: {kinds}{experts}")
    for forward in layers.forwards:
        _forward(table, forward)
    for sentence in layers.known_faults:
        _add(table, _WARNING, sentence)
    if layers.without_row is not None:
        _add(table, _BAD, layers.without_row, style="red")
    for message in layers.left_out:
        _add(table, _SKIPPED, message, style="dim")
    return table


def _forward(table: Table, forward: Forward) -> None:
    """Add a line for each operator on the implementations that run its layers, and one line for each custom kernel."""
    through = f"  on {forward.data}, through {forward.package}"
    for operator, counts in forward.served.items():
        layers, others = sum(counts.values()), counts.get("", 0)
        by = ", ".join(f"{name} in {count}" for name, count in counts.items() if name)
        text = f"{layers - others} of {layers} layers with {operator} train with deltatune's{f': {by}' if by else ''}"
        # Upstream's attention and experts are right as well, only slower; its gated delta is a loop.
        _add(table, _WARNING if others and operator == "gated delta" else _GOOD, text, dim=through)
    for path in forward.unreached:
        _add(table, ("", ""), f"{path} runs other code: its speed, memory and gradients", style="yellow")
    if forward.untraced is not None:
        _add(table, _WARNING, "custom kernels: not known", dim=f"{through}\n{forward.untraced}")
        return
    if not forward.kernels:
        _add(table, _GOOD, "reaches no custom kernel", dim=through)
    for kernel in forward.kernels:
        if kernel.differentiable:
            _add(
                table, _GOOD, f"kernel {kernel.name}: has a gradient, or needs none", dim=f"{through}\n{kernel.caller}"
            )
    for message in forward.untrainable:
        _add(table, _BAD, message, style="red", dim=through)


def _verdict(examination: Examination) -> RenderableType:
    words, colour = "Nothing here would train wrong.", "red" if examination.wrong else "green"
    if kernels := len(examination.untrainable):
        words, colour = f"This model cannot be trained on an Apple GPU: {kernels} kernels without a gradient.", "red"
    elif examination.faulty:
        words = "Something here would train wrong: see ✗ above, and please report it with --json."
    elif examination.wrong:
        words = "This model and its tokenizer do not fit: see ✗ above."
    return Group(Rule(style=colour), Text(words, style=f"bold {colour}"))
