"""Tests the output of a run: plain lines in a pipe, and a panel, columns and a bar that fit a terminal."""

import contextlib
import errno
import io
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from rich.cells import cell_len
from rich.console import Console

from deltatune.machine.wrapping import wrapped
from deltatune.train.reports.screen import Columns, Fact, Screen, duration, fitted, gauge, line_of, sparkline

RECORD = {
    "iteration": 12_000,
    "train_loss": 1.23456,
    "grad_norm": 1234.5,
    "learning_rate": 1.25e-5,
    "iterations_per_second": 2.5,
    "tokens_per_second": 123_456.7,
    "peak_memory": 101.5,
}
FACTS = [
    Fact("data", "4,000 training examples; " * 4, share=None),
    Fact("model", "/a/long/path/" * 9 + "model; 24 layers"),
    Fact("memory", "12.1 GB planned of 80 GB", share=0.15),
]


@pytest.fixture
def terminal():
    """terminal(width, **options): a screen on a terminal, and a function that returns its lines so far."""

    def make(width, **options):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=width, color_system=None, highlight=False, **options)
        return Screen(console=console), lambda: out.getvalue().splitlines()

    return make


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (59.6, "1:00"), (245, "4:05"), (3723, "1:02:03")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_lines_hold_every_figure():
    record = RECORD | {"iteration": 10, "grad_norm": None, "peak_memory": 1.5}
    assert line_of(record, 20, 4.0) == (
        "Iter 10/20: train loss 1.2346, grad norm -, lr 1.25e-05, 2.5 it/s, 123,457 tok/s, peak 1.5 GB, 0:04 left"
    )
    assert "grad norm 0.5," in line_of(record | {"grad_norm": 0.5}, 20, 4.0)
    assert "peak 11.4 MB," in line_of(record | {"peak_memory": 0.0114}, 20, 4.0)
    long = line_of(record | {"iteration": 1200, "iterations_per_second": 1234.5, "peak_memory": 0.9998}, 40000, 4.0)
    assert long.startswith("Iter 1,200/40,000: ")
    assert ", 1,234 it/s, " in long
    assert ", peak 1 GB, " in long


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_on_a_terminal_and_plain_lines_elsewhere(terminal):
    out = io.StringIO()
    screen = Screen(console=Console(file=out, force_terminal=terminal, width=100))
    screen.start(3, 10)
    screen.advance(4, 1.0, 65.0)
    screen.evaluating(1, 2)
    screen.say("[bold]brackets stay[/bold]")
    screen.stop()
    screen.stop()
    assert "[bold]brackets stay[/bold]" in out.getvalue()
    assert ("4/10" in out.getvalue()) == terminal
    assert ("loss 1.0000" in out.getvalue()) == terminal
    assert ("1:05 left" in out.getvalue()) == terminal
    assert ("\x1b" in out.getvalue()) == terminal


def test_the_bar_of_sampled_answers_shows_the_reward(terminal):
    screen, lines = terminal(100)
    screen.start(0, 4)
    screen.report(RECORD | {"reward": 0.25}, total=4, left=1.0)
    screen.advance(1, 0.5, 1.0)
    screen.stop()
    assert "reward 0.2500" in "".join(lines())
    assert "loss 0.5" not in "".join(lines())


@pytest.mark.parametrize(
    ("term", "shown", "text"),
    [("xterm", False, ""), ("dumb", True, "hello\n")],
    ids=["another rank is silent", "a dumb terminal gets no bar"],
)
def test_screens_without_a_bar(monkeypatch, term, shown, text):
    monkeypatch.setenv("TERM", term)
    out = io.StringIO()
    screen = Screen(shown=shown, console=Console(file=out, force_terminal=True, width=80))
    screen.start(0, 2)
    screen.advance(1, 3.0, 1.0)
    screen.say("hello")
    screen.stop()
    assert out.getvalue() == text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize(
    "more", [{}, {"rewards/margins": 0.51, "rewards/accuracies": 0.75, "kl": 0.1, "aux_loss": 1.5}]
)
def test_every_line_fits_the_terminal_and_no_word_is_broken(terminal, width, more):
    screen, lines = terminal(width)
    sentence = "Note: this sentence is made of words that nobody wants to see in two pieces, wherever they stand."
    screen.say(sentence)
    for fact in FACTS:
        screen.say(fact)
    screen.panel("deltatune train")
    evaluated = {f"val_{name}": value for name, value in more.items()}
    screen.report({"iteration": 0, "val_loss": 2.5, "val_time": 1.0} | evaluated, best=True)
    screen.report(RECORD | more, total=20_000, left=3723.0)
    screen.report({"iteration": 12_000, "samples": [{"prompt": "what is this " * 30, "answer": "word " * 50}]})
    screen.ended("", [("saved", "out")], "deltatune chat --model m --adapter-path out")
    assert max(map(cell_len, lines())) <= width
    said = " ".join(" ".join(lines()).split())
    assert sentence in said
    assert "1.2346" in said
    assert "2.5000 *" in said
    assert "model; 24 layers" in said.replace(" │ │ ", " ")


def test_columns_stand_under_their_headings_and_wider_terminals_have_more(terminal):
    for width, expected in ((80, {"grad", "lr", "memory", "left"}), (120, {"grad", "lr", "memory", "left", "it/s"})):
        screen, lines = terminal(width)
        screen.report(RECORD, total=20_000, left=3723.0)
        screen.report({"iteration": 12_000, "val_loss": 2.5, "val_time": 1.0}, best=False)
        heading, trained, evaluated = lines()
        assert expected <= set(heading.split())
        assert ("it/s" in heading) == ("it/s" in expected)
        for name, row, text in (("train loss", trained, "1.2346"), ("val loss", evaluated, "2.5000")):
            assert row.index(text) + len(text) == heading.index(name) + len(name)
        assert trained.endswith("1:02:03")
        assert len(trained) == len(heading)


def test_headings_come_again_after_thirty_rows_and_where_there_are_more_columns():
    columns = Columns()
    counts = [len(columns.rows(RECORD, 80)) for _ in range(61)]
    assert [place for place, count in enumerate(counts) if count == 2] == [0, 30, 60]
    assert len(columns.rows(RECORD | {"rewards/margins": 0.5}, 120)) == 2


def test_expected_figures_have_columns_before_the_first_report():
    columns = Columns()
    columns.expect(["aux_loss"])
    heading, _ = columns.rows({"iteration": 0, "val_loss": 2.5}, 120)
    assert "routers" in heading.plain
    assert len(columns.rows(RECORD | {"aux_loss": 2.0}, 120)) == 1


def test_an_arrow_says_how_the_loss_goes():
    columns = Columns()
    arrows = [columns.rows(RECORD | {"train_loss": loss}, 80)[-1].plain for loss in (4.0, 3.0, 3.5, 9.0, float("nan"))]
    assert ["↓" in row for row in arrows] == [False, True, False, False, False]
    assert ["↑" in row for row in arrows] == [False, False, False, True, False]
    assert "nan" in arrows[-1]


def test_a_terminal_of_ascii_gets_ascii(terminal):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = Screen(console=Console(file=out, force_terminal=True, width=80))
    for fact in FACTS:
        screen.say(fact)
    screen.panel("deltatune train")
    for loss in (4.0, 3.0):
        screen.report(RECORD | {"train_loss": loss}, total=20_000, left=1.0)
    screen.start(0, 2)
    screen.advance(1, 3.0, 1.0)
    screen.stop()
    out.flush()
    assert b"15.0%" in out.buffer.getvalue()


def test_facts_are_lines_in_a_pipe():
    out = io.StringIO()
    screen = Screen(console=Console(file=out))
    screen.say(Fact("data", "44 training examples"))
    screen.say(Fact("loss", "on completions", line="Loss on completions."))
    screen.panel("deltatune train")
    assert out.getvalue() == "Data: 44 training examples.\nLoss on completions.\n"


def test_a_gauge_is_as_full_as_the_memory():
    assert gauge(0.5, plain=True).plain == "##########---------- 50.0%"
    assert gauge(1e-6, plain=True).plain == "#------------------- 0.0%"
    assert gauge(1.5, plain=True).plain == "#################### 150.0%"


def test_an_answer_without_spaces_is_shown_from_its_beginning(terminal):
    screen, lines = terminal(80)
    answer = "我们早上八点开门" * 15
    screen.report({"iteration": 1, "samples": [{"prompt": "几点开门?", "answer": answer}]})
    assert max(map(cell_len, lines())) <= 80
    assert "".join(line.strip() for line in lines()[1:]).removeprefix("answer ") == answer


def test_long_words_show_their_ends():
    assert fitted("see /some/long/folder/of/a/model now", 20) == "see .../of/a/model now"
    assert fitted("x" * 50, 10) == "..." + "x" * 7


def test_words_stay_whole_and_what_is_indented_stays_so():
    assert wrapped("one two-three four", 9) == "one\ntwo-three\nfour"
    assert wrapped("  a bb ccc", 6) == "  a bb\n  ccc"
    assert wrapped("short\n\nlonger/than/this", 8) == "short\n\nlonger/than/this"


def test_sparkline_spans_the_blocks_and_keeps_its_width():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([4, 4, 0, 0], 2) == "█▁"
    assert len(sparkline(range(1000), 48)) == 48
    assert sparkline([1.0], 48) == "▁"
    assert sparkline([], 48) == ""


def test_a_run_goes_on_where_nobody_reads(monkeypatch):
    """Writing fails once the terminal or pipe is closed."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    screen = Screen()
    screen.say("nobody reads this")
    screen.say("nor this")


def test_prompts_and_answers_are_no_markup(terminal):
    """To rich, [/INST] would be an end of a style that has no beginning, and :smile: a picture."""
    screen, lines = terminal(100)
    screen.report({"iteration": 1, "samples": [{"prompt": "[INST] hello [/INST]", "answer": "[b]yes[/b] :smile:"}]})
    assert [line.strip() for line in lines()] == ["asked [INST] hello [/INST]", "answer [b]yes[/b] :smile:"]


def test_the_bar_of_a_terminal_that_was_closed_ends_no_run():
    class Closing(io.StringIO):
        closed_now = False

        def write(self, text):
            if self.closed_now:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(text)

    out = Closing()
    screen = Screen(console=Console(file=out, force_terminal=True, width=80))
    screen.start(0, 2)
    out.closed_now = True
    screen.advance(1, 3.0, 1.0)
    screen.stop()
    screen.start(0, 2)
    screen.stop()


@pytest.mark.parametrize("installed", [True, False])
def test_a_notebook_draws_the_bar_where_it_has_widgets(monkeypatch, installed):
    drawn = []

    class Output(contextlib.AbstractContextManager):
        def __exit__(self, *_):
            return None

        def clear_output(self, wait):
            drawn.append(wait)

        def close(self):
            drawn.append("closed")

    display, widgets = ModuleType("IPython.display"), ModuleType("ipywidgets")
    display.display = lambda shown: drawn.append(getattr(shown, "text", shown))
    widgets.Output = Output
    widgets.__spec__ = ModuleSpec("ipywidgets", None)
    for name, module in (("IPython", ModuleType("IPython")), ("IPython.display", display), ("ipywidgets", widgets)):
        monkeypatch.setitem(sys.modules, name, module)
    if not installed:
        monkeypatch.setattr("deltatune.train.reports.screen.find_spec", lambda name: None)
    screen = Screen(console=Console(force_jupyter=True, width=100))
    screen.start(0, 4)
    screen.advance(3, 1.5, 20.0)
    screen.stop()
    assert any(isinstance(one, Output) for one in drawn) is ("closed" in drawn) is installed
