"""The sets of versions that `make compat` tries, each in its own environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Versions:
    """A set of versions; `plugin` is loaded by pytest (tests/compat) where mlx-vlm cannot be imported without it."""

    mlx: str
    mlx_lm: str
    mlx_vlm: str
    plugin: str | None = None

    @property
    def name(self) -> str:
        return f"mlx-{self.mlx}_mlx-lm-{self.mlx_lm}_mlx-vlm-{self.mlx_vlm}"


SETS = (
    Versions("0.31.2", "0.31.3", "0.5.0"),
    Versions("0.31.2", "0.31.3", "0.6.2", plugin="metal_builds"),
    Versions("0.32.0", "0.32.2", "0.6.17"),
    # MLX refuses gradients of indices since 0.32.1, but mlx-vlm 0.6.17 asks for them.
    Versions("0.32.4", "0.32.2", "0.6.17"),
    Versions("0.32.4", "0.32.2", "0.7.10"),
)
