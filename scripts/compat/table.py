"""Formats docs/reference/versions.md from the results of all sets: a row for each set, then what was compared."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterable
from datetime import date

from results import Result, Test

# The heading for each file of tests, and what its tests compare.
_SECTIONS = {
    "test_controls": (
        "What upstream does alone",
        "Without the patches a training step is what the records say of that version: a loop over tokens or a scan, "
        "and a gradient of the chosen experts that MLX refuses or gives. With them it is neither a loop nor refused.",
    ),
    "test_training": (
        "Five steps of `deltatune train`",
        "Each run is repeated with the naive operator; every loss agrees within 1e-4.",
    ),
    "test_gradients": (
        "Gradients against the recurrence token by token",
        "The patched model against the unpatched one, every parameter. They may differ by what rounding does in the "
        "model.",
    ),
    "test_inference": (
        "Inference with and without the patches",
        "Prompts, decoding with a cache and images are the same bit for bit, but for qwen3_vl_moe's image features, "
        "which are [changed on purpose](../guides/vision.md#adapters). Prompts of 16 tokens or more, which deltatune "
        "computes itself where there is no Metal, are left to upstream here.",
    ),
    "test_on_metal": (
        "Where upstream would take its Metal kernels",
        "Metal is declared present, and its kernels are computed by array operations and refuse a gradient in MLX's "
        "words. Unpatched, a forgotten `model.train()` is refused; patched, the gradient is the naive operator's.",
    ),
}


def page(results: list[Result]) -> str:
    """The whole page."""
    parts = [_head(), _overview(results)]
    parts += [_section(file, *words, results) for file, words in _SECTIONS.items()]
    return "\n\n".join([*parts, _failures(results)]) + "\n"


def skips(results: list[Result]) -> list[str]:
    """Each reason for which tests were skipped, with the sets in which they were."""
    reasons: dict[str, list[int]] = {}
    for number, result in enumerate(results, 1):
        for test in _tests(result):
            if test.outcome == "skipped" and number not in reasons.setdefault(test.detail, []):
                reasons[test.detail].append(number)
    return [f"{reason} ({_sets(numbers)})" for reason, numbers in reasons.items()]


def _head() -> str:
    return "# Versions that were tried\n\n" + _filled(
        "`make compat` makes an environment for each set of versions, runs the patch tests and tests/compat in it, and "
        f"writes this page. {date.today().isoformat()}, {platform.system()} {platform.machine()}, CPU, Python "
        f"{platform.python_version()}. Not run on Apple hardware."
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _overview(results: list[Result]) -> str:
    rows = [_row(["set", "mlx", "mlx-lm", "mlx-vlm", "passed", "skipped", "failed"]), "|---|---|---|---|---|---|---|"]
    for number, result in enumerate(results, 1):
        found = [sum(test.outcome == outcome for test in _tests(result)) for outcome in ("passed", "skipped", "failed")]
        versions = result.versions
        rows.append(_row([number, versions.mlx, versions.mlx_lm, versions.mlx_vlm, *found]))
    return "\n".join(rows)


def _section(file: str, title: str, text: str, results: list[Result]) -> str:
    found = [test for result in results for test in _tests(result) if test.file == file]
    passed = [test for test in found if test.outcome == "passed"]
    errors = [float(part[6:]) for test in passed for part in test.detail.split("; ") if part.startswith("error ")]
    largest = f" Largest error: {max(errors):.0e}." if errors else ""
    return f"## {title}\n\n" + _filled(f"{text} Passed: {len(passed)} of {len(found)}.{largest}")


def _sets(numbers: list[int]) -> str:
    return ("set " if len(numbers) == 1 else "sets ") + ", ".join(map(str, numbers))


def _tests(result: Result) -> list[Test]:
    return [test for run in result.tests.values() for test in run]


def _failures(results: list[Result]) -> str:
    lines = [f"- {result.versions.name}: {each}" for result in results for each in result.failed]
    return "## Failures\n\n" + ("\n".join(lines) or "None.")
