"""Numbers that a user reads have a comma before each three digits."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "deltatune"
# What there can be a thousand of.
COUNTED = re.compile(
    r"(| new| packed| prompt| image| training| validation| traced| merged) "
    r"(answers|bytes|calls|examples|iterations|matrices|micro-batches|positions|rows|steps|tensors|tokens)\b"
)
# These are texts, some of them numbers that have their commas already.
TEXTS = {"done", "kind", "where", "widths"}


def counts_without_comma(text: str) -> list[str]:
    """Return the expressions in f-strings of `text` that stand before something counted, and have no format."""
    missing = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, behind in zip(node.values, node.values[1:], strict=False):
            follows = isinstance(behind, ast.Constant) and COUNTED.match(str(behind.value))
            if isinstance(value, ast.FormattedValue) and value.format_spec is None and follows:
                missing.append(ast.unparse(value.value))
    return missing


@pytest.mark.parametrize("line", ['f"{n} tokens"', 'f"{a:,} of {len(b)} tensors"', 'f"{n} packed rows at {x:.1f} s"'])
def test_a_count_without_a_comma_is_seen(line):
    assert len(counts_without_comma(line)) == 1
    assert not counts_without_comma(line.replace("n}", "n:,}").replace("(b)}", "(b):,}"))


def test_counts_have_their_commas():
    missing = {
        f"{file.relative_to(SOURCE)}: {expression}"
        for file in SOURCE.rglob("*.py")
        for expression in counts_without_comma(file.read_text("utf-8"))
        if expression not in TEXTS
    }
    assert not missing, "\n".join(sorted(missing))
