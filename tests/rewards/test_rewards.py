"""Rewards by functions: built-in ones and the user's own, in processes of their own, and the runs that ask them."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from types import ModuleType

import numpy as np
import pytest

from console import called
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.rewards import RewardError, Rewards
from deltatune.rewards.built_in import built_in

PROMPTS = ["first", "second", "third"]
COMPLETIONS = ["a", "bb", "c"]
COLUMNS = {"answer": ["a", "b", "c"], "completion_ids": [[1], [1, 2], [3]]}
FUNCTIONS = """
import os, subprocess, sys, time, asyncio

def exact(prompts, completions, answer):
    return [float(text == right) for text, right in zip(completions, answer)]
async def lengths(completions, **columns):
    assert sorted(columns) == ["answer", "completion_ids", "prompts"]
    await asyncio.sleep(0)
    return [None if text == "c" else len(text) for text in completions]
def truths(completions):
    return (text == "bb" for text in completions)
def raises(completions):
    return [1 / (2 - len(text)) for text in completions]
def sleeps(completions):
    return [time.sleep(60 * (len(text) - 1)) or 1.0 for text in completions]
def dies(completions):
    return [os._exit(3) if text == "bb" else 1.0 for text in completions]
def killed(completions):
    return [os.kill(os.getpid(), 9) if completions[at] == "c" else 1.0 for at in range(3)]
def forks(completions):
    reward = 1.0 if os.fork() else 5.0
    return [reward for _ in completions]
def leaves(completions):
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
def floods(completions):
    print("flood " * 5_000_000)
    return [2.0 for _ in completions]
def reads(completions):
    return [float(len(sys.stdin.read())) for _ in completions]
def few(completions):
    return [1.0]
def number(completions):
    return 0.5
def not_a_number(completions):
    return [1.0, float("nan"), 2.0]
def endless(completions):
    return [1.0, 2.0, float("inf")]
def text(completions):
    return [1.0, 2.0, "good"]
def asks(completions, difficulty):
    return [1.0 for _ in completions]
_calls = []
def counts(completions):
    _calls.append(1)
    return [len(_calls) for _ in completions]
"""
# By function: the words of its failure, the row, and the rewards where a failure does not stop.
FAILURES = {
    "raises": ("raised ZeroDivisionError: division by zero (rewards.py, line 13), at completion 2 of 3", "nnn"),
    "sleeps": ("took longer than 1 seconds, at completion 2 of 3, an answer to 'second'", "nnn"),
    "dies": ("ended its process (exit code 3), at completion 2 of 3", "nnn"),
    "killed": ("ended its process (SIGKILL), at completion 3 of 3, an answer to 'third'", "nnn"),
    "leaves": ("ended its process (exit code 0).", "nnn"),
    "few": ("returned 1 rewards for 3 completions.", "nnn"),
    "number": ("returned 0.5, and a list of 3 rewards was expected.", "nnn"),
    "not_a_number": ("returned nan, and a finite number or None was expected, at completion 2 of 3", "1n2"),
    "endless": ("returned inf, and a finite number or None was expected, at completion 3 of 3", "12n"),
    "text": ("returned 'good', and a finite number or None was expected, at completion 3 of 3", "12n"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def opened(*functions, report=lambda text: None, **options):
    """Open reward functions; no process of theirs runs behind the `with` block."""
    with Rewards(TrainConfig(reward_funcs=functions, **options), report) as rewards:
        groups = [child._process.pid for child in rewards._children]
        yield rewards
    assert all(map(ends, groups))


def running(group):
    """Whether a process of a group runs; one that has ended stays in its group until its parent has read its status."""
    processes = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    pairs = map(str.split, processes.splitlines())
    return any(number == str(group) and not status.startswith("Z") for number, status in pairs)


def ends(group):
    """Whether the processes of a group, which were killed, end within five seconds."""
    end = time.monotonic() + 5
    while running(group) and time.monotonic() < end:
        time.sleep(0.05)
    return not running(group)


def scored(*functions, **options):
    with opened(*functions, **options) as rewards:
        return rewards(PROMPTS, COMPLETIONS, COLUMNS)


def test_functions_are_given_prompts_completions_and_columns(folder):
    """Their modules live from batch to batch, their names and weights are their own; copies and output do no harm."""
    lines = []
    functions = ("rewards.py:exact,lengths, truths", "exact", "rewards.py:counts,forks,floods,reads")
    weights = [1, 0.5, 2, 1, 1, 1, 1, 1]
    with opened(*functions, report=lines.append, reward_weights=weights) as rewards:
        assert rewards.names == ("exact", "lengths", "truths", "exact_2", "counts", "forks", "floods", "reads")
        assert list(rewards.weights) == weights
        for count in (1, 2):
            scores = rewards(PROMPTS, COMPLETIONS, COLUMNS)
            assert scores.dtype == np.float64
            np.testing.assert_array_equal(
                scores,
                [[1, 0, 1], [1, 2, np.nan], [0, 1, 0], [1, 0, 1], [count] * 3, [1, 1, 1], [2, 2, 2], [0, 0, 0]],
            )
    assert [len(line) < 2200 and line.startswith("Output of the reward floods") for line in lines] == [True, True]


def test_messages_arrive_as_messages(folder):
    (folder / "more.py").write_text("def roles(completions, prompts):\n    return [len(p) for p in prompts]\n")
    prompts = [[{"role": "user", "content": "2 + 2"}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("4", [{"type": "text", "text": "5"}])]
    with opened("more.py:roles", "exact") as rewards:
        np.testing.assert_array_equal(rewards(prompts, completions, {"answer": [4, 5]}), [[1, 1], [1, 1]])


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """By function that fails: its rewards, and the lines on it, of two batches; and the message that stops the run."""
    found = {name: ([], []) for name in FAILURES}
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("failures")
        (folder / "rewards.py").write_text(FUNCTIONS)
        patch.chdir(folder)
        for names, seconds in (("sleeps", 1), (",".join(name for name in FAILURES if name != "sleeps"), 60)):
            lines = []
            functions, options = f"rewards.py:{names},exact", {"reward_timeout": seconds}
            with opened(functions, report=lines.append, **options, reward_errors="none") as rewards:
                for _ in range(2):
                    *scores, right = rewards(PROMPTS, COMPLETIONS, COLUMNS)
                    assert list(right) == [1, 0, 1]
                    for name, score in zip(names.split(","), scores, strict=True):
                        found[name][0].append(score)
            for name in names.split(","):
                found[name][1].extend(line for line in lines if line.startswith(f"reward {name} "))
        with pytest.raises(RewardError, match="set reward_errors: none") as stopped:
            scored(functions, **options)
    return found, str(stopped.value)


@pytest.mark.bad_input("a reward function that {name}")
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_named_with_its_row_and_stops_or_gives_none(failed, name):
    words, digits = FAILURES[name]
    (scores, lines), stopped = failed[0][name], failed[1]
    wanted = [np.nan if digit == "n" else float(digit) for digit in digits]
    np.testing.assert_array_equal(scores, [wanted, wanted])
    assert f"reward {name} (rewards.py): {words}" in lines[0]
    assert [lines[0]] * 2 == lines
    assert words in stopped or name == "sleeps"


REFUSED = {
    "rewards.py:wrong": "wrong (rewards.py): the file has no function 'wrong'; it has exact, ",
    "syntax.py:f": "syntax.py, line 2, is not Python: ",
    "imports.py:f": "the file cannot be imported: ModuleNotFoundError: No module named 'nowhere' (imports.py, line 1)",
    "exits.py:f": "ended its process (exit code 4)",
    "missing.py:f": "missing.py: there is no such file",
    "rewards.py": "expected FILE.py:FUNCTION",
    "exakt": "(did you mean 'exact'?)",
    "exact:4": "exact: expected nothing behind its name, got '4'",
    "regex": "regex: expected a text behind its name, as regex:TEXT",
    "regex:(": "regex: missing ), unterminated subpattern",
    "length:0": "length: expected a whole number of 1 or more, got '0'",
    "command:./nowhere": "command: ./nowhere: there is no such program",
    "command:'": "command: No closing quotation",
    "reasoning-gym": "pip install 'reasoning-gym'",
}


@pytest.mark.bad_input("`--reward-funcs {text}`")
@pytest.mark.parametrize("text", REFUSED)
def test_functions_that_cannot_be_loaded_are_refused(folder, text, monkeypatch):
    (folder / "syntax.py").write_text("def f(completions):\n    return [\n")
    (folder / "imports.py").write_text("import nowhere\ndef f(completions): ...\n")
    (folder / "exits.py").write_text("raise SystemExit(4)\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as refused:
        scored(text)
    assert REFUSED[text] in str(refused.value)


@pytest.mark.bad_input("a reward function that takes a column which the data lack")
def test_a_missing_column_stops_whatever_failures_do(folder):
    with pytest.raises(UserError, match="missing a required argument: 'difficulty'; the arguments and columns here"):
        scored("rewards.py:asks", reward_errors="none")


@pytest.mark.bad_input("`--reward-weights` of another number than the functions, and no function")
def test_weights_are_as_many_as_functions(folder):
    with pytest.raises(UserError, match="reward_weights: expected a number for each of exact, length, got 1"):
        scored("exact", "length:4", reward_weights=[1])
    with pytest.raises(UserError, match="reward_funcs: expected a reward function"):
        scored()


def test_a_check_leaves_within_a_second_and_the_next_batch_is_asked_anew(folder):
    stops = []

    def check():
        if stops:
            raise KeyboardInterrupt

    with opened("rewards.py:sleeps,counts") as rewards:
        stops.append(True)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            rewards(PROMPTS, COMPLETIONS, COLUMNS, check)
        assert time.monotonic() - began < 1
        stops.clear()
        np.testing.assert_array_equal(rewards(["p"], ["a"], {}), [[1], [1]])


PARENT = """
import signal
# A shell has the programs that it starts in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from deltatune.options.config import TrainConfig
from deltatune.rewards import Rewards
rewards = Rewards(TrainConfig(reward_funcs=["rewards.py:sleeps"]))
print(rewards._children[0]._process.pid, flush=True)
rewards(["a"] * 2, ["a", "bb"], {})
"""


def test_a_program_that_ends_leaves_no_process(folder):
    with contextlib.ExitStack() as stack:
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        started = [subprocess.Popen([sys.executable, "-c", PARENT], **how) for _ in range(2)]
        parents = [stack.enter_context(parent) for parent in started]
        groups = [int(parent.stdout.readline()) for parent in parents]
        time.sleep(0.2)
        for parent, number in zip(parents, (signal.SIGKILL, signal.SIGINT), strict=True):
            parent.send_signal(number)
            parent.wait(5)
    assert all(map(ends, groups))


def test_a_program_scores_lines_of_json(folder):
    script = folder / "score.sh"
    script.write_text(
        f"#!{sys.executable}\nimport json, sys\nfor line in sys.stdin:\n    row = json.loads(line)\n"
        "    print('null' if row['prompt'] == sys.argv[1] else len(row['completion']) + len(row['answer']))\n"
    )
    script.chmod(0o755)
    with opened("command:./score.sh 'third'") as rewards:
        assert rewards.names == ("score",)
        np.testing.assert_array_equal(rewards(PROMPTS, COMPLETIONS, COLUMNS), [[2, 3, np.nan]])


PROGRAMS = {
    "false": "the program ended with exit code 1",
    "yes": "the output has more than 1,048,576 bytes",
    "printf good": "JSONDecodeError",
    "sleep 100": "took longer than 2 seconds",
}


@pytest.mark.bad_input("a reward program that fails, floods its output, writes no JSON or hangs")
def test_a_program_that_fails_is_named(folder):
    with pytest.raises(RewardError) as failed:
        scored(*(f"command:{program}" for program in PROGRAMS), reward_timeout=2)
    for line, (program, words) in zip(str(failed.value).splitlines(), PROGRAMS.items(), strict=False):
        assert line.startswith(f"reward {program}: ")
        assert words in line


CASES = {
    "exact": (
        {"completions": [" 4\n", "5", [{"role": "assistant", "content": "4"}]], "answer": ["4", "4", 4]},
        [1, 0, 1],
    ),
    "marked": (
        {"completions": ["2 + 2\n#### 4", "4", "#### 3 #### 4\nso", "#### 5"], "answer": ["a\n#### 4", "4", "4", "4"]},
        [1, 0, 1, 0],
    ),
    "marked:Answer:": ({"completions": ["Answer: yes"], "answer": ["yes"]}, [1]),
    "regex:^(yes|no)$": ({"completions": ["yes", "yes!", "no"]}, [1, 0, 1]),
    "json:name, age": (
        {"completions": ['{"name": 1, "age": 2, "x": 3}', '{"name": 1}', "[1]", "name age", "[" * 100_000]},
        [1, 0, 0, 0, 0],
    ),
    "json": ({"completions": ["{}", "1"]}, [1, 0]),
    "length:4": ({"completion_ids": [[1] * 4, [1] * 5, [1] * 8, [1] * 20]}, [0, -0.25, -1, -1]),
    "repetition:2": ({"completion_ids": [[1, 2, 3, 4], [5] * 5, [1]]}, [0, -0.75, 0]),
    "repetition": ({"completion_ids": [[7] * 5, [1, 2]]}, [1 / 3 - 1, 0]),
}


def reward(text):
    name, _, argument = text.partition(":")
    return built_in(name, argument)


@pytest.mark.parametrize("text", CASES)
def test_a_built_in_reward_is_its_definition(text):
    columns, wanted = CASES[text]
    assert reward(text)(**columns) == pytest.approx(wanted)


def test_mathematics_is_compared_by_math_verify(monkeypatch):
    module = ModuleType("math_verify")
    module.parse = lambda text: [text.strip("$").replace("2/4", "1/2")] if "/" in text and "$" in text else []
    module.verify = lambda gold, formula: gold == formula
    monkeypatch.setitem(sys.modules, "math_verify", module)
    completions = ["$1/2$", "$2/4$", "$1/3$", "$1/2$"]
    rewards = reward("math-verify")(completions=completions, answer=["1/2", "$1/2$", "1/2", "none"])
    assert rewards == [1, 1, 0, None]


def test_generated_tasks_are_scored_by_reasoning_gym(monkeypatch):
    module, parts = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.utils")
    module.get_score_answer_fn = lambda name: lambda answer, entry: (name, answer, entry["answer"]) == ("sums", "4", 4)
    parts.extract_answer = lambda text: text[8:-9] if text.startswith("<answer>") else None
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", parts)
    columns = {"answer": [4, 4, 4], "metadata": [{"source_dataset": "sums"}] * 3}
    assert reward("reasoning-gym")(completions=["<answer>4</answer>", "4", "5"], **columns) == [1, 1, 0]


REWARD_RUNS_FUNCTIONS = """
from pathlib import Path

def letters(completions, letter):
    return [text.count(one) / 12 for text, one in zip(completions, letter)]

def fails_later(completions):
    calls = Path("calls")
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if len(calls.read_text()) == 3:
        raise ValueError("no judge")
    return [1.0 for _ in completions]
"""


@pytest.fixture
def train(tmp_path, checkpoint):
    (tmp_path / "rewards.py").write_text(REWARD_RUNS_FUNCTIONS)
    rows = [{"prompt": f"question {n} ", "letter": "aeiou"[n % 5]} for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"iters": 4, "batch-size": 2, "num-generations": 4, "max-completion-length": 12, "max-seq-length": 64}
    words = [word for name, value in sizes.items() for word in (f"--{name}", value)]

    def run(*flags, model=checkpoint):
        start = ["train", "--model", model, "--data", "prompts.jsonl", "--loss", "grpo"]
        return called(*start, *words, "--adapter-path", "out", *flags, cwd=tmp_path)

    return run


@pytest.mark.bad_input("a reward file with a mistake, and a model that is missing")
def test_a_mistake_in_a_file_is_named_before_the_model_is_looked_for(train, tmp_path):
    (tmp_path / "wrong.py").write_text("def f(completions)\n    return []\n")
    done = train("--reward-funcs", "wrong.py:f", model="nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "wrong.py, line 1, is not Python: expected ':'" in done.stderr


def test_a_run_that_a_failure_has_ended_goes_on_without_its_rewards(train):
    flags = ["--reward-funcs", "rewards.py:letters,fails_later", "--reward-weights", "1", "0.5"]
    done = train(*flags)
    assert done.returncode == 2
    assert "reward fails_later (rewards.py): raised ValueError: no judge (rewards.py, line 11)" in done.stderr
    assert "The state after iteration 2 is saved" in done.stderr
    done = train(*flags, "--reward-errors", "none", "--resume")
    assert done.returncode == 0, done.stderr
    assert "Resuming after iteration 2 of 4." in done.stdout
