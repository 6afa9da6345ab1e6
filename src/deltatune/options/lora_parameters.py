"""The options of the adapters, under the YAML key `lora_parameters`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from .values import COUNT, FINITE, POSITIVE, Range, fix, option

_option = partial(option, "what trains")


@dataclass(frozen=True)
class LoraConfig:
    """The options of the adapters.

    Each field's metadata holds its help text and the values that it may have; making a LoraConfig checks them.

    Raises:
        UserError: A value is not one that the option may have.
    """

    rank: int = _option(16, "inner size of each adapter's update", range=COUNT)
    rank_pattern: dict[str, int] = _option(
        dict,
        "ranks of the modules that match a pattern (see keys), as JSON, in place of rank; of several patterns that "
        'match, the first counts: {"mlp.switch_mlp.*": 4}',
        range=COUNT,
    )
    scale: float = _option(2.0, "factor of the update, which is PEFT's alpha / rank", range=POSITIVE)
    alpha: float | None = _option(
        None,
        "PEFT's lora_alpha, in place of scale: scale is alpha / rank, or with rslora alpha / sqrt(rank), of each "
        "module's own rank",
        range=POSITIVE,
    )
    dropout: float = _option(
        0.0, "share of each adapter's inputs that training sets to zero", range=Range(least=0, below=1)
    )
    keys: list[str] | None = _option(
        None,
        "patterns (fnmatch) of the modules to adapt, by full path, path in a layer or name; default: every "
        "linear, expert and embedding module of the chosen layers",
        flag=False,
    )
    exclude: list[str] = _option(list, "patterns of the modules that get no adapter", flag=False)
    layer_kinds: list[str] | None = _option(
        None, "kinds of layers to adapt; default: all", flag=False, choices=("delta", "attention", "mamba", "other")
    )
    layers: list[int] | None = _option(
        None,
        "indices of the layers to adapt, in place of num_layers; negative ones count from the last",
        flag=False,
        range=FINITE,
    )
    rslora: bool = _option(False, "divide the scale by the square root of the rank", flag=False)
    init: str = _option(
        "zero",
        "where adapters start: at no update (zero), or at the principal part of the weight (pissa)",
        flag=False,
        choices=("zero", "pissa"),
    )

    def __post_init__(self) -> None:
        fix(self)
        if self.alpha is not None:
            vars(self).update(scale=self.alpha if self.rslora else self.alpha / self.rank)

    def scale_at(self, rank: int) -> float:
        """Return the factor of an update of this rank."""
        if self.rslora:
            return self.scale / rank**0.5
        return self.scale if self.alpha is None or rank == self.rank else self.alpha / rank
