"""Every room of the source has a budget of lines, and the counts of style find what they look for."""

import ast

import house


def test_every_room_is_within_its_budget():
    assert house.over_budget(house.lines_of_rooms()) == []


def test_a_room_above_its_budget_and_one_without_are_named():
    counts = {"lora": house.BUDGETS["lora"].lines + 1, "kitchen": 3}
    budget = house.BUDGETS["lora"].lines
    assert house.over_budget(counts) == [
        "kitchen has no budget in scripts/house.py",
        f"lora has {budget + 1:,} lines, and its budget is {budget:,}: let something go",
    ]


def test_style_is_counted():
    planted = ast.parse(
        '"""What a module says."""\n'
        "a, b = 1, 2\n"
        "a, b = pair\n"
        "c = 1 if a else 2 if b else 3\n"
        "import upstream\nfrom functools import partial\ndef ended(): pass\n"
        "other.after = lambda: None\nother.part.after = ended\nother.after = self.ended\n"
        "other.after = partial(ended, 1)\nother.after = ended()\nother.after = 3\n"
        "self.after = lambda: None\nupstream.part.after = lambda: None\n"
        "backend.device()\n"
    )
    assert house.style([planted]) == {
        "parallel assignments": 1,
        "nested conditional expressions": 1,
        "functions assigned to attributes": 4,
        "questions for the device": 1,
        "words of docstrings": 4,
        "of which `what`": 1,
    }
    assert not house.headless({"words of docstrings": 1000, "of which `what`": 0})
    assert house.headless({"words of docstrings": 1000, "of which `what`": 4})


def test_no_function_is_assigned_to_an_attribute_of_a_finished_object():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in house.SOURCE.rglob("*.py")]
    assert sum(map(house._hooks, trees)) == 0
