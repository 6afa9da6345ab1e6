"""An iteration that starts while another is computed changes no bit, and leaves no trace where that one fails."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from deltatune.data import BatchOrder
from deltatune.errors import UserError
from deltatune.machine import backend
from deltatune.options.config import TrainConfig
from deltatune.train import StoppedError, engine
from deltatune.train.compiled import Compiled
from deltatune.train.distributed import World
from deltatune.train.engine import EarlyEngine, Engine, may_start_early
from killed_runs import same

# Nothing but iterations, so that each one but the first starts early.
ONLY = {"val_batches": 0, "save_every": 100}


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.weekly)])
def test_every_bit_is_the_same(make_trainer, tmp_path, request, accumulate, straight_run):
    """Dropout draws the same, and evaluations, saves and reports see the same parameters."""
    given = {"grad_accumulation_steps": accumulate}
    straight = straight_run(**given)
    only = straight_run(**given, **ONLY)
    during = request.getfixturevalue("early_starts")
    make_trainer(**given).run()
    same(tmp_path / "out", straight)
    # The first iteration says how long one takes; a save follows the third and the sixth, an evaluation the fourth.
    assert during == [2, 5, 7]
    during.clear()
    make_trainer(adapter_path=str(tmp_path / "out only"), **given, **ONLY).run()
    same(tmp_path / "out only", only)
    assert during == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("iteration", "accumulate"), [(3, 2), (4, 1)])
def test_a_run_that_is_stopped_forgets_the_iteration_that_it_had_started(
    make_trainer, early_starts, loses_nothing, iteration, accumulate, straight_run
):
    given = {**ONLY, "grad_accumulation_steps": accumulate}
    trainer = make_trainer(**given)
    plain = EarlyEngine._start_next

    def start_next(self, after_update):
        plain(self, after_update)
        if trainer.progress.iteration == iteration - 1:
            self.ending.stop.asked = True

    change = (EarlyEngine, "_start_next", start_next)
    stopped = f"stopped after iteration {iteration} of 8"
    loses_nothing(trainer, straight_run(**given), change, StoppedError, stopped, **given)
    assert iteration in early_starts


def test_an_error_while_a_step_is_compiled_loses_nothing(make_trainer, request, loses_nothing, straight_run):
    """As where a batch of another shape comes. The error is raised when the iteration before is complete."""
    straight = straight_run(**ONLY)
    request.getfixturevalue("early_starts")
    trainer, plain = make_trainer(**ONLY), Engine.computed

    def launched(self, batch, accumulated, iteration):
        def out_of_memory(*arguments):
            self.step._trace_micro_batch(*arguments)
            raise RuntimeError("[malloc] Unable to allocate 5 bytes.")

        if iteration == 4:
            state = [trainer.model.state, self.step.random]
            self.step._micro_batch = Compiled(out_of_memory, state, state[1:])
        return plain(self, batch, accumulated, iteration)

    change = (Engine, "computed", launched)
    said = "Unable to allocate.*The state after iteration 4 is saved in"
    loses_nothing(trainer, straight, change, RuntimeError, said, **ONLY)


def test_an_error_of_the_data_loses_nothing(make_trainer, request, loses_nothing, straight_run):
    straight = straight_run(**ONLY)
    request.getfixturevalue("early_starts")
    trainer, plain, taken = make_trainer(**ONLY), BatchOrder.__next__, []

    def next_batch(self):
        taken.append(self)
        if len(taken) == 5:
            raise OSError("the disk does not answer")
        return plain(self)

    said = "does not answer.*The state after iteration 4 is saved in"
    loses_nothing(trainer, straight, (BatchOrder, "__next__", next_batch), OSError, said, **ONLY)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.weekly), 2])
def test_nan_in_an_iteration_keeps_the_state_before_it(
    make_trainer, early_starts, loses_nothing, accumulate, straight_run
):
    """The loss of iteration 6 is NaN, which is read when iteration 7 has been started."""
    given = {**ONLY, "grad_accumulation_steps": accumulate}
    trainer, kept = make_trainer(**given), []
    plain = EarlyEngine.micro_batch

    def taken(self, batch):
        results = plain(self, batch)
        if trainer.progress.iteration == 6 - accumulate:
            self.settle()
            kept[:] = [np.array(leaf) for _, leaf in tree_flatten(trainer.model.trainable_parameters())]
        return results._replace(loss=results.loss * (mx.nan if trainer.progress.iteration == 5 else 1))

    straight, said = straight_run(**given), f"iteration 6: the loss is nan.* iteration {6 - accumulate} is saved"
    early_starts.clear()
    loses_nothing(trainer, straight, (EarlyEngine, "micro_batch", taken), UserError, said, **given)
    # The continuation has started the rest.
    assert early_starts[: early_starts.index(6) + 1] == [2, 3, 4, 5, 6]
    now = [np.array(leaf) for _, leaf in tree_flatten(trainer.model.trainable_parameters())]
    assert all(np.array_equal(one, other) for one, other in zip(now, kept, strict=True))


def test_when_iterations_start_early(make_trainer, early_starts, monkeypatch):
    trainer = make_trainer(**ONLY, iters=4)
    monkeypatch.setattr(engine, "MOST_TRAINED", 1000)
    trainer.run()
    assert early_starts == []
    monkeypatch.undo()

    class Ranks(World):
        def __init__(self, backend):
            self.size, self.backend = 2, backend

    config = TrainConfig()
    for device, expected in (("cpu", False), ("metal", True), ("cuda", True)):
        monkeypatch.setattr(backend, "device", lambda device=device: device)
        assert may_start_early(config, World()) is expected
    assert may_start_early(config, Ranks("nccl"))
    assert not may_start_early(config, Ranks("ring"))


def test_long_iterations_do_not_start_early(make_trainer, early_starts, monkeypatch):
    monkeypatch.setattr("deltatune.train.iterations.LONGEST", 0.0)
    make_trainer(**ONLY, iters=4).run()
    assert early_starts == []
