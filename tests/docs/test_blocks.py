"""The commands, options and Python in the documentation agree with the code."""

import json
import re
import shlex
from types import SimpleNamespace

import mlx.core as mx
import pytest
from pages import DOCS, READ, ROOT, blocks

import deltatune
import docs_pages
from deltatune.commands.flags import config_from, option_fields
from deltatune.demo.assets import MODEL
from deltatune.machine import environment
from deltatune.ops import IMPLEMENTATIONS
from deltatune.options import config
from deltatune.train.reports.screen import Columns

# `deltatune ...` in a block, alone or behind a launcher; and in a sentence, where it stands in backticks.
LINE = re.compile(r"^(?:mlx\.launch .*? )?(?:\.venv/bin/)?deltatune (.*)$", re.MULTILINE)
INLINE = re.compile(r"`deltatune ([a-z][^`]*)`")


def commands():
    found = [(block.page, line) for block in blocks("", "bash") for line in LINE.findall(block.text)]
    found += [(page, line) for page in READ for line in INLINE.findall(page.read_text(encoding="utf-8"))]
    return [pytest.param(page, line, id=f"{page.stem}: {line}"[:80]) for page, line in found]


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_are_those_of_the_parser(page, line):
    words = shlex.split(line.replace("\n", " ").partition(" > ")[0], comments=True)
    command = docs_pages.commands()[words[0]]
    if words[1:] in ([], ["--help"]):
        return
    for action in command._actions:
        action.required = False  # A sentence may name a flag without what the command needs besides.
    arguments = command.parse_args(words[1:])
    if words[0] in ("train", "plan") and not arguments.config:
        config_from(arguments)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_lines_are_json(block):
    assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_runs_on_the_bundled_model(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = {"prompt": "What is in the oven?", "completion": "Bread."}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(line)}\n" * 2)
    q = k = v = mx.random.normal((1, 8, 2, 4)) / 4
    names = {
        "mx": mx,
        "model": deltatune.load(MODEL).model,
        "MODEL": str(MODEL),
        "DATA": str(tmp_path),
        "OUTPUT": str(tmp_path / "adapters"),
    }
    names |= {"q": q, "k": k, "v": v, "log_g": mx.zeros((1, 8, 2)), "beta": mx.ones((1, 8, 2))}
    exec(compile(block.text, str(block.page), "exec"), names)
    mx.eval([value for value in names.values() if isinstance(value, mx.array)])


def test_the_figures_of_the_first_fine_tune_are_as_train_prints_them():
    page = (DOCS / "start/first-fine-tune.md").read_text(encoding="utf-8")
    names = ("iteration", "train_loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory", "left")
    columns, lines = Columns(), []
    for figures in ((10, 5.7382, 14.6, 1e-4, 1028, 0.0448, 7), (20, 2.6533, 9.12, 1e-4, 1278, 0.0448, 3)):
        lines += columns.rows(dict(zip(names, figures, strict=True)), 80)
    assert "\n".join(line.plain for line in lines) in page


def test_the_environment_page_has_every_variable():
    page = (DOCS / "reference/environment.md").read_text(encoding="utf-8")
    read = {environment.variable(operator) for operator in IMPLEMENTATIONS}
    for path in (ROOT / "src").rglob("*.py"):
        read |= set(re.findall(r"\"(DELTATUNE_[A-Z_]+)\"", path.read_text(encoding="utf-8")))
    assert set(re.findall(r"`(DELTATUNE_\w+)`", page)) == read
    for name, size in environment.PIECE.items():
        assert f"`{name}` becomes `{size}`" in re.sub(r"\s+", " ", page)
        assert f"`{environment.SMALL_PIECE[name]}`" in page


def test_every_public_name_is_on_the_python_page():
    page = (DOCS / "reference/python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert {f"deltatune.{name}" for name in deltatune.__all__} <= set(shown)
    # What mkdocstrings is told of a name is indented below it; otherwise it would be a sentence of the page.
    assert not re.search(r"^options:", page, re.MULTILINE)


def test_every_command_is_on_the_commands_page():
    page = (DOCS / "reference/commands.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `deltatune (\w+)", page, re.MULTILINE)
    assert table == list(docs_pages.commands())


def test_tables_made_for_the_pages_are_complete():
    """Every option with its default, every flag of every command, and no marker that nobody replaces."""
    options, flags = docs_pages.options(), docs_pages.flags()
    for field in docs_pages.dataclasses.fields(config.TrainConfig):
        assert f"| `{field.name}` | " in options
    for name, command in docs_pages.commands().items():
        known = [string for action in command._actions for string in action.option_strings]
        assert not [string for string in known if f"`{string}`" not in options + flags and not _is_help(name, string)]
    markers = [name for page in DOCS.rglob("*.md") for name in docs_pages.MARKER.findall(page.read_text("utf-8"))]
    assert sorted(markers) == sorted(docs_pages.PARTS)


def _is_help(command, string):
    """--help itself, and the flags of train and plan, which stand on the options page under the option's name."""
    option = string.removeprefix("--").removeprefix("no-").replace("-", "_")
    options = {field.name for field in option_fields()}
    return string in ("-h", "--help") or (command in ("train", "plan") and option in options)


def test_a_cell_names_its_column_where_a_table_has_three_or_more():
    head, row = "<tr><th></th><th>b</th><th><em>c</em></th></tr>", "<tr><td>1</td><td>2</td><td>3</td></tr>"
    named = '<tr><td data-name="">1</td><td data-name="b">2</td><td data-name="c">3</td></tr>'
    page = docs_pages.on_page_content(f"<table>{head}{row}{row}</table>")
    assert page == f"<table data-wide>{head.replace('<th></th>', '<td></td>')}{named}{named}</table>"
    two = "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>"
    assert docs_pages.on_page_content(two) == two


def test_pages_for_developers_are_out_of_the_search():
    for name, excluded in {"decisions/memory.md": True, "how/memory.md": False}.items():
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name), meta={})
        docs_pages.on_page_markdown("", page=page)
        assert page.meta == ({"search": {"exclude": True}} if excluded else {})
    assert all((DOCS / name).exists() for name in docs_pages.DEVELOPERS)
