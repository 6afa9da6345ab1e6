"""The option files that come with the package, one for each model."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..errors import UserError
from ..machine.atomic_files import write
from ..options.values import nearest


@dataclass(frozen=True)
class Recipe:
    """A file of options: its name, its text, and its first comment, which states its purpose."""

    name: str
    text: str

    @property
    def title(self) -> str:
        """The first line, without its mark."""
        return self.text.partition("\n")[0].removeprefix("# ")


def recipes() -> list[Recipe]:
    """Return all recipes, the small models first, as their files are numbered in ORDER."""
    folder = resources.files(__package__) / "shipped"
    return [Recipe(name, (folder / f"{name}.yaml").read_text(encoding="utf-8")) for name in ORDER]


ORDER = (
    "qwen3.5-0.8b",
    "qwen3.5-2b",
    "qwen3.5-4b",
    "qwen3.5-4b-images",
    "qwen3.5-9b",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "qwen3-next-80b-a3b",
    "kimi-linear-48b-a3b",
    "olmo-hybrid-7b",
)


def copy(name: str, path: Path | None) -> Path:
    """Write a recipe to a new file, or to a folder for it, by default NAME.yaml here; return its path."""
    by_name = {recipe.name: recipe for recipe in recipes()}
    name = name.removesuffix(".yaml").lower()
    if name not in by_name:
        raise UserError(f"recipes: no recipe {name!r}{nearest(name, list(by_name))}; there are {', '.join(by_name)}.")
    target = path or Path(f"{name}.yaml")
    target = target / f"{name}.yaml" if target.is_dir() else target
    if target.exists():
        raise UserError(f"recipes: {target} exists; give another path, or remove it.")
    write(target, by_name[name].text.encode())
    return target
