"""The map of the tree: every module says what it holds, and CONTRIBUTING.md lists the rooms from top to bottom."""

import re
from pathlib import Path

import tree

ROOT = Path(__file__).parents[1]
# Files beside the rooms that the table leaves out.
NEIGHBOURS = ("errors", "upstream")


def test_the_first_line_of_every_docstring_says_what_the_module_holds():
    phrases = {str(path.relative_to(tree.SOURCE)): tree.phrase(path) for path in tree.modules().values()}
    unclear = {name: text for name, text in phrases.items() if not re.fullmatch(r"[^\n]{20,}[.?]", text)}
    assert not unclear, "the first line of a docstring is one sentence that says what the file holds"


def test_the_rooms_are_listed_from_top_to_bottom():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| room \|[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", page)
    named = [name for line in table.splitlines() for name in re.findall(r"`(\w+)(?:/|\.py)`", line.split("|")[1])]
    rooms = [room for room in reversed(tree.ORDER) if room not in NEIGHBOURS and room != "__main__"]
    assert sorted(named) == sorted(rooms)
    # A line of the table may hold two rooms, in either order.
    assert all(abs(named.index(room) - rooms.index(room)) <= 1 for room in rooms)


def test_the_tree_a_room_by_its_name_and_an_unknown_one(capsys, monkeypatch):
    # Reading every import takes seconds.
    monkeypatch.setattr(tree, "imports", list)
    assert tree.main([]) == 0
    printed = capsys.readouterr().out
    assert "data/batches/batch.py" in printed
    assert tree.phrase(tree.SOURCE / "lora" / "rounding.py") in printed
    assert tree.main(["lora", "machine"]) == 0
    printed = capsys.readouterr().out
    assert "lora/rounding.py" in printed
    assert "data/batches/batch.py" not in printed
    assert tree.main(["kitchen"]) == 2
    assert "No room: kitchen." in capsys.readouterr().err
