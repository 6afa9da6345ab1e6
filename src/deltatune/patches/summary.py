"""Says what was patched in one short line."""

from __future__ import annotations

from .patch_report import PatchReport


def summary(report: PatchReport) -> str:
    """Count the functions that were replaced and name their packages; what was left alone is named in full."""
    count = len(report.applied)
    packages = ", ".join(sorted({f"{applied.patch.package} {applied.version}" for applied in report.applied}))
    replaced = f"{count} function{'s' * (count != 1)} of {packages}" if count else "nothing patched yet"
    return "; ".join([replaced, *report.untried, *map(str, report.left_alone), *report.unreached])
