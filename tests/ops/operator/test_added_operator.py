"""A recurrence that a test adds is examined, tried and refused like the others, with no line outside the operators."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from deltatune.doctor import implementations
from deltatune.errors import UserError
from deltatune.machine import environment
from deltatune.ops import IMPLEMENTATIONS, operators
from deltatune.ops.operator import candidates, verdicts
from deltatune.ops.operator.case import Case, judged
from deltatune.ops.operator.operator import Candidate, Operator
from deltatune.selftest import run
from deltatune.selftest.outcome import FAILED, NOT_RUN, PASSED
from deltatune.train.reports import announce

DECAY = 0.5


def by_loop(x: mx.array) -> mx.array:
    """y_t = DECAY y_{t-1} + x_t for x [T], one token after another."""
    total = mx.zeros(())
    rows = []
    for token in x:
        total = DECAY * total + token
        rows.append(total)
    return mx.stack(rows)


def by_product(x: mx.array) -> mx.array:
    """The same as one product with the matrix of all decays."""
    distance = mx.arange(len(x))[:, None] - mx.arange(len(x))[None]
    return mx.where(distance >= 0, mx.power(DECAY, mx.maximum(distance, 0)), 0.0) @ x


def exact(x: np.ndarray) -> np.ndarray:
    return np.array([sum(DECAY ** (last - t) * x[t] for t in range(last + 1)) for last in range(len(x))])


@dataclass(frozen=True)
class Length:
    """A call of the recurrence, and a workload: so many tokens."""

    tokens: int

    @property
    def words(self) -> str:
        return f"{self.tokens} tokens"

    name = words

    def call(self) -> Length:
        return self

    def case(self, implementation: str) -> Case:
        return case_of(self)

    def __str__(self) -> str:
        return self.words


def case_of(length: Length) -> Case:
    x = np.linspace(-1, 1, length.tokens)
    return Case(length.words, ["y"], lambda of: [of(mx.array(x.astype(np.float32)))], lambda: [exact(x)], 1e-6)


def candidate(function, trusted=False):
    return lambda call: Candidate(function, call, function, trusted=trusted)


@pytest.fixture
def added(monkeypatch, tmp_path):
    """added(function): the recurrence is an operator, and `function` its fast implementation."""
    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))

    def add(function) -> Operator:
        operator = Operator(
            name="decayed_sum",
            implementations=("loop", "fused"),
            orders=dict.fromkeys(("cpu", "cuda", "metal"), ("fused", "loop")),
            candidates={"loop": candidate(by_loop, trusted=True), "fused": candidate(function)},
            case_of=case_of,
            timed_case_of=case_of,
            examples=lambda: [Length(9)],
            compare_last=lambda: [judged(case_of(Length(3)), by_loop, "loop")],
            workloads=lambda quick: [Length(5)],
        )
        monkeypatch.setattr(operators, "OPERATORS", (operator,))
        monkeypatch.setitem(IMPLEMENTATIONS, operator.name, operator.implementations)
        verdicts.forget()
        return operator

    yield add
    verdicts.forget()


def wrong(x: mx.array) -> mx.array:
    return by_product(x) + 0.1


def test_the_fast_one_serves_where_it_is_right(added):
    assert candidates.choose(added(by_product), Length(9)) == ("fused", by_product)
    with pytest.warns(candidates.ImplementationWarning, match=r"decayed_sum: fused \(8 tokens\) differs from float64"):
        assert candidates.choose(added(wrong), Length(8)) == ("loop", by_loop)


@pytest.mark.parametrize(("function", "status"), [(by_product, "right"), (wrong, "refused")])
def test_the_doctor_tries_it(added, function, status):
    added(function)
    (found,) = implementations.findings()
    assert found.name == "decayed_sum"
    assert found.order.startswith("fused, then loop (automatic on ")
    assert [(each.implementation, each.status) for each in found.findings] == [("loop", "right"), ("fused", status)]


def test_the_self_test_compares_it_with_float64(added, monkeypatch):
    added(by_product)
    monkeypatch.setattr(implementations.backend, "device", lambda: "metal")
    title, checks = list(run.sections(True, None, []))[1]
    found = {check.name: check.run().status for check in checks}
    assert title == "Decayed sum against float64"
    assert found == {"decayed sum, loop: 5 tokens": PASSED, "decayed sum, fused: 5 tokens": PASSED}
    added(wrong)
    _, checks = list(run.sections(True, None, []))[1]
    assert [check.run().status for check in checks] == [PASSED, FAILED]
    assert NOT_RUN not in found.values()


def test_its_variable_forces_an_implementation(added, monkeypatch):
    operator = added(by_product)
    monkeypatch.setenv("DELTATUNE_DECAYED_SUM", "loop")
    assert candidates.choose(operator, Length(9))[0] == "loop"
    monkeypatch.setenv("DELTATUNE_DECAYED_SUM", "lop")
    with pytest.raises(UserError, match=r"DELTATUNE_DECAYED_SUM='lop': expected one of loop, fused.*mean 'loop'"):
        environment.check(IMPLEMENTATIONS)


def test_reports_name_the_reason(added):
    class Layers:
        def by_operator(self):
            return {"decayed sum": {"layers.0": "fused"}}

    added(by_product)
    assert announce.served(Layers())["decayed sum"].startswith("fused (automatic on ")
