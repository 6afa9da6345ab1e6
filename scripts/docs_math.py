"""Turns LaTeX into MathML when the site is built, blocks of the language `math` and $`...`$ within sentences.

GitHub shows both as mathematics too, and browsers need no program for either.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from pymdownx.superfences import SuperFencesException

# Code in backticks is found at 190; what is found earlier is not looked at again.
_BEFORE_CODE = 195


def display(source: str, language: str, css_class: str, options: dict, md: Any, **_: Any) -> str:
    """Return the HTML of a block of mathematics (a formatter of pymdownx.superfences, which names the parameters)."""
    return f'<div class="math">{mathml(source, "block")}</div>'


def mathml(source: str, how: str) -> str:
    """Return LaTeX as MathML, as a block or "inline"; SuperFencesException for a word that is not known."""
    found: str = convert(" ".join(source.split()), display=how)
    # What is not known is left in the output as its own name.
    if unknown := re.findall(r"\\[A-Za-z]+", found):
        # Any other exception would leave a block as code.
        raise SuperFencesException(f"mathematics: {', '.join(unknown)} cannot be converted, in {source}")
    return found


class _Inline(InlineProcessor):
    """Mathematics within a sentence."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        assert self.md is not None
        return self.md.htmlStash.store(mathml(m[1], "inline")), m.start(0), m.end(0)


class Mathematics(Extension):
    """Python-Markdown's extension of mathematics within sentences."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the pattern."""
        md.inlinePatterns.register(_Inline(r"\$`([^`]+)`\$", md), "mathematics", _BEFORE_CODE)


def makeExtension(**options: Any) -> Mathematics:  # noqa: N802
    """Return the extension, as Python-Markdown asks for it."""
    return Mathematics(**options)
