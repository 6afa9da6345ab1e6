"""Runs every examination of the doctor, and returns its findings as data."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.nn as nn

from ..errors import UserError
from ..layers import LayerInfo, describe
from ..machine import packages
from ..machine.json_files import read_json
from ..ops import operators
from ..patches import ON_CUDA, PATCHES, patched
from ..patches.patch_report import serving
from ..plan.array_layout import ArrayLayout, LayoutError
from ..upstream import Probed, probed
from . import implementations, inventory, probes
from .custom_kernels import ReachedKernel, sweep, without_gradient
from .implementations import OperatorFindings, Times
from .probes import Fault

_LAYOUT = "the description of an mlx.core.array in memory"


@dataclass
class Patched:
    """A patch in force: its name, the patched package and version, the modules that hold it, and its reason."""

    name: str
    package: str
    holders: list[str]
    reason: str


@dataclass
class Patches:
    """The patches in force, and sentences on untried versions, on functions left alone and on modules without an
    import.

    Sentences in `untried` name an installed version that the records do not, and how many functions are as expected.
    """

    applied: list[Patched] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


@dataclass
class Forward:
    """A training forward of a model on `text` or `images`, with the package that defines it.

    It has `delta` gated-delta layers, of which the `unreached` do not call deltatune's operator. `served` counts, for
    each operator, the layers by implementation, under "" those that upstream's own code serves. `untrainable` has a
    sentence for each kernel through which training fails; `untraced` says why the kernels are not known.
    """

    data: str
    package: str
    delta: int
    unreached: list[str]
    served: dict[str, dict[str, int]] = field(default_factory=dict)
    kernels: list[ReachedKernel] = field(default_factory=list)
    untrainable: list[str] = field(default_factory=list)
    untraced: str | None = None


@dataclass
class Layers:
    """A model's layers, counted by kind, and its training forwards on text and on images.

    `left_out` says which parts were not examined and why, `without_row` which tokens have no row in the embedding, and
    `known_faults` what is wrong with the model in mlx-lm.
    """

    path: str
    kinds: dict[str, int]
    experts: int
    forwards: list[Forward]
    left_out: list[str]
    without_row: str | None = None
    known_faults: list[str] = field(default_factory=list)


@dataclass
class Examination:
    """Everything that the doctor found."""

    versions: dict[str, str]
    machine: dict[str, str]
    operators: list[OperatorFindings]
    faults: list[Fault]
    patches: Patches
    private_names: list[Probed]
    times: list[Times]
    model: Layers | None = None

    @property
    def wrong(self) -> bool:
        """Whether training here would compute wrong numbers, or the model cannot be trained."""
        return self.faulty or bool(self.untrainable) or (self.model is not None and bool(self.model.without_row))

    @property
    def faulty(self) -> bool:
        """Whether something that was measured on this machine would compute wrong numbers."""
        measured = [finding.wrong for operator in self.operators for finding in operator.findings]
        return any(measured) or any(fault.wrong for fault in self.faults)

    @property
    def untrainable(self) -> list[str]:
        """A sentence for each custom kernel that keeps the model from training."""
        return [] if self.model is None else [line for forward in self.model.forwards for line in forward.untrainable]


def examine(model: str | None = None) -> Examination:
    """Examine this machine, and `model` if one is given, which is a UserError where it cannot be loaded.

    This takes some seconds, and longer where kernels are compiled for the first time.
    """
    layers = None if model is None else _layers(model)
    for operator in operators.OPERATORS:
        # An implementation that is forced and cannot run here is refused before anything is built.
        operator.order()
    with ThreadPoolExecutor() as builders:
        # The builders work while packages are imported and patched.
        implementations.build(builders)
        with _patched() as patches:
            builders.shutdown()
            return Examination(
                versions=packages.versions(),
                machine=inventory.machine(),
                operators=implementations.findings(),
                faults=probes.faults(),
                patches=patches,
                private_names=[*probed(), _layout()],
                times=implementations.times(),
                model=layers,
            )


def _layout() -> Probed:
    """Whether the plan can read MLX's arrays in memory."""
    try:
        ArrayLayout.measured()
    except LayoutError as error:
        return Probed(_LAYOUT, False, f"Runs are not planned: {error}.")
    return Probed(_LAYOUT, True, "Runs are not planned.")


def _layers(path: str) -> Layers:
    # These modules import mlx-lm, which takes seconds. Without a model it is imported while kernels are built.
    from ..models.load import load_for_data, load_tokenizer, locate
    from ..models.vocabulary import tokens_without_row

    folder = locate(path)
    models, left_out = load_for_data(folder)
    without_row = None
    try:
        without_row = tokens_without_row(next(iter(models.values())), load_tokenizer(folder, {}))
    except UserError as error:
        left_out.append(str(error))
    layers: list[LayerInfo] = describe(next(iter(models.values())))
    kinds = {kind: sum(layer.kind == kind for layer in layers) for kind in sorted({layer.kind for layer in layers})}
    forwards = [_forward(data, model) for data, model in models.items()]
    faults = _known_faults(folder) if "text" in models else []
    return Layers(path, kinds, sum(layer.experts for layer in layers), forwards, left_out, without_row, faults)


def _known_faults(folder: Path) -> list[str]:
    from ..models.known_faults import known_faults

    path = folder / "config.json"
    return [fault.sentence for fault in known_faults(read_json(path))] if path.is_file() else []


def _forward(data: str, model: nn.Module) -> Forward:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with patched():
            told = serving(model)
    package = type(model).__module__.partition(".")[0].replace("_", "-")
    unreached = [path for path, name in told.delta.items() if not name]
    served = {operator: dict(Counter(layers.values())) for operator, layers in told.by_operator().items()}
    forward = Forward(data, package, len(told.delta), unreached, served)
    try:
        forward.kernels = sweep(model)
    except UserError as error:
        forward.untraced = str(error)
    forward.untrainable = without_gradient(forward.kernels)
    return forward


def _import_what_is_patched() -> list[str]:
    """Import every module that patches change; return a sentence on each package or module that is not there."""
    # The records of GPUs name every model of mlx-lm that holds the recurrence.
    modules = sorted({patch.module for patch in (*PATCHES, *ON_CUDA)})
    packages = sorted({module.partition(".")[0] for module in modules})
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    absent = [f"{package.replace('_', '-')} is not installed" for package in missing]
    for module in modules:
        if module.partition(".")[0] in missing:
            continue
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            absent.append(f"{module} is not installed ({error})")
        except RuntimeError as error:
            absent.append(f"{module} cannot be imported on this machine ({error})")
    return absent


@contextmanager
def _patched() -> Iterator[Patches]:
    """Apply the patches as training does, and yield a report on them while they are in force."""
    patches = Patches(absent=_import_what_is_patched())
    with ExitStack() as stack:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = stack.enter_context(patched())
            patches.left_alone += map(str, report.left_alone)
            patches.untried += report.untried
            for applied in report.applied:
                package = f"{applied.patch.package} {applied.version}"
                patches.applied.append(
                    Patched(applied.patch.name, package, list(applied.holders), applied.patch.reason)
                )
        except UserError as error:
            # Applying a patch runs its replacement once, which a forced implementation may refuse.
            patches.left_alone.append(str(error))
        yield patches
