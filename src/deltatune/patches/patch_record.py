"""The record of a function to replace: its target, reason, replacement, tried versions and evidence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

# The versions that the records were tried with. pyproject.toml asks for the lowest ones, `make floors` tries them.
# `deltatune` says where another one is installed; the evidence decides.
TRIED = {"mlx": ">=0.32.2,<=0.32.4", "mlx_lm": ">=0.32.0,<=0.32.2", "mlx_vlm": ">=0.7.0,<=0.7.10"}


def installed(package: str) -> str | None:
    """The version that the imported package itself states (mlx states it in mlx.core). Metadata may be another's."""
    for name in (package, f"{package}.core"):
        if hasattr(sys.modules.get(name), "__version__"):
            return str(sys.modules[name].__version__)
    return None


def is_tried(package: str, version: str) -> bool:
    """Whether the records were tried with a version of a package."""
    return SpecifierSet(TRIED[package]).contains(Version(version), prereleases=True)


def latest(package: str) -> str:
    """The latest version of a package that the records were tried with."""
    return str(max(Version(specifier.version) for specifier in SpecifierSet(TRIED[package])))


Function = Callable[..., Any]
# Takes the original and the replacement, and returns the evidence against the replacement, or None.
Check = Callable[[Function, Function], str | None]

# The outcome of a check where the original has no fault any more that the replacement would mend.
SETTLED = "it needs no replacement any more."

# The uses of a model; a record names those that give other results without it.
TRAINING = "training"
PACKING = "packing"
INFERENCE = "inference"
ALWAYS = (TRAINING, PACKING, INFERENCE)


@dataclass(frozen=True)
class Patch:
    """A record of one function to replace: the function `name` of `module`, as `function`, `Class.method` or
    `submodule.function`.

    `replacement` takes the original function and returns the one to put in its place, for a `reason`; `without` is a
    sentence on the consequence where that cannot be. `check` compares the two on a small case, forward and gradient: it
    returns None where they agree, SETTLED, or a sentence on the difference. `signature` is the expected one, without
    annotations: that of the replacement, unless another is given, and "" where `check` alone decides, as for compiled
    functions. `needed_for` are the uses of a model that give other results without the replacement (TRAINING, PACKING,
    INFERENCE); without any, it saves time or memory alone.
    """

    module: str
    name: str
    replacement: Callable[[Function], Function]
    check: Check
    reason: str
    without: str
    signature: str | None = None
    needed_for: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The package that defines the function, by the name it is imported under."""
        return self.module.partition(".")[0]

    @property
    def target(self) -> str:
        """The full name of the function that is replaced."""
        return f"{self.module}.{self.name}"

    @property
    def attribute(self) -> str:
        """The last part of the target's name."""
        return self.name.rpartition(".")[2]
