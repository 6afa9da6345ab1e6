"""Every statement "not yet run on Apple hardware" in the documents has a check of the self-test."""

import re
from pathlib import Path

from deltatune.selftest import run

ROOT = Path(__file__).parents[2]
PHRASE = "not yet run on Apple hardware"
# By the subject of a statement, the beginning of the name of the check that tries it.
CHECKS = {
    r"products of one row": "doctor: NaN in products of one row (BLAS)",
    r"`chunk_bf16`": "gated delta, chunk_bf16: scalar gates, bf16",
}


def statements(text: str) -> list[str]:
    """The table rows and paragraphs of a document that contain PHRASE, each as one line."""
    parts = re.split(r"\n\s*\n|\n(?=\||#|- )", text)
    return [flat for part in parts if PHRASE in (flat := " ".join(part.split()))]


def test_every_statement_has_a_check():
    names = run.names()
    made = [
        (path.name, statement)
        for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md")))
        for statement in statements(path.read_text(encoding="utf-8"))
    ]
    assert made
    for place, statement in made:
        checks = [check for subject, check in CHECKS.items() if re.search(subject, statement)]
        assert checks, f"{place}: no check of `deltatune selftest` tries this: {statement}"
        assert any(name.startswith(check) for check in checks for name in names), checks


def test_a_statement_is_found_across_lines_and_by_row():
    text = f"# Head\n\nSomething was {PHRASE.replace(' Apple', chr(10) + 'Apple')}.\n\n| a | {PHRASE} |\n| b | run |\n"
    assert statements(text) == [f"Something was {PHRASE}.", f"| a | {PHRASE} |"]


def test_names_are_not_used_twice():
    names = run.names()
    assert len(names) == len(set(names))
    assert set(run.names(quick=True)) < set(names)
