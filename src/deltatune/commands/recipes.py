"""`deltatune recipes` lists option files for well-known models, copies one, and translates those of other trainers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..wrapping import say


def add(commands: Any) -> None:
    """Add the command and its flags to the command line."""
    parser = commands.add_parser(
        "recipes",
        help="list YAML files for models that many people tune, copy one, or translate another trainer's",
        usage="deltatune recipes [copy NAME [PATH] | from FILE]",
        description="Without further words, list the recipes. `copy` writes one, for `deltatune train -c`. `from` "
        "prints the options of a YAML file of axolotl or LLaMA-Factory, or of an Unsloth notebook (.ipynb, .py), which "
        "it reads and does not run; what could not be translated stands in comments and on standard error.",
    )
    parser.set_defaults(call=run, parser=parser, does=None)
    actions = parser.add_subparsers(
        prog="deltatune recipes", metavar="COMMAND", help="copy a recipe, or translate a file"
    )
    copy = actions.add_parser("copy", help="write a recipe into a file")
    copy.add_argument("name", metavar="NAME", help="one of the list")
    copy.add_argument("path", metavar="PATH", nargs="?", help="new file, or a folder for it (default: NAME.yaml)")
    copy.set_defaults(does=_copy, parser=copy)
    translate = actions.add_parser("from", help="print another trainer's file in the words of deltatune")
    translate.add_argument("file", metavar="FILE", help="a YAML file of axolotl or LLaMA-Factory, or a notebook")
    translate.set_defaults(does=_translate, parser=translate)


def run(arguments: argparse.Namespace) -> int:
    """List, copy or translate, and return exit code 0."""
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


def _translate(arguments: argparse.Namespace) -> None:
    from ..recipes.translate import translate

    translation = translate(Path(arguments.file))
    print(translation.text, end="")
    for line in translation.unsaid:
        say(f"deltatune: not translated: {line}", sys.stderr)
