"""docs/compat.md from the results of all sets: a column a set, a row a check."""

from __future__ import annotations

import platform
from collections import Counter
from datetime import date

from results import Result

_HEADINGS = {
    "test_training": (
        "Five steps of `deltatune train`",
        "The first and the last loss. Each run was repeated with the naive operator, and every loss was within 1e-4.",
    ),
    "test_gradients": (
        "Gradients against the recurrence token by token",
        "Of every parameter, through upstream's own forward pass: the patched model against the unpatched one, whose "
        "recurrence is the loop over tokens. Relative error of all of them together; at most 5e-5 is taken as equal.",
    ),
    "test_controls": (
        "Without the patches, and with them",
        "Operations in the graph of a training step that one more token costs (three gated-delta layers), before and "
        "after. mlx-vlm trains qwen3_5 through a scan in chunks where there are few: its cost is memory and rounding, "
        "not a loop; with experts ours has more, a product for each tile. And whether MLX refuses the gradient of the "
        "chosen experts: unpatched as written, patched never.",
    ),
    "test_on_metal": (
        "The same, where upstream would take its Metal kernels",
        "Metal is declared present, and its kernels are computed by array operations and refuse a gradient in MLX's "
        "words (tests/compat/metal.py). Unpatched as written; patched, the gradient is that of the naive operator.",
    ),
    "test_inference": (
        "Inference with and without the patches",
        "Prompts, decoding with a cache, images: bit for bit the same. qwen3_vl_moe's image features are changed on "
        "purpose ([vision.md](vision.md#what-is-patched-in-mlx-vlm)); by how much is given, its text is the same.",
    ),
}


def page(results: list[Result]) -> str:
    """The whole page."""
    parts = [_head(results), _overview(results)]
    parts += [_section(file, *heading, results) for file, heading in _HEADINGS.items()]
    parts += [_failures(results), _skips(results)]
    return "\n\n".join(parts) + "\n"


def _head(results: list[Result]) -> str:
    machine = f"{platform.system()} {platform.machine()}, CPU, Python {platform.python_version()}"
    return (
        "# Versions that were tried\n\n"
        "`make compat` makes an environment for each set of versions below, runs the patch tests and tests/compat in "
        "it, and writes this page. Nothing here is written by hand (scripts/compat).\n\n"
        f"{date.today().isoformat()}, {machine}. Metal is a stand-in wherever it is named: not run on Apple hardware. "
        "mlx-vlm 0.6.2 builds a Metal kernel when it is imported, so a stand-in lets it be built there."
    )


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _columns(results: list[Result], first: str = "") -> str:
    names = [f"mlx {r.versions.mlx}, mlx-lm {r.versions.mlx_lm}, mlx-vlm {r.versions.mlx_vlm}" for r in results]
    return _row([first, *names]) + "\n" + _row(["---"] * (len(results) + 1))


def _overview(results: list[Result]) -> str:
    rows = [_columns(results)]
    rows.append(_row(["transformers", *(r.transformers for r in results)]))
    rows.append(_row(["stand-in for imports", *(r.versions.plugin or "none" for r in results)]))
    names = {"patches": "patch tests", "compat": "checks of this page", "metal": "the same, Metal declared present"}
    rows += [_row([label, *(r.counts(run) for r in results)]) for run, label in names.items()]
    rows.append(_row(["failures", *(str(len(r.failed) or "none") for r in results)]))
    return "\n".join(rows)


def _section(file: str, title: str, text: str, results: list[Result]) -> str:
    found = [{t.name: t for run in r.tests.values() for t in run if t.file == file} for r in results]
    names = list(dict.fromkeys(name for tests in found for name in tests))
    rows = [_columns(results)]
    for name in names:
        cells = []
        for tests in found:
            test = tests.get(name)
            passed = test is not None and test.outcome == "passed"
            cells.append((test.detail or "ok") if passed else ("not run" if test is None else test.outcome.upper()))
        what, bracket, case = name.removeprefix("test_").partition("[")
        rows.append(_row([what.replace("_", " ") + (f": {case.removesuffix(']')}" if bracket else ""), *cells]))
    return f"## {title}\n\n{text}\n\n" + "\n".join(rows)


def _failures(results: list[Result]) -> str:
    lines = [f"- {r.versions.name}: {each}" for r in results for each in r.failed]
    return "## Failures\n\n" + ("\n".join(lines) or "None.")


def _skips(results: list[Result]) -> str:
    lines = []
    for result in results:
        reasons = Counter(t.detail for run in result.tests.values() for t in run if t.outcome == "skipped")
        lines += [f"- {result.versions.name}: {count} x {reason}" for reason, count in reasons.most_common()]
    return "## Skipped, and why\n\n" + ("\n".join(lines) or "Nothing.")
