"""Each message that docs/guides/troubleshooting.md quotes is one that deltatune prints."""

import ast
import re

import pytest
from pages import DOCS, ROOT

PAGE = (DOCS / "guides/troubleshooting.md").read_text(encoding="utf-8")
#: Quoted at the beginning of a row of a table or of an item, or as a note in one: words, and neither flags nor files.
QUOTED = re.compile(r"(?:^\| |^- |^- \*\*.*?The note )`([^`]+)`", re.MULTILINE | re.DOTALL)


def messages():
    return [" ".join(quoted.split()).removesuffix(" ...") for quoted in QUOTED.findall(PAGE)]


def texts() -> str:
    """All strings of the package, with a mark in place of inserted values, joined as Python joins them."""
    found = []
    for path in (ROOT / "src/deltatune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\x00" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.fixture(scope="module")
def printed():
    return texts()


def test_the_page_quotes_messages():
    assert len(messages()) > 12


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_stands_in_the_source(message, printed):
    assert message in printed
