"""Groups of parameters that an update treats in a way of their own: LoRA+'s learning rates, and no weight decay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.nn as nn
import mlx.optimizers

from ...options.config import TrainConfig
from ..tree import leaves

# The names that transformers' Trainer leaves out of weight decay (get_decay_parameter_names), in lower case, and A_log.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)a_log$")
# The classes of norms. By name alone, `norm1` and `norm_f` would not be found.
_NORM = re.compile(r"(layer|rms|group|batch|instance)norm|norm$")


class ParameterGroup(NamedTuple):
    """How an update treats the parameters of a group: its factor of the learning rate, and whether they decay."""

    rate: float = 1.0
    decays: bool = True


def parameter_groups(
    model: nn.Module, optimizer: mlx.optimizers.Optimizer, config: TrainConfig
) -> dict[str, ParameterGroup]:
    """Return the groups of the trained parameters, by path; one without a group has the optimizer's settings."""
    rates = _rates(model, config)
    left_out = set(undecayed(model)) if weight_decay(optimizer) else set()
    return {path: ParameterGroup(rates.get(path, 1.0), path not in left_out) for path in rates.keys() | left_out}


def undecayed(model: nn.Module) -> list[str]:
    """Return the paths of the trained parameters that weight decay leaves out: norms, biases and A_log.

    Decay pulls numbers to 0, where a norm or a gate is no simpler than elsewhere; some norms are stored as 1 + w.
    """
    norms = {path for path, module in model.named_modules() if _NORM.search(type(module).__name__.lower())}
    trained = [path for path, _ in leaves(model.trainable_parameters())]
    return [path for path in trained if path.rpartition(".")[0] in norms or _UNDECAYED.search(path.lower())]


def weight_decay(optimizer: mlx.optimizers.Optimizer) -> float:
    """Return the weight decay of an optimizer; 0 for one that has none."""
    return getattr(optimizer, "weight_decay", 0.0)


@contextmanager
def settings_of(optimizer: Any, group: ParameterGroup) -> Iterator[None]:
    """Within the context, the optimizer has the learning rate and the weight decay of a group."""
    rate = optimizer.state["learning_rate"] if group.rate != 1 else None
    decay = weight_decay(optimizer)
    if rate is not None:
        optimizer.state["learning_rate"] = rate * group.rate
    if decay and not group.decays:
        optimizer.weight_decay = 0.0
    try:
        yield
    finally:
        if rate is not None:
            optimizer.state["learning_rate"] = rate
        if decay and not group.decays:
            optimizer.weight_decay = decay


def _rates(model: nn.Module, config: TrainConfig) -> dict[str, float]:
    """Return the factors of the learning rates that are not 1, by the parameters' paths: LoRA+'s, arXiv 2402.12354."""
    if config.loraplus_lr_ratio is None:
        return {}
    trained = leaves(model.trainable_parameters())
    return {path: config.loraplus_lr_ratio for path, _ in trained if path.endswith(".lora_b")}
