"""The repository's own address: a release names it everywhere or is refused, and no other build names a place."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import addresses
from deltatune.selftest import screen

ROOT = Path(__file__).parents[1]
PLACE = "https://code.example/owner/deltatune"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with the two files that a release changes, in which the script works."""
    for name in ("pyproject.toml", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(addresses, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["addresses.py", "v1.2.3"])
    return tmp_path


def on_runner(monkeypatch, server, repository):
    for name, value in (("GITHUB_SERVER_URL", server), ("GITHUB_REPOSITORY", repository)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_a_release_names_its_repository(checkout, monkeypatch):
    on_runner(monkeypatch, "https://code.example", "owner/deltatune")
    assert addresses.main() == 0
    urls = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert (urls["Homepage"], urls["Issues"]) == (PLACE, f"{PLACE}/issues")
    places = re.findall(r"\]\(([^)\s]+)\)", (checkout / "README.md").read_text(encoding="utf-8"))
    assert len(places) > 8
    for link in [*places, urls["Documentation"], urls["Changelog"]]:
        kind, file = re.fullmatch(rf"{PLACE}/(blob|tree|raw)/v1.2.3/([^#]+)(?:#.*)?", link).groups()
        assert (ROOT / file).is_dir() == (kind == "tree")
        assert file.endswith(".svg") == (kind == "raw")
        assert (ROOT / file).exists()


@pytest.mark.bad_input("a release whose runner says {server} and {repository}")
@pytest.mark.parametrize(
    ("server", "repository"),
    [(None, None), ("https://code.example", None), ("", "owner/name"), ("https://code.example", "name"), ("x", "a/b")],
)
def test_a_release_without_an_address_is_refused(checkout, monkeypatch, capsys, server, repository):
    on_runner(monkeypatch, server, repository)
    before = [(checkout / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "README.md")]
    assert addresses.main() == 2
    assert "expected GITHUB_SERVER_URL (https://...) and GITHUB_REPOSITORY (OWNER/NAME)" in capsys.readouterr().err
    assert before == [(checkout / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "README.md")]


def test_the_release_job_writes_the_addresses_before_it_builds():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"]
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert steps.index('make addresses TAG="$TAG"') < steps.index("make check-wheel")
    assert {jobs["try"]["needs"], jobs["publish"]["needs"]} == {"build", "try"}


def test_the_source_names_no_place():
    """An address in the tree would be somebody's guess; a release has its own."""
    assert "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not re.search(r"https?://", (ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("addresses_of_package", "words"),
    [
        ([f"Homepage, {PLACE}", f"Issues, {PLACE}/issues"], f"for {PLACE}/issues: please attach it to a report there"),
        (None, "for the project's issue page: please attach it to a report there"),
    ],
)
def test_the_self_test_says_where_its_file_goes(monkeypatch, addresses_of_package, words):
    class Metadata:
        def get_all(self, name):
            return addresses_of_package if name == "Project-URL" else None

    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: Metadata())
    assert screen.destination() == words


def test_a_package_that_is_not_installed_names_no_place(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", missing)
    assert screen.destination().startswith("for the project's issue page")
