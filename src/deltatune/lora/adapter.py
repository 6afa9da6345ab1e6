"""What every adapter has in common: a frozen base, a low-rank update, its scale and its dropout.

Factors are fp32 whatever the base is, as in mlx-lm: an update of AdamW is far below what bf16 resolves, and the
factors are small. Names and shapes are mlx-lm's, so that a saved adapter loads on either side.
"""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

ADAPTER_LEAVES = ("lora_a", "lora_b", "m")


class Adapter(nn.Module):
    """A module around `base` with y = base(x) + scale * update(dropout(x)). Subclasses say what the update is."""

    base_name: ClassVar[str]
    kind: ClassVar[str]

    def __init__(self, base: nn.Module, scale: float, dropout: float):
        super().__init__()
        self[self.base_name] = base
        self.dropout = nn.Dropout(p=dropout)
        self.scale = scale

    @classmethod
    def from_base(cls, base: nn.Module, rank: int = 8, scale: float = 20.0, dropout: float = 0.0) -> Any:
        """The adapter around `base`; lora_b starts at zero, so that the model starts as it was."""
        make: Any = cls
        return make(base, rank, scale, dropout)

    @property
    def base(self) -> nn.Module:
        """The module that this adapter adapts."""
        return self[self.base_name]

    @property
    def dropout_rate(self) -> float:
        """The share of inputs that training drops."""
        return 1 - self.dropout._p_1

    @property
    def rank(self) -> int:
        """The inner size of the low-rank update."""
        raise NotImplementedError

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """A module like the base with the update inside its weight; packed again unless `dequantize`."""
        raise NotImplementedError

    def unfreeze_adapter(self) -> None:
        """Train this adapter's own factors and nothing else of it."""
        self.freeze()
        self.unfreeze(recurse=False, keys=[leaf for leaf in ADAPTER_LEAVES if leaf in self])


def uniform(fan_in: int, shape: tuple[int, ...]) -> mx.array:
    """fp32 values in +-1/sqrt(fan_in): how mlx-lm starts lora_a."""
    bound = fan_in**-0.5
    return mx.random.uniform(low=-bound, high=bound, shape=shape)
