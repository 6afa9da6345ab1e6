"""Every statement "not yet run on Apple hardware" in the documents has a check of the self-test."""

from pathlib import Path

import pytest

from deltatune.selftest import run
from deltatune.selftest.statements import PHRASE, PROMISES, documents, promise_for, statements

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda path: path.name)
def test_every_statement_has_a_check(path):
    for statement in statements(path.read_text(encoding="utf-8")):
        assert promise_for(statement), f"{path.name}: no check of `deltatune selftest` tries this: {statement}"


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.subject)
def test_the_checks_are_there(promise):
    names = run.names()
    for start in promise.checks:
        assert any(name.startswith(start) for name in names), start


def test_a_statement_is_found_across_lines_and_by_row():
    text = f"# Head\n\nSomething was {PHRASE.replace(' Apple', chr(10) + 'Apple')}.\n\n| a | {PHRASE} |\n| b | run |\n"
    assert statements(text) == [f"Something was {PHRASE}.", f"| a | {PHRASE} |"]
    assert promise_for(f"quantum annealing: {PHRASE}") is None


def test_names_are_not_used_twice():
    names = run.names()
    assert len(names) == len(set(names))
    assert set(run.names(quick=True)) < set(names)
