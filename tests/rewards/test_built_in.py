"""Built-in rewards by their definitions; those of other packages call these."""

import sys
from types import ModuleType

import pytest

from deltatune.rewards.built_in import built_in

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
