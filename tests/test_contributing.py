"""CONTRIBUTING.md's map of the tree is the tree, in the order in which groups may import one another."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import tree

ROOT = Path(__file__).parents[1]

LINE = re.compile(r"(  )?(\S+?)(/|\.py)\s+(\S.*)")


def listed() -> dict[str, str]:
    """Path -> phrase, of every folder and file that the map lists."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\n(__main__.*?)```", page, re.DOTALL)
    found: dict[str, str] = {}
    folder = ""
    for line in block.splitlines():
        indented, name, kind, phrase = LINE.fullmatch(line).groups()
        if kind == "/":
            folder = f"{name}/"
        path = f"{name}/" if kind == "/" else f"{folder if indented else ''}{name}.py"
        assert path not in found, f"{path} is listed twice"
        found[path] = phrase
    return found


def test_the_map_lists_every_file_with_a_phrase():
    files = {str(path.relative_to(tree.SOURCE)) for path in tree.modules().values() if path.stem != "__init__"}
    folders = {f"{path.parent.relative_to(tree.SOURCE)}/" for path in tree.modules().values()} - {"./"}
    assert listed().keys() == files | folders
    assert all(len(phrase) > 8 for phrase in listed().values())


def test_the_map_goes_from_top_to_bottom():
    groups = list(dict.fromkeys(path.partition("/")[0].removesuffix(".py") for path in listed()))
    assert groups == [group for group in reversed(tree.ORDER) if group in groups]
