"""The sets of versions that `make compat` tries, each in its own environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Versions:
    """A set of versions."""

    mlx: str
    mlx_lm: str
    mlx_vlm: str

    @property
    def name(self) -> str:
        return f"mlx-{self.mlx}_mlx-lm-{self.mlx_lm}_mlx-vlm-{self.mlx_vlm}"


SETS = (
    # The floors of pyproject.toml.
    Versions("0.32.2", "0.32.0", "0.7.0"),
    Versions("0.32.4", "0.32.2", "0.7.10"),
)
