"""The one loop that tries an implementation on a case, and the trial of a kernel before its first use."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from deltatune.ops.gated_delta.trial_case import ShapeClass, trial_case
from deltatune.ops.kernels import cubin
from deltatune.ops.operator import case as case_module
from deltatune.ops.operator import kernel_operator
from deltatune.ops.operator.case import Case, judged, measured
from deltatune.ops.operator.timing import side_by_side
from deltatune.ops.tracing import trace

INFINITE = float("inf")


def case_of(bound: float = 1e-3, **more) -> Case:
    """Return the case of a function of an array with two results, the array's double and its sum."""
    x = mx.array([[1.0, 2.0], [3.0, 4.0]])
    arguments = {
        "name": "a kernel",
        "results": ("double", "sum"),
        "call": lambda function: function(x),
        "truth": lambda: [2 * x, x.sum()],
        "bound": bound,
        "like": [x],
    }
    return Case(**arguments | more)


def right(x: mx.array) -> list[mx.array]:
    return [2 * x, x.sum()]


def off_by(factor: float):
    return lambda x: [2 * x, x.sum() * factor]


def test_right_implementation_passes():
    verdict = judged(case_of(), right, "right")
    assert verdict.passed
    assert verdict.errors == {"double": 0.0, "sum": 0.0}
    assert str(verdict).startswith("right (a kernel) agrees with float64")


@pytest.mark.parametrize("factor", [1.01, INFINITE, float("nan")])
def test_one_wrong_result_is_a_refusal(factor):
    verdict = judged(case_of(), off_by(factor), "wrong")
    assert (verdict.passed, verdict.worst) == (False, "sum")
    assert verdict.errors["sum"] == (pytest.approx(0.01, rel=1e-4) if factor == 1.01 else INFINITE)


def test_a_part_may_have_a_bound_of_its_own():
    assert not judged(case_of(), off_by(1.01), "one").passed
    assert judged(case_of(bounds={"sum": 0.1}), off_by(1.01), "one").passed
    assert not judged(case_of(bound=0.1, bounds={"sum": 1e-3}), off_by(1.01), "one").passed


def test_parts_are_compared_each_by_itself():
    """A small row's error would be hidden by the size of a large one."""
    by_rows = {"parts": lambda name, result: {name: list(result)} if result.ndim else {name: [result]}}
    lost = lambda x: [2 * mx.where(mx.arange(2)[:, None] == 0, x * 1.001, x), x.sum()]  # noqa: E731
    assert judged(case_of(bound=6e-4), lost, "whole").passed
    assert judged(case_of(bound=6e-4, **by_rows), lost, "rows").errors["double"] == pytest.approx(1e-3, rel=1e-3)
    assert judged(case_of(**by_rows), lambda x: [2 * x[:1], x.sum()], "one row").errors["double"] == INFINITE


@pytest.mark.parametrize("broken", ["call", "truth"])
@pytest.mark.parametrize("error", [RuntimeError("no compiler"), AttributeError("mlx.core.fast has no such function")])
def test_error_of_a_call_is_a_problem(broken, error):
    def fails(*_):
        raise error

    verdict = judged(case_of(**{broken: fails}), right, "broken")
    assert (verdict.passed, verdict.problem) == (False, f"{type(error).__name__}: {error}")


def test_memory_holds_nan_before_the_call_that_counts(monkeypatch):
    events = []
    monkeypatch.setattr(case_module, "poison", lambda like, **_: events.append(len(like)))

    def function(x):
        events.append("call")
        return right(x)

    judged(case_of(), function, "first use")
    assert events == [1, "call"]
    events.clear()
    # The first call's two results tell the sizes, beside those that the case names.
    assert measured(case_of(), function) == {"double": 0.0, "sum": 0.0}
    assert events == ["call", 3, "call"]


def test_a_kernel_passes_within_its_bound(caplog):
    assert kernel_operator.is_right(lambda: case_of(bound=0.011), run=off_by(1.01))
    assert not caplog.text


@pytest.mark.parametrize("factor", [1.01, INFINITE, float("nan")])
def test_a_kernel_with_too_large_an_error_is_reported(factor, caplog):
    assert not kernel_operator.is_right(lambda: case_of(), run=off_by(factor), instead="plain products")
    assert "a kernel is off by" in caplog.text
    assert "so plain products serve instead" in caplog.text


def test_a_kernel_that_does_not_run_is_reported_in_one_line(caplog):
    def fails(_):
        raise RuntimeError("first line\nsecond line")

    assert not kernel_operator.is_right(lambda: case_of(), run=fails)
    assert "a kernel does not run on this machine" in caplog.text
    assert "first line" in caplog.text
    assert "second line" not in caplog.text


def test_each_kind_is_tried_once(monkeypatch):
    monkeypatch.setattr(kernel_operator, "_right", {})
    tried = []

    def counted(bound, *_arrays):
        tried.append(bound)
        return case_of(bound)

    run = off_by(1.01)
    for _ in range(2):
        assert kernel_operator.is_right(counted, 0.1, run=run)
        assert not kernel_operator.is_right(counted, 1e-3, run=run)
        assert kernel_operator.is_right(counted, 0.1, run=right)
        assert kernel_operator.is_right(counted, 0.1, run=run, arrays=[mx.zeros(1)])
    assert tried == [0.1, 1e-3, 0.1, 0.1]
    kernel_operator.forget()
    assert not kernel_operator._right


def test_results_may_be_arrays_of_numpy():
    exact = [np.array([[2.0, 4.0], [6.0, 8.0]]), np.array(10.0)]
    assert judged(case_of(truth=lambda: exact), right, "numpy").passed


def test_a_kernel_that_metals_compiler_refuses_is_not_given_to_it_by_the_next_process(monkeypatch, tmp_path, caplog):
    said, tried = "program_source:40:7: error: no 'simdgroup_bfloat8x8'\n  more\n", []

    def refused(x: mx.array) -> list[mx.array]:
        tried.append(x)
        raise RuntimeError(f"[metal::Device] Unable to build metal library from source\n{said}")

    monkeypatch.setenv("DELTATUNE_CACHE", str(tmp_path))
    for process in range(2):
        kernel_operator.forget()
        assert not kernel_operator.is_right(case_of, 1e-3, run=refused)
        assert len(caplog.messages) == process + 1
        (log,) = tmp_path.rglob("*.log")
        assert f"error: no 'simdgroup_bfloat8x8' (all that it says is in {log})" in caplog.messages[process]
        assert "\n" not in caplog.messages[process]
        assert said in log.read_text()
    assert len(tried) == 1
    # Another kind of kernel is tried, and what is right is not stored.
    assert kernel_operator.is_right(case_of, 1e-4, run=right)
    assert len(list(tmp_path.rglob("*.json"))) == 1
    kernel_operator.forget()


@pytest.mark.parametrize("of_trial", [lambda case, call: judged(case, call, "one"), measured])
def test_a_trial_is_apart_from_the_step_around_it(of_trial):
    seen = []

    def noting(result):
        seen.append((trace.current(), cubin.building()))
        return result

    outside = vars(trace.current())
    case = case_of(truth=lambda: noting(right(mx.array([[1.0, 2.0], [3.0, 4.0]]))))
    with ThreadPoolExecutor() as pool, cubin.built_side_by_side(pool), trace.having(shortened=True, cheap_twice=True):
        of_trial(case, lambda x: noting(right(x)))
        side_by_side({"one": lambda: noting([mx.array([1.0])])})
        assert trace.current().shortened
        assert cubin.building()
    assert len(seen) >= 4
    assert all(vars(told) | {"known": outside["known"]} == outside and not building for told, building in seen)


def test_the_truth_of_the_gated_delta_rule_is_whole_in_the_trace_of_a_plan():
    """The plan leaves out most turns of the loop over a row, and chunk then has zeros for their results."""
    case = replace(trial_case(ShapeClass(1, 8, 64, 64, "float32")), call=lambda results: results)
    right_results = [mx.array(truth.astype(np.float32)) for truth in case.truth()]
    with trace.having(shortened=True):
        verdict = judged(case, right_results, "one")
        assert max(case.errors(right_results, case.truth()).values()) > 0.5
    assert verdict.passed
    assert max(verdict.errors.values()) < 1e-6
