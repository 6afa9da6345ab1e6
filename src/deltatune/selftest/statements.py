"""Maps each statement "not yet run on Apple hardware" in the documents to the checks that run its subject on a Mac."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PHRASE = "not yet run on Apple hardware"


@dataclass(frozen=True)
class Promise:
    """A subject of the documents, and the checks that try it.

    Args:
        subject: A regular expression that finds the subject in a statement.
        checks: Names of checks, or prefixes of several names.
    """

    subject: str
    checks: tuple[str, ...]


# The first entry that matches a statement applies to it.
PROMISES = (
    Promise(r"(?i)attention|long rows", ("attention, blocked:", "attention, fused:")),
    Promise(r"fused kernel|Apple GPUs|from one text", ("gated delta, fused:", "doctor: kernels")),
    Promise(r"gated delta, forward", ("gated delta, chunk:", "gated delta, native:", "times: deltatune")),
    Promise(
        r"from scratch|--resume",
        ("training: packed, stopped and resumed", "training: from scratch, packed, stopped and resumed"),
    ),
    Promise(
        r"LoRA|full fine-tuning",
        ("training: full fine-tuning", "parity: qwen3", "parity: olmo_hybrid-dora", "parity: kimi_linear-4bit"),
    ),
    Promise(r"expert", ("experts: fp32", "experts: bf16", "experts: 4 bits", "demo")),
    Promise(r"transformers", ("parity:",)),
    Promise(r"image|vision", ("parity with images:",)),
    Promise(r"mlx\.launch|processes|ranks", ("training: two ranks",)),
    Promise(r"Accelerate|cblas_sgemm", ("doctor: NaN in products of one row (BLAS)",)),
)


def statements(text: str) -> list[str]:
    """The table rows and paragraphs of a document that contain PHRASE, each as one line."""
    parts = re.split(r"\n\s*\n|\n(?=\||#|- )", text)
    flat = (" ".join(part.split()) for part in parts)
    return [part for part in flat if PHRASE in part]


def promise_for(statement: str) -> Promise | None:
    """The first promise with a subject that the statement matches; None where no check tries it."""
    return next((promise for promise in PROMISES if re.search(promise.subject, statement)), None)


def documents(root: Path) -> list[Path]:
    """The documents with checked statements: README, the change log and the pages directly under docs."""
    return [root / "README.md", root / "CHANGELOG.md", *sorted(root.glob("docs/*.md"))]
