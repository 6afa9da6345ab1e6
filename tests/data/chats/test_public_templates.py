"""With the public chat templates of TRL's package, each part of a row is in its tokens or counted by its kind."""

import importlib.util
from pathlib import Path

import pytest

from deltatune.demo.assets import MODEL
from deltatune.models.load import load
from spoken_rows import checked_kinds

# scripts/make_env installs TRL without what it requires, so it is not imported.
PLACE = importlib.util.find_spec("trl")
FOLDER = Path(PLACE.submodule_search_locations[0] if PLACE else "trl") / "chat_templates"
# Templates as models have them, those for TRL's training are its own; and those of the families in this folder.
PATHS = [path for path in sorted(FOLDER.glob("*.jinja")) if not path.stem.endswith("_training")]
PATHS += sorted((Path(__file__).parents[1] / "templates").glob("*.jinja"))
# What templates are known to lose, and so must be counted for some row.
SEEN = {
    "qwen3": {"developer messages"},
    "qwen2_5": {"developer messages"},
    "glm4moe": {"developer messages"},
    "phi3": {"developer messages", "tools"},
    "cohere2": {"developer messages"},
    "gptoss": {"system messages", "calls after the first"},
    "llama3_1": {"text beside a call"},
}
# Templates whose prompt begins no answer, that take lists of parts alone, or that want a BOS token.
REFUSED = {"deepseek_r1_distill", "idefics3", "llama3", "llava_next", "smolvlm"}
# The others are weekly: these lose each kind of part, call tools in each way, or are refused.
QUICK = {path for path in PATHS if path.parent.name == "templates" or path.stem in {*SEEN, "gemma4_v5", "llama3"}}


@pytest.fixture(scope="module")
def tokenizer():
    return load(MODEL).tokenizer


def test_thirty_templates_are_read():
    assert sum(path.stem not in REFUSED for path in PATHS) >= 30


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path in QUICK else [pytest.mark.weekly], id=f"{path.parent.name}-{path.stem}")
        for path in PATHS
    ],
)
def test_each_part_is_in_the_tokens_or_counted(tokenizer, path):
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    kinds, read = checked_kinds(tokenizer, rows=12, seed=1)
    assert read or path.stem in REFUSED
    assert kinds >= SEEN.get(path.stem, set())
