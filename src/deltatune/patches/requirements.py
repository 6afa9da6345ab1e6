"""Refuses to go on where a function that a model's results depend on keeps upstream's code."""

from __future__ import annotations

import sys
from collections.abc import Collection

import mlx.nn as nn

from ..errors import UserError
from ..layers import ENTRY_POINT, gated_delta_layers
from .patch_record import Patch
from .patch_report import LeftAlone, PatchReport
from .versions import latest

_GO_ON = "or go on all the same with --force (in Python: strict=False)"


def refuse(report: PatchReport, model: nn.Module | None, uses: Collection[str]) -> None:
    """Raise UserError if the report leaves something alone that these uses of the model depend on.

    Args:
        report: The report of apply().
        model: The model; None takes every function for one that it calls.
        uses: The uses of the model: TRAINING, PACKING, INFERENCE.

    Raises:
        UserError: It names each function, the expected and the actual one, and the remedy.
    """
    missing = [left for left in report.left_alone if set(left.patch.needed_for) & set(uses)]
    missing = [left for left in missing if model is None or calls(model, left.patch)]
    if not missing and not report.unreached:
        return
    because = [_explained(left) for left in missing]
    because += [] if missing else report.unreached
    raise UserError(
        f"The results of this run depend on deltatune's code, and upstream's would run: {' '.join(because)} "
        f"{_advice(missing)}"
    )


def calls(model: nn.Module, patch: Patch) -> bool:
    """Whether a model calls the target of a record, as far as its classes and their modules tell."""
    if patch.package == "mlx":
        return True
    if patch.name == ENTRY_POINT:
        return bool(gated_delta_layers(model)) and any(_comes_from(cls, patch.package) for cls in _classes(model))
    owner = patch.name.rpartition(".")[0]
    if owner:
        return any(cls.__module__ == patch.module for cls in _classes(model))
    return any(patch.name in vars(sys.modules.get(cls.__module__, sys)) for cls in _classes(model))


def _classes(model: nn.Module) -> set[type]:
    return {base for module in model.modules() for base in type(module).__mro__}


def _comes_from(cls: type, package: str) -> bool:
    return cls.__module__.partition(".")[0] == package


def _explained(left: LeftAlone) -> str:
    return f"{left.patch.target} ({left.patch.package} {left.version}): {left.why} {left.patch.without}"


def _advice(missing: list[LeftAlone]) -> str:
    wanted = dict.fromkeys(
        f"'{left.patch.package.replace('_', '-')}=={latest([left.patch.tried])}'" for left in missing
    )
    if not wanted:
        return f"Undo what replaces that code, {_GO_ON}."
    return f"Install a version that works, pip install {' '.join(wanted)}, {_GO_ON}."
