"""The versions of packages: the one that is imported, and how the records name those that they were tried with."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from packaging.specifiers import SpecifierSet
from packaging.version import Version


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


def is_older(version: str, tried: Iterable[str]) -> bool:
    """Whether a version is older than every one that the specifiers name."""
    return all(
        Version(version) < Version(specifier.version) for versions in tried for specifier in SpecifierSet(versions)
    )
