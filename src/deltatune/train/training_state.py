"""Holds the state of a run: its iterations change it, saves store it, and a resumed run continues from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx.core as mx

from ..data.batches.order import TrainingOrder
from .distributed import World
from .progress import Progress
from .saved import state
from .step import Step, Sums
from .updates.optimizer import restore

# Begins the names of the arrays of an order, as they are saved.
_ORDER = "order/"


class TrainingState:
    """The trained parameters, the optimizer's moments, the accumulated sums, the progress and the place in the data.

    The parameters and moments are those of the model and optimizer of `step`; `progress` is changed in place, and
    `sums` are this rank's since the last update.
    """

    def __init__(self, step: Step, order: TrainingOrder, progress: Progress, world: World):
        self.step = step
        self.order = order
        self.progress = progress
        self._world = world
        self.sums = self._no_sums()
        # The progress at the start of the accumulation window, and every rank's sums if the run was resumed inside it;
        # None right after an update, and before the first accumulation begins.
        self._start: tuple[Progress, dict[str, mx.array]] | None = None
        # Whether an update is being made, so that the parameters may be partly updated.
        self._updating = False

    def _no_sums(self) -> Sums:
        return Sums(self.step.zeros(), mx.array(0.0), mx.array(0.0))

    def begin_micro_batch(self) -> None:
        """Remember the progress if an accumulation window begins here."""
        if self.progress.micro_batches == 0:
            self._start = dataclasses.replace(self.progress, order=self.order.state()), {}

    def update(self) -> mx.array:
        """Make the update from the accumulated sums, lazily; return the norm of the gradients."""
        self._updating = True
        norm = self.step.update(*self.sums)
        # The gradients are released before the update is evaluated, so that MLX can reuse their buffers.
        self.sums = self.sums._replace(gradients=None)
        return norm

    def end_window(self) -> None:
        """Begin a new accumulation window, after every update."""
        self.sums = self._no_sums()
        self.progress.micro_batches = 0
        self._start = None
        self.end_update()

    def end_update(self) -> None:
        """Note that the update was computed; one with gradients that are not finite has changed no parameter."""
        self._updating = False

    def check_complete(self) -> None:
        """Raise a RuntimeError if an update is being made: parameters and moments may not fit together."""
        if self._updating:
            raise RuntimeError("an update was being made; the state that was saved before it is still there")

    def return_to_start(self) -> dict[str, mx.array]:
        """Return to the progress at the start of the accumulation window; return the sums to be saved with it."""
        if self._start is None:
            self.progress.order = self.order.state()
            return self._sampled() if self._world.size == 1 else {}
        # The order itself stays where it is: the run ends here, and a stream might have to read its rows again.
        start, sums = self._start
        self.progress.become(start)
        return sums | (self._sampled() if self._world.size == 1 else {})

    def window(self) -> dict[str, mx.array]:
        """Return the sums and sampled answers of every rank in the present window, as they are saved.

        Waits for every rank.
        """
        self.progress.order = self.order.state()
        sampled = self._sampled()
        if not self.progress.micro_batches:
            return sampled
        sums = state.flatten("window", self._by_parameter(self.sums)._asdict())
        return {key: self._world.gather(leaf) for key, leaf in sums.items()} | sampled

    def _sampled(self) -> dict[str, mx.array]:
        """Return every rank's sampled answers at the place of the progress. Waits for every rank."""
        arrays = self.order.arrays(self.progress.order)
        return {f"{_ORDER}{name}": self._world.gather(array) for name, array in arrays.items()}

    def arrays(self) -> dict[str, mx.array]:
        """Return the trained parameters and the moments, as they are saved."""
        self.step.settle()
        arrays = state.flatten("trainable", self.step.model.trainable_parameters())
        return arrays | state.flatten("optimizer", self.step.bundles.part_state(self.step.optimizer.state))

    def restore(self, arrays: dict[str, mx.array], progress: Progress, path: Path) -> None:
        """Continue from the arrays and the progress of the file at `path`; those of another run are a UserError."""
        model = self.step.model
        optimizer = self.step.optimizer
        bundles = self.step.bundles
        model.update(state.unflatten("trainable", model.trainable_parameters(), arrays, path))
        by_parameter = state.unflatten("optimizer", bundles.part_state(optimizer.state), arrays, path)
        restore(optimizer, bundles.join_state(by_parameter, optimizer.state))
        self.order.restore(progress.order, self._answers_of(arrays, progress))
        self.progress.become(progress)
        if progress.micro_batches:
            window = {key: leaf for key, leaf in arrays.items() if key.startswith("window/")}
            mine = {key: self._share(leaf) for key, leaf in window.items()}
            sums = Sums(**state.unflatten("window", self._by_parameter(self.sums)._asdict(), mine, path))
            self.sums = sums if sums.gradients is None else sums._replace(gradients=bundles.join(sums.gradients))
            self._start = dataclasses.replace(progress), window if self._world.main else {}
        # Frozen weights may stay on the disk, and nothing here has changed them.
        mx.eval(model.trainable_parameters(), optimizer.state, self.sums)

    def _answers_of(self, arrays: dict[str, mx.array], progress: Progress) -> dict[str, mx.array]:
        """Return this rank's sampled answers; another number of ranks shares the prompts otherwise, and has none."""
        if progress.ranks != self._world.size:
            return {}
        rank = self._world.rank
        return {name.removeprefix(_ORDER): leaf[rank] for name, leaf in arrays.items() if name.startswith(_ORDER)}

    def _share(self, sums: mx.array) -> mx.array:
        """Return this rank's part of the saved sums. If the number of ranks has changed, rank 0 takes all of them."""
        if len(sums) == self._world.size:
            return sums[self._world.rank]
        return sums.sum(axis=0) if self._world.main else mx.zeros_like(sums[0])

    def _by_parameter(self, sums: Sums) -> Sums:
        """Return the sums with each gradient at the path of its parameter, as they are saved."""
        return sums if sums.gradients is None else sums._replace(gradients=self.step.bundles.part(sums.gradients))
