"""Every part of a shortened demo runs and prints its lines; the demo itself checks how well the model learns."""

import io
import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from deltatune import cli
from deltatune.demo import assets, flow, rewarded, task
from deltatune.demo.screen import DemoScreen
from deltatune.errors import UserError


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A demo of few messages and updates: its exit code, folder, output, losses, and the answers before and after."""
    output, file = tmp_path_factory.mktemp("demo"), io.StringIO()
    screen = DemoScreen(Console(file=file, width=100, highlight=False))
    scores = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(task, "write", partial(task.write, train=128, valid=8))
        ask = flow.ask
        patches.setattr(flow, "ask", lambda *given: scores.append(ask(*given)) or scores[-1])
        code = flow.run_demo(output, iterations=8, questions=4, screen=screen)
    return code, output, file.getvalue(), screen.losses, [score.answers for score in scores]


def test_a_short_run_learns_too_little_and_says_so_with_its_exit_code(short):
    code, _, shown, losses, _ = short
    assert code == 1
    assert "0.0% exactly right: 0 of 4 held-out messages" in shown
    assert len(losses) == 8
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


def test_mlx_lm_alone_gives_the_same_answers(short):
    """Those of the adapter, which are not the base's."""
    _, output, shown, _, (before, after) = short
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert "4 of 4 answers are the same" in shown
    assert (output / "adapters.safetensors").is_file()
    assert json.loads((output / "adapter_config.json").read_text())["model"] == str(assets.MODEL)


def test_the_command_to_try_next_runs(short, run):
    _, _, shown, _, _ = short
    (command,) = re.findall(r"^next:\n(.*?)\n\n", shown, re.MULTILINE | re.DOTALL)
    python, dash_m, program, *arguments = shlex.split(command.replace(" \\\n", " "))
    assert (Path(python).resolve(), dash_m, program) == (Path(sys.executable).resolve(), "-m", "deltatune")
    code, answer, _ = run(*arguments)
    assert code == 0
    assert answer.strip()


def test_the_page_has_the_numbers_of_both_demos():
    text = (Path(__file__).parents[2] / "docs/start/demo.md").read_text(encoding="utf-8")
    page = " ".join(text.split())
    assert f"answers {flow.QUESTIONS} messages" in page
    assert f"Its answers to the first {flow.RELOADED} messages must equal those of step 3." in page
    assert f"at least {flow.ENOUGH:.0%}".replace("%", " %") in page
    options = rewarded.rewarded_options(Path("out"), rewarded.ITERATIONS)
    sizes = f"{options.num_generations} answers to each of {options.batch_size} messages"
    assert f"{rewarded.ITERATIONS} updates with {sizes}" in page
    assert rewarded.REWARDS.strip() in text


def test_the_report_holds_figures_curves_and_every_message(short):
    _, output, _, _, _ = short
    text = (output / "report.html").read_text(encoding="utf-8")
    for item in task.draw(0, 4, task.held_out_name, held_out=True):
        assert item.message.split(",")[0].split("'")[0] in text
    assert "right before" in text
    assert text.count('"points": [[') >= 3
    assert not re.search("https?:(?!//www.w3.org/2000/svg)", text)


def test_right_means_equal_to_the_last_character():
    item = task.draw(0, 1, task.known_name, held_out=False)[0]
    score = flow.Score([item] * 3, [item.answer, item.answer + " ", item.answer.lower()], 1.0)
    assert score.right == [True, False, False]
    assert score.accuracy == pytest.approx(1 / 3)


@pytest.mark.parametrize("words", [["demo"], ["demo", "rl"]], ids=" ".join)
def test_a_folder_that_cannot_be_written_is_refused(words, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        flow.run_demo(tmp_path / "file" / "out", screen=DemoScreen(Console(file=io.StringIO())))
    assert cli.main([*words, "--output", str(tmp_path / "file" / "out")]) == 2
    assert "choose another --output" in capsys.readouterr().err


def test_a_short_run_of_rewards_shows_the_samples_and_the_rewards(tmp_path):
    """No right answer is in the texts that the model reads; the answers reach the rewards alone."""
    file = io.StringIO()
    screen = DemoScreen(Console(file=file, width=100, highlight=False))
    assert rewarded.run_rewarded_demo(tmp_path, iterations=2, questions=4, screen=screen) == 1
    shown = file.getvalue()
    assert shown.count("exactly right: ") == 2
    assert len(screen.rewards) == 2
    assert f"mean reward {screen.rewards[0]:.2f} → {screen.rewards[1]:.2f}" in shown
    rows = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert all(row["answer"] in row["prompt"] for row in rows)
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Sampled answers" in report
    assert all(item.message.split("'")[0] in report for item in task.draw(0, 4, task.held_out_name, held_out=True))
