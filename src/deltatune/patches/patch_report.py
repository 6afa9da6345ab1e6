"""Reports the functions that were patched or left alone, and who serves each layer of a model.

It refuses to go on where results depend on a function that was left alone.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..layers import ENTRY_POINT, describe, gated_delta_layers, logits_of, state_space_layers
from ..ops.operator.foresight import foreseen
from ..ops.tracing.dispatch import NotedCall
from .patch_record import Patch, is_tried, latest
from .whole_rows import noting_calls, whole_rows


@dataclass(frozen=True)
class Serving:
    """The implementations of a model's layers in training, by the layer's path; "" where upstream's own code serves.

    Those of gated_delta and of linear_attention are listed by mixer, those of attention and of experts by decoder
    layer.
    """

    delta: dict[str, str] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    linear: dict[str, str] = field(default_factory=dict)

    def by_operator(self) -> dict[str, dict[str, str]]:
        """The same by the operator's name, without operators that no layer has."""
        recurrent = {"gated delta": self.delta, "linear attention": self.linear}
        operators = recurrent | {"attention": self.attention, "experts": self.experts}
        return {name: layers for name, layers in operators.items() if layers}


def serving(model: nn.Module, rows: int = 1) -> Serving:
    """Trace `model` on two tokens and see which of its layers call a patched function, and their implementations.

    Nothing is evaluated, and nothing is asked of a model without gated-delta layers or mixers of Mamba-2. Kernels that
    are tried for so many rows of a batch serve the batch.
    """
    mixers, others = gated_delta_layers(model), state_space_layers(model)
    if not (mixers or others):
        return Serving()
    try:
        layers = describe(model)
    except UserError:
        layers = []  # A model without a list of layers has none that could be named.
    attending = [layer for layer in layers if layer.kind == "attention"]
    routing = [layer for layer in layers if layer.experts]

    def noted() -> list[NotedCall]:
        with noting_calls() as calls, whole_rows():
            logits_of(model, mx.array([[0, 1]] * rows))
        return calls

    with foreseen(noted):
        calls = noted()
    names = {(call.operator, identity): call.implementation for call in calls for identity in call.callers}
    return Serving(
        {path: names.get(("gated delta", id(mixer)), "") for path, mixer in mixers.items()},
        {layer.path: names.get(("attention", id(layer.module)), "") for layer in attending},
        {layer.path: names.get(("experts", id(layer.module)), "") for layer in routing},
        {path: names.get(("linear attention", id(mixer)), "") for path, mixer in others.items()},
    )


def explain(path: str, layer: nn.Module) -> str:
    """The message for a layer that does not call deltatune: the consequence for training, and the remedy."""
    return (
        f"{path} ({type(layer).__module__}.{type(layer).__qualname__}) does not call deltatune's gated delta: "
        "it trains with whatever code it calls now, at that code's speed, memory and gradients. To let deltatune serve "
        "it, undo the replacement of gated_delta_update or of the layer's __call__ before deltatune's patches apply."
    )


_GO_ON = "or go on all the same with --force (in Python: strict=False)"


class PatchWarning(UserWarning):
    """A target keeps its original code. The message names it, the reason, and the consequence for training."""


@dataclass(frozen=True)
class Applied:
    """A patch that was applied: the installed version of its package, and the modules that hold the replacement."""

    patch: Patch
    version: str
    holders: tuple[str, ...]

    def __str__(self) -> str:
        modules = f" in {len(self.holders)} modules" if len(self.holders) > 1 else ""
        return f"{self.patch.name}{modules} ({self.patch.package} {self.version})"


@dataclass(frozen=True)
class LeftAlone:
    """A function that keeps its original code: the record that would have replaced it, and the package's version.

    `why` compares the expected and the actual function; `message` adds the name and the consequence for training.
    """

    patch: Patch
    version: str
    why: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass
class PatchReport:
    """The functions that patched() found: those replaced, and those that keep their original code.

    `waiting` are the modules that are not imported yet; their functions are replaced when they are. `unreached` has a
    message for each gated-delta layer that does not call deltatune.
    """

    applied: list[Applied] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    serving: Serving = field(default_factory=Serving)

    @property
    def complete(self) -> bool:
        """Whether every function was replaced and every layer that was traced calls deltatune."""
        return not self.left_alone and not self.unreached

    @property
    def untried(self) -> list[str]:
        """A sentence for each installed version that the records do not name."""
        by_version: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for applied in self.applied:
            by_version[applied.patch.package, applied.version].append(True)
        for left in self.left_alone:
            by_version[left.patch.package, left.version].append(False)
        return [
            f"{package.replace('_', '-')} {version} has not been tried with this deltatune; "
            f"{sum(behaving)} of {len(behaving)} functions behave as in {latest(package)}."
            for (package, version), behaving in by_version.items()
            if not is_tried(package, version)
        ]

    def summary(self) -> str:
        """Count the functions that were replaced and name their packages; those left alone are named in full."""
        count = len(self.applied)
        packages = ", ".join(sorted({f"{applied.patch.package} {applied.version}" for applied in self.applied}))
        return "; ".join(self._parts([f"{count} function{'s' * (count != 1)} of {packages}"]))

    def __str__(self) -> str:
        return "\n".join(self._parts([str(applied) for applied in self.applied]))

    def _parts(self, applied: list[str]) -> list[str]:
        parts = applied if self.applied else ["nothing patched yet"]
        return [*parts, *self.untried, *map(str, self.left_alone), *self.unreached]


def refuse(report: PatchReport, model: nn.Module | None, uses: Collection[str]) -> None:
    """Raise UserError if the report leaves something alone that these uses of the model depend on.

    It names each function, the expected and the actual one, and the remedy. None as model takes every function for one
    that it calls.
    """
    missing = [left for left in report.left_alone if set(left.patch.needed_for) & set(uses)]
    missing = [left for left in missing if model is None or calls(model, left.patch)]
    if not missing and not report.unreached:
        return
    because = [
        f"{left.patch.target} ({left.patch.package} {left.version}): {left.why} {left.patch.without}"
        for left in missing
    ]
    said = " ".join(because or report.unreached)
    raise UserError(
        f"The results of this run depend on deltatune's code, and upstream's would run: {said} {_advice(missing)}"
    )


def calls(model: nn.Module, patch: Patch) -> bool:
    """Whether a model calls the target of a record, as far as its classes and their modules tell."""
    if patch.package == "mlx":
        return True
    if patch.name == ENTRY_POINT:
        return bool(gated_delta_layers(model)) and any(
            cls.__module__.partition(".")[0] == patch.package for cls in _classes(model)
        )
    owner = patch.name.rpartition(".")[0]
    if owner:
        return any(cls.__module__ == patch.module for cls in _classes(model))
    return any(patch.name in vars(sys.modules.get(cls.__module__, sys)) for cls in _classes(model))


def _classes(model: nn.Module) -> set[type]:
    return {base for module in model.modules() for base in type(module).__mro__}


def _advice(missing: list[LeftAlone]) -> str:
    wanted = dict.fromkeys(
        f"'{left.patch.package.replace('_', '-')}=={latest(left.patch.package)}'" for left in missing
    )
    if not wanted:
        return f"Undo what replaces that code, {_GO_ON}."
    return f"Install a version that works, pip install {' '.join(wanted)}, {_GO_ON}."
