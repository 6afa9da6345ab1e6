"""What the documents call not yet run on Apple hardware, and the checks that run it on a Mac."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PHRASE = "not yet run on Apple hardware"


@dataclass(frozen=True)
class Promise:
    """A subject of the documents, and the checks that try it.

    Args:
        subject: a regular expression that the statement's words match.
        checks: the checks' names, or how several of them begin.
    """

    subject: str
    checks: tuple[str, ...]


# The first that matches a statement's words is its own.
PROMISES = (
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
    """The rows and paragraphs of a document that say so, each on one line."""
    parts = re.split(r"\n\s*\n|\n(?=\||#|- )", text)
    flat = (" ".join(part.split()) for part in parts)
    return [part for part in flat if PHRASE in part]


def promise_for(statement: str) -> Promise | None:
    """The promise that a statement's subject is of; None where no check tries it."""
    return next((promise for promise in PROMISES if re.search(promise.subject, statement)), None)


def documents(root: Path) -> list[Path]:
    """README, the change log, and everything in docs, but for the records of machines."""
    return [root / "README.md", root / "CHANGELOG.md", *sorted(root.glob("docs/*.md"))]
