"""Turns fenced blocks of the language `math` (LaTeX) into MathML when the site is built; browsers need no program."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert
from pymdownx.superfences import SuperFencesException


def display(source: str, language: str, css_class: str, options: dict, md: Any, **_: Any) -> str:
    """Return the HTML of a block of mathematics (a formatter of pymdownx.superfences, which names the parameters)."""
    found = convert(" ".join(source.split()), display="block")
    # What is not known is left in the output as its own name.
    if unknown := re.findall(r"\\[A-Za-z]+", found):
        # Any other exception would leave the block as code.
        raise SuperFencesException(f"mathematics: {', '.join(unknown)} cannot be converted, in {source}")
    return f'<div class="math">{found}</div>'
