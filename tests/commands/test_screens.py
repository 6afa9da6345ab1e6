"""The screens of `deltatune train` and `deltatune plan` in 80 and 120 columns, without colour, and in pipes."""

import json
import re

import pytest

from console import called, deltatune
from terminal import on_terminal

LINE = {"prompt": "the quick brown fox", "completion": "jumps over"}


@pytest.fixture(scope="module")
def options(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("screens")
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text((json.dumps(LINE) + "\n") * 4)
    (folder / "c.yaml").write_text("sample_prompts: [the quick]\n")
    flags = ["-c", "c.yaml", "--model", checkpoint, "--data", ".", "--iters", 2, "--steps-per-report", 1]
    return folder, [*flags, "--max-seq-length", 32, "--val-batches", 1]


PLAIN = (
    r"^Loading .*\n",
    r"\nPlan: 4 x 32 tokens need [\d.]+ MB of .*: it fits\.\nModel: .*; 2 layers: 1 delta, 1 attention\.\n",
    r"\nTraining: lora, [\d,]+ of [\d,]+ numbers \([\d.]+%\)\.\n",
    r"\nData: 4 training, 4 validation examples; 4 rows an epoch, 4 a batch\.\n",
    r"\nIter 0: val loss \d\.\d{4}, took [\d.]+ s\nIter 0, sample 1: the quick -> ",
    r"\nIter 1/2: train loss \d\.\d{4}, grad norm [\d.]+, lr \S+, \S+ it/s, \S+ tok/s, peak [\d.]+ MB, \d:\d\d ",
    r"\nSaved in out; best, with validation loss \d\.\d{4} at \d: out/best; report: out/report\.html\n"
    r"Next: deltatune chat --model \S+ --adapter-path out\n$",
)


def test_a_pipe_gets_the_lines_that_scripts_read(options):
    folder, flags = options
    done = called("train", *flags, "--adapter-path", "out", cwd=folder, COLUMNS="40")
    assert done.returncode == 0, done.stderr
    for pattern in PLAIN:
        assert re.search(pattern, done.stdout), (pattern, done.stdout)
    assert not re.search(r"\x1b|[─━↓]", done.stdout)


@pytest.mark.parametrize(
    ("columns", "variables", "coloured"),
    [(80, {}, True), pytest.param(120, {"NO_COLOR": "1"}, False, marks=pytest.mark.weekly)],
)
def test_a_run_fits_its_terminal(options, columns, variables, coloured):
    folder, flags = options
    seen = on_terminal("train", *flags, "--adapter-path", f"out-{columns}", columns=columns, cwd=folder, **variables)
    assert seen.code == 0, seen.text
    assert seen.widest <= columns
    assert bool(re.search(r"\x1b\[[\d;]*3\dm", seen.raw)) == coloured
    assert "0:00 left" in seen.raw
    assert "2/2" not in seen.text
    for words in (
        "2 layers: 1 delta, 1 attention",
        "data 4 training, 4 validation examples; 4 rows an epoch, 4 a batch",
        "on completions only",
        "asked the quick",
        f"saved out-{columns}",
        f"report out-{columns}/report.html",
    ):
        assert words in seen.words, (words, seen.text)
    assert re.search(r"memory [\d.]+ MB planned of [\d.]+ GB \(.*?\); 4 x 32 tokens [\d.]+%", seen.words)
    heading = next(line for line in seen.lines if "train loss" in line)
    row = next(line for line in seen.lines if re.match(r" +1 +\d\.\d{4}", line))
    assert len(heading.rstrip()) == len(row.rstrip())
    assert ("it/s" in heading) == (columns == 120)


def test_a_plan_answers_first_and_fits_its_terminal(options):
    folder, flags = options
    seen = on_terminal("plan", *flags, columns=80, cwd=folder)
    assert seen.code == 0, seen.text
    assert seen.widest <= 80
    first = r"Fits: [\d.]+ MB of [\d.]+ GB; longest row (about )?[\d,]+( or more)?"
    assert re.fullmatch(first, seen.lines[0].rstrip()), seen.text
    assert "step 4 x 32 = 128 tokens" in seen.words
    for name in ("length", "batch", "rank"):
        assert re.search(rf"{name} .*\d", seen.words)
    assert "Matmul" not in seen.words
    assert "looking for the longest row" in seen.raw


def test_a_refusal_is_broken_between_words_on_a_terminal_alone(options):
    folder, _ = options
    given = ["train", "--model", "m", "--data", "nowhere", "--iters", 0]
    seen = on_terminal(*given, columns=40, cwd=folder)
    done = deltatune(*given, cwd=folder)
    assert seen.code == done.returncode == 2
    assert seen.widest <= 40
    assert len(seen.lines) > 2
    assert done.stderr.count("\n") == 1
    assert seen.words == " ".join(done.stderr.split())
