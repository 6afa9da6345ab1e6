"""`deltatune recipes` lists option files for well-known models, and copies one."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "list YAML files for models that many people tune, or copy one"
USAGE = "deltatune recipes [copy NAME [PATH]]"
DESCRIPTION = "Without further words, list the recipes. `copy` writes one, for `deltatune train -c`."


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(does=None)
    actions = parser.add_subparsers(prog="deltatune recipes", metavar="COMMAND", help="copy a recipe")
    copy = actions.add_parser("copy", help="write a recipe into a file")
    copy.add_argument("name", metavar="NAME", help="one of the list")
    copy.add_argument("path", metavar="PATH", nargs="?", help="new file, or a folder for it (default: NAME.yaml)")
    copy.set_defaults(does=_copy, parser=copy)


def run(arguments: argparse.Namespace) -> int:
    """List or copy, and return exit code 0."""
    (arguments.does or _list)(arguments)
    return 0


def _list(arguments: argparse.Namespace) -> None:
    from ..recipes.shipped import recipes

    shipped = recipes()
    width = max(len(recipe.name) for recipe in shipped)
    for recipe in shipped:
        print(f"{recipe.name:<{width}}  {recipe.title}")
    print("\nCopy one: deltatune recipes copy NAME")


def _copy(arguments: argparse.Namespace) -> None:
    from ..recipes.shipped import copy

    path = copy(arguments.name, Path(arguments.path) if arguments.path else None)
    print(f"Wrote {path}. Put your data's folder into it, then: deltatune train -c {path}")
