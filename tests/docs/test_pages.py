"""Links, paths and lines of the documentation, and the places in the code that name a page."""

import re

import pytest
import yaml
from pages import DECISIONS, DOCS, KEPT, PAGES, READ, ROOT, anchors, prose

import docs_pages

LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
# A path in backticks or after a command, beginning at the repository's root or at the package.
NAMED = re.compile(r"`((?:src|tests|benchmarks|scripts|examples|docs|ops|patches)/[\w/.-]*\w|\w[\w/]*/\w+\.py)`")
CODE = [path for folder in ("src", "tests", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")]


def page_names(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [*READ, *DECISIONS], ids=page_names)
def test_relative_links_and_anchors_resolve(page):
    wrong = []
    for link in LINK.findall(prose(page)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", READ, ids=page_names)
def test_paths_that_a_page_names_exist(page):
    named = NAMED.findall(page.read_text(encoding="utf-8"))
    assert not [path for path in named if not ((ROOT / path).exists() or (ROOT / "src/deltatune" / path).exists())]


def test_the_way_through_the_code_names_what_is_there():
    """Each row of how/code.md has a file and a function or class that stands in it."""
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", (DOCS / "how/code.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) > 20
    wrong = []
    for file, name in rows:
        text = (ROOT / "src/deltatune" / file).read_text(encoding="utf-8")
        if not re.search(rf"^(?:def|class) {name}\b", text, re.MULTILINE):
            wrong.append(f"{file}: {name}")
    assert not wrong


def test_pages_that_the_code_names_exist():
    """A comment or a message that sends its reader to docs/..., sends them to a page that is there."""
    wrong = []
    for path in CODE:
        for page in re.findall(r"docs/[\w/-]+\.(?:md|svg)", path.read_text(encoding="utf-8")):
            if not (ROOT / page).is_file():
                wrong.append(f"{path.relative_to(ROOT)}: {page}")
    assert not wrong


@pytest.mark.parametrize("page", [*KEPT, ROOT / "README.md"], ids=page_names)
def test_lines_are_short(page):
    """A table's row cannot be broken; every other line can."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


class Loader(yaml.SafeLoader):
    """mkdocs.yml may name Python objects, which nobody needs here."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
#: Pages for those who change deltatune, which stand beside the readers' navigation.
BESIDE = [page.strip("/") for page in SITE["not_in_nav"].split()]


def test_every_page_is_in_the_navigation():
    def files(entry):
        if isinstance(entry, str):
            return [entry]
        inside = entry.values() if isinstance(entry, dict) else entry
        return [file for each in inside for file in files(each)]

    listed = [*files(SITE["nav"]), *(str(page.relative_to(DOCS)) for page in DECISIONS), "reference/checks.md"]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
    assert BESIDE == ["decisions", "reference/checks.md"]


def test_every_page_of_decisions_is_on_their_index():
    index = DOCS / "decisions" / "index.md"
    listed = re.findall(r"\]\(([a-z-]+\.md)\)", index.read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.name for page in DECISIONS if page != index)


@pytest.mark.parametrize("page", ["decisions/index.md", "reference/checks.md"])
def test_a_page_beside_the_navigation_is_linked_from_both_places(page):
    assert f"](docs/{page})" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"]({page})" in (DOCS / "index.md").read_text(encoding="utf-8")


MATH = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FORMULAS = [*PAGES, *(ROOT / "src/deltatune/ops").rglob("README.md")]


SENTENCES = [each for page in FORMULAS for each in re.findall(r"\$`([^`]+)`\$", page.read_text(encoding="utf-8"))]


def formulas():
    return [block for page in FORMULAS for block in MATH.findall(page.read_text(encoding="utf-8"))]


def test_mathematics_has_no_word_that_its_converter_leaves_as_it_is():
    assert len(formulas()) > 8
    left = r"\\begin\{aligned\}|\\mathrel|\\operatorname"
    assert not [block for block in formulas() if re.search(left, block)]


def test_mathematics_becomes_mathml():
    """Where the site's tools are installed, as `make docs` does."""
    docs_math = pytest.importorskip("docs_math", reason="latex2mathml is not installed")
    for block in formulas():
        assert docs_math.display(block, "math", "math", {}, None).startswith('<div class="math"><math ')
    with pytest.raises(Exception, match="cannot be converted"):
        docs_math.display(r"\unheard x", "math", "math", {}, None)


def test_mathematics_within_a_sentence_becomes_mathml_and_code_stays_code():
    markdown = pytest.importorskip("markdown", reason="mkdocs is not installed")
    docs_math = pytest.importorskip("docs_math", reason="latex2mathml is not installed")
    found = markdown.markdown("with $`a_i < b_{ij}`$ in `$x$`", extensions=[docs_math.Mathematics()])
    assert re.match(r'<p>with <math [^>]*display="inline">.*<mi>b</mi>.*</math> in <code>\$x\$</code></p>$', found), (
        found
    )
    assert "`" not in found
    for formula in SENTENCES:
        assert docs_math.mathml(formula, "inline").startswith("<math ")
    assert len(SENTENCES) > 40


def test_a_flag_within_a_sentence_is_not_broken_into_lines():
    flag = '<span class="flag">{}</span>'.format
    shown = docs_pages.on_page_content("<p>with <code>train --grad-checkpoint -c a-b.yaml</code> --not-code")
    assert shown == f"<p>with <code>train {flag('--grad-checkpoint')} {flag('-c')} a-b.yaml</code> --not-code"
    assert ".flag { white-space: nowrap; }" in (DOCS / "extra.css").read_text(encoding="utf-8")
