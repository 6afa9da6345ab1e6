"""Draws come from a key of deltatune's own, can be repeated and continued, and read nothing of MLX's random state."""

import threading

import mlx.core as mx
import mlx.nn as nn
import pytest

from deltatune import upstream
from deltatune.ops import random_state
from deltatune.ops.random_state import DRAWS, drawing_from, drawing_with, repeatable, skip


def draw():
    return mx.random.uniform(shape=(4,)).tolist()


ARGUMENTS = {
    "bernoulli": (0.5, (8,)),
    "categorical": (mx.zeros((8, 50)),),
    "gumbel": ((8,),),
    "laplace": ((8,),),
    "multivariate_normal": (mx.zeros(8), mx.eye(8)),
    "normal": ((8,),),
    "permutation": (50,),
    "randint": (0, 1000, (8,)),
    "truncated_normal": (-1.0, 1.0, (8,)),
    "uniform": (0, 1, (8,)),
}


def test_every_function_of_mlx_that_draws_is_served():
    functions = {name for name in dir(mx.random) if not name.startswith("_")} - {"key", "seed", "split", "state"}
    assert functions == DRAWS.keys() == ARGUMENTS.keys()


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_from_a_key_equals_mlx_after_the_same_seed(name):
    """So runs of versions that set MLX's own state continue with the same numbers."""

    def draws():
        with mx.stream(mx.cpu):
            return [getattr(mx.random, name)(*ARGUMENTS[name]).tolist() for _ in range(3)]

    mx.random.seed(11)
    expected = draws()
    mx.random.seed(12)
    with drawing_from(mx.random.key(11)):
        assert draws() == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("name", DRAWS)
def test_a_key_that_is_given_is_used(name):
    """By name, or in its place among the arguments."""
    with mx.stream(mx.cpu):
        function, key = getattr(mx.random, name), mx.random.key(3)
        expected = function(*ARGUMENTS[name], key=key).tolist()
        with drawing_from(mx.random.key(4)):
            assert getattr(mx.random, name)(*ARGUMENTS[name], key=key).tolist() == expected
    if DRAWS[name] == len(ARGUMENTS[name]):
        with drawing_from(mx.random.key(4)):
            assert getattr(mx.random, name)(*ARGUMENTS[name], key).tolist() == expected


def test_a_context_leaves_mlxs_state_and_functions_as_they_were():
    functions = {name: getattr(mx.random, name) for name in DRAWS}
    mx.random.seed(2)
    expected = [draw(), draw()]
    mx.random.seed(2)
    first = draw()
    with drawing_from(mx.random.key(7)):
        inside = draw()
        with drawing_from(mx.random.key(8)):
            assert draw() != inside
    assert [first, draw()] == expected
    with drawing_from(mx.random.key(7)):
        assert draw() == inside
        assert mx.random.uniform is not functions["uniform"]
    assert all(getattr(mx.random, name) is function for name, function in functions.items())


def test_other_threads_draw_from_mlxs_state():
    found = []

    def elsewhere():
        mx.random.seed(5)
        found.append(draw())

    mx.random.seed(5)
    expected = draw()
    with drawing_from(mx.random.key(7)):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [expected]


def test_draws_continue_from_a_state_that_is_kept():
    state = [mx.random.key(3)]
    found = []
    for _ in range(3):
        with drawing_with(state):
            found.append(draw())
    with drawing_from(mx.random.key(3)):
        assert [draw(), draw(), draw()] == found
    assert found[0] != found[1] != found[2]


def test_every_call_of_a_compiled_step_draws_new_numbers_and_can_repeat_them():
    state = [mx.random.key(3)]

    def step():
        with drawing_with(state), repeatable() as key:
            first = mx.random.uniform(shape=(4,))
        with drawing_from(key):
            return first, mx.random.uniform(shape=(4,))

    eager = [step() for _ in range(3)]
    state[0] = mx.random.key(3)
    compiled = mx.compile(step, inputs=[state], outputs=[state])
    for first, again in (compiled() for _ in range(3)):
        expected = eager.pop(0)[0]
        assert mx.array_equal(first, again)
        assert mx.allclose(first, expected, rtol=1e-6)  # A compiled step may differ in the last digit.


@pytest.mark.parametrize("shown", [True, False], ids=["as in MLX today", "MLX shows no key"])
def test_another_programs_draws_can_be_repeated_and_go_on(shown, monkeypatch):
    if not shown:
        monkeypatch.setattr(upstream, "_random_state", lambda: object())
    mx.random.seed(6)
    with repeatable() as key:
        found = [draw(), draw()]
    after = draw()
    with drawing_from(key):
        assert [draw(), draw()] == found
    assert after not in found
    if shown:
        mx.random.seed(6)
        assert [draw(), draw(), draw()] == [*found, after]


@pytest.mark.parametrize("own", [True, False])
def test_skipped_keys_are_not_drawn_from_again(own):
    mx.random.seed(9)
    state = [mx.random.key(9)]

    def drawn():
        if own:
            with drawing_with(state):
                return draw()
        return draw()

    with drawing_with(state) if own else repeatable():
        skip()
    assert drawn() != draw_of_seed(9)


def draw_of_seed(seed):
    with drawing_from(mx.random.key(seed)):
        return draw()


def test_dropout_inside_a_context_reads_nothing_of_mlxs_state(monkeypatch):
    monkeypatch.setattr(upstream, "_random_state", lambda: pytest.fail("MLX's random state was read"))
    before = mx.random.state[0].tolist()
    with drawing_from(mx.random.key(1)), repeatable():
        nn.Dropout(0.5)(mx.ones(4))
    assert mx.random.state[0].tolist() == before
    assert not random_state._originals
