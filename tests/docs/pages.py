"""The pages of the documentation, and the contents of their code blocks."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DECISIONS = [page for page in PAGES if page.parent.name == "decisions"]
# Decisions name code that is gone; everything else is kept right.
KEPT = [page for page in PAGES if page not in DECISIONS]
READ = [*KEPT, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, and its language (empty where none is named)."""

    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0][:40]}"


def blocks(*languages: str) -> list[Block]:
    """Every block of the pages in one of the languages."""
    found = [Block(page, *match) for page in READ for match in _FENCE.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if block.language in languages]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by the rule of Python-Markdown's table of contents."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    words = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in plain]
    return {re.sub(r"[-\s]+", "-", title) for title in words}
