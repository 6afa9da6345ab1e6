"""PEFT trains an adapter that deltatune exported, live, and the recordings made from that. Needs torch."""

import datetime
import importlib.metadata
from functools import partial
from pathlib import Path
from typing import Any

import peft
from safetensors.numpy import load_file

from deltatune.export.peft_adapter import PEFT_WEIGHTS
from deltatune.selftest.parity import recording
from deltatune.selftest.parity.cases import ROUTE_LIMIT, STEPS, ParityCase, ParityRun

from . import continued, theirs
from .continued import REPLAYED_STEPS, Start
from .record import PACKAGES, TEXT, one_thread


class Trained:
    """PEFT's model on the exported adapter, which goes on training at every call of `train`."""

    def __init__(self, case: ParityCase, start: Start, weights: Any, config: Any):
        self._case, self._start = case, start
        base = theirs.load(config, weights)
        self.routes = theirs.Routes(base)
        self.model = peft.PeftModel.from_pretrained(base, start.exported, is_trainable=True)

    def train(self, folder: Path, first: int = 0, steps: int = STEPS) -> ParityRun:
        """Train on the batches from `first` on, with a new optimizer, and save the adapter in `folder`."""
        trained = {(name, "value"): value for name, value in self.model.named_parameters() if value.requires_grad}
        if len(trained) != len(self._start.tensors):
            raise ValueError(f"PEFT trains {len(trained)} tensors of the {len(self._start.tensors)} in the export")
        with one_thread():
            rate = self._case.family.learning_rate
            run = theirs.train(partial(theirs.text_loss, self.model), self.model, trained, rate, first, steps)
        self.model.save_pretrained(folder, save_embedding_layers=False)
        return ParityRun(run.losses, {}, continued.by_name(load_file(folder / PEFT_WEIGHTS)))


def start(case: ParityCase, folder: Path) -> tuple[Start, Trained]:
    """Export an adapter on the checkpoint of a case, and load it with PEFT."""
    config, shapes = TEXT.layout(case)
    weights = case.family.weights(shapes)
    found = continued.export(case, config, weights, folder)
    return found, Trained(case, found, weights, config)


def record(name: str, case: ParityCase, folder: Path) -> None:
    """Write the recording that `make test` replays. ValueError where a token almost has another choice of experts."""
    config, shapes = TEXT.layout(case)
    begin, trained = start(case, folder)
    run = trained.train(folder / "saved", steps=REPLAYED_STEPS)
    if trained.routes.nearest < ROUTE_LIMIT:
        raise ValueError(f"{name}: comes within {trained.routes.nearest:.1e} of another route")
    recording.write(
        continued.name_of(name),
        {
            "date": datetime.date.today().isoformat(),
            "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
            "config": config,
            "shapes": shapes,
            "checksums": recording.checksums(case.family.weights(shapes)),
            "exported config": continued.peft_config(begin),
            "exported": recording.summary(begin.tensors),
            "losses": run.losses,
            "trained": recording.summary(run.final, begin.tensors),
        },
    )
