"""The versions of packages: the imported one, and the records' names of tried ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from packaging.specifiers import SpecifierSet
from packaging.version import Version

# The versions that the records were tried with. pyproject.toml asks for the lowest ones, scripts/compat tries them.
TRIED = {"mlx": ">=0.32.2,<=0.32.4", "mlx_lm": ">=0.32.0,<=0.32.2", "mlx_vlm": ">=0.7.0,<=0.7.10"}


def installed(package: str) -> str | None:
    """The version that the imported package itself states (mlx states it in mlx.core). Metadata may be another's."""
    for name in (package, f"{package}.core"):
        if hasattr(sys.modules.get(name), "__version__"):
            return str(sys.modules[name].__version__)
    return None


def contains(versions: str, version: str) -> bool:
    """Whether a specifier such as ">=0.32.0,<=0.32.2" contains a version."""
    return SpecifierSet(versions).contains(Version(version), prereleases=True)


def latest(tried: Iterable[str]) -> str:
    """The latest version that any of the specifiers names."""
    return str(max(Version(specifier.version) for versions in tried for specifier in SpecifierSet(versions)))
