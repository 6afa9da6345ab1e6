"""Arrays that another thread evaluates: in order, on a stream of no thread, and nothing behind an error."""

import threading
import time

import mlx.core as mx
import pytest

from deltatune.train.compiled import Compiled
from deltatune.train.engine import Engine
from deltatune.train.launcher import Launcher

ONLY = {"val_batches": 0, "save_every": 100, "grad_accumulation_steps": 1}


@pytest.fixture
def launch():
    with Launcher() as made:
        yield made


def test_arrays_are_built_on_while_they_are_evaluated(launch):
    with mx.stream(launch.stream):
        one = mx.random.uniform(shape=(500, 500))
        expected = one
        mx.eval(one)
        for _ in range(20):
            done = launch.launch(one := mx.contiguous(mx.sin(one @ one)))
    done.result()
    for _ in range(20):
        expected = mx.sin(expected @ expected)
    assert mx.array_equal(one, expected)


def test_nothing_is_launched_behind_an_error(launch, monkeypatch):
    begun, plain = [], mx.async_eval

    def async_eval(arrays):
        begun.append((threading.current_thread().name, len(arrays)))
        if len(arrays) == 2:
            raise RuntimeError("[malloc] Unable to allocate 5 bytes.")
        plain(arrays)

    monkeypatch.setattr(mx, "async_eval", async_eval)
    with mx.stream(launch.stream):
        arrays = [mx.ones(3) * number for number in range(6)]
    first = launch.launch({"a": arrays[0]})
    second = launch.launch(arrays[1], [arrays[2]])
    third = launch.launch(arrays[3])
    launch.settle()
    assert first.result() is None
    for later in (second, third):
        with pytest.raises(RuntimeError, match="Unable to allocate"):
            later.result()
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        launch.finish()
    assert [name.startswith("launcher") for name, _ in begun] == [True, True]
    # What was never evaluated can still be, and so can what failed.
    assert mx.stack(arrays[1:4]).tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_a_tree_may_change_after_it_was_given(launch):
    held = threading.Event()
    launch._last = launch._thread.submit(held.wait)
    with mx.stream(launch.stream):
        tree = {"x": mx.ones(2) * 3}
    now = tree["x"]
    done = launch.launch(tree)
    tree["x"] = mx.zeros(2)
    assert not done.done()
    launch.settle(0.01)
    held.set()
    launch.finish()
    assert done.done()
    assert now.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("failing", "kept"), [(5, 4), (6, 5)], ids=["the sums", "what follows them"])
def test_an_error_in_a_launch(make_trainer, early_starts, loses_nothing, straight_run, failing, kept):
    """An update is undone where its sums fail; where only it and the next micro-batch do, it is still made."""
    straight = straight_run(**ONLY)
    calls, plain = [], Launcher.launch

    def launch(self, *trees):
        calls.append(len(trees))
        if len(calls) == failing:
            self._last = self._thread.submit(refuse)
            return self._last
        return plain(self, *trees)

    def refuse():
        raise RuntimeError("[malloc] Unable to allocate 5 bytes.")

    # The first two iterations launch nothing beside; each later one launches sums, then the rest.
    said = f"Unable to allocate.*The state after iteration {kept} is saved in"
    loses_nothing(make_trainer(**ONLY), straight, (Launcher, "launch", launch), RuntimeError, said, **ONLY)


def test_a_new_shape_is_compiled_and_launched_by_the_main_thread(make_trainer, early_starts, monkeypatch):
    """Compiling may try kernels, and reads arrays that were made before there was a launcher."""
    launchers, traced, launched = [], [], []
    made, build, plain = Launcher.__init__, Engine.computed, mx.async_eval

    def init(self):
        made(self)
        launchers.append(self)

    def micro_batch(self, batch, accumulated, iteration):
        step = self.step

        def trace(*arguments):
            traced.append((len(launched), launchers[-1]._last.done()))
            return step._trace_micro_batch(*arguments)

        if iteration == 4:
            # As where a batch of another shape comes.
            places = [step.model.state, step.random]
            step._micro_batch = Compiled(trace, places, places[1:], launchers[-1].before_compiling)
        return build(self, batch, accumulated, iteration)

    def async_eval(*trees):
        time.sleep(0.03)
        plain(*trees)
        launched.append(threading.current_thread().name.startswith("launcher"))

    monkeypatch.setattr(Launcher, "__init__", init)
    monkeypatch.setattr(Engine, "computed", micro_batch)
    monkeypatch.setattr(mx, "async_eval", async_eval)
    make_trainer(**ONLY, iters=9).run()
    assert traced
    for at, settled in traced:
        assert settled
        assert launched[at : at + 2] == [False, False]
    # The first time it is traced once before, too.
    assert launched.count(True) == 2 * (len(early_starts) - 1 - len(set(traced)))
