"""`deltatune selftest` refuses bad usage, prints and writes its checks, and ends with the right exit code."""

import io
import json
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from deltatune import cli
from deltatune.selftest import outcome, run
from deltatune.selftest.outcome import Check, Outcome
from deltatune.selftest.record import FILE, HEADER


@dataclass
class Examined:
    """The doctor's findings, as far as the screen reads them."""

    times: list[dict] = field(default_factory=lambda: [{"calls": "some calls", "milliseconds": {"fused": 1.0}}])


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    """Nor does the doctor, whose findings stand in the file too, examine the machine again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "examination", Examined)


def of(monkeypatch, *outcomes):
    def raised():
        raise RuntimeError("[metal::Device] Unable to build metal library\nfrom source")

    made = [Check(f"check {i}", raised if each is None else lambda each=each: each) for i, each in enumerate(outcomes)]
    monkeypatch.setattr(run, "sections", lambda *_: [("Some", iter(made))])
    shown = io.StringIO()
    code = run.run_selftest(console=Console(file=shown, width=120))
    with open(FILE, encoding="utf-8") as file:
        return code, json.load(file), shown.getvalue()


GOOD = outcome.compared_with_bounds({"y": 1e-7}, {"y": 1e-6})


def test_all_good_is_exit_code_0(monkeypatch):
    code, record, shown = of(monkeypatch, GOOD, outcome.not_run("for CUDA"))
    assert code == 0
    assert record["verdict"] == "passed"
    assert record["finished"]
    assert "some calls: fused 1.0 ms" in shown
    assert "✓ check 0  y 1.0e-07 of 1.0e-06" in shown
    assert "– check 1  for CUDA" in shown
    assert "1 checks passed, 0 failed, 1 are not for this machine" in shown
    assert record["line"] in shown
    assert record["line"].count("|") == len(HEADER) + 1


@pytest.mark.parametrize(
    "bad",
    [
        outcome.compared_with_bounds({"y": 2e-6}, {"y": 1e-6}),
        outcome.compared_with_bounds({"y": float("inf")}, {"y": 1.0}),
        outcome.compared_with_bounds({"y": float("nan")}, {"y": 1.0}),
    ],
)
def test_a_failure_is_exit_code_1_and_the_others_still_run(monkeypatch, bad):
    code, record, shown = of(monkeypatch, bad, GOOD)
    assert code == 1
    assert [each["status"] for each in record["checks"]] == ["failed", "passed"]
    assert "✗ check 0" in shown
    assert "**1 failed**" in record["line"]


def test_a_kernel_that_does_not_run_is_a_failure_with_its_words(monkeypatch):
    code, record, _ = of(monkeypatch, None, GOOD)
    assert code == 1
    assert record["checks"][0]["detail"] == "RuntimeError: [metal::Device] Unable to build metal library"
    assert record["checks"][1]["status"] == "passed"


def test_finished_checks_survive_an_interrupt(monkeypatch):
    def stop():
        raise KeyboardInterrupt

    made = [Check("first", lambda: Outcome(outcome.PASSED, "fine")), Check("second", stop)]
    monkeypatch.setattr(run, "sections", lambda *_: [("Some", iter(made))])
    with pytest.raises(KeyboardInterrupt):
        run.run_selftest(console=Console(file=io.StringIO()))
    with open(FILE, encoding="utf-8") as file:
        record = json.load(file)
    assert not record["finished"]
    assert [each["name"] for each in record["checks"]] == ["first"]


def test_a_home_folder_is_not_told(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    _, record, _ = of(monkeypatch, Outcome(outcome.PASSED, f"{tmp_path}/somebody/.cache/x"))
    assert record["checks"][0]["detail"] == "~/.cache/x"


def test_bad_usage_is_exit_code_2(capsys, tmp_path):
    assert cli.main(["selftest", "--quik"]) == 2
    assert "did you mean '--quick'?" in capsys.readouterr().err
    assert cli.main(["selftest", "here"]) == 2
    assert "unrecognized arguments: here" in capsys.readouterr().err
    (tmp_path / FILE).mkdir()
    assert cli.main(["selftest", "--quick"]) == 2
    assert f"{FILE}: cannot be written here" in capsys.readouterr().err
