"""The random key can be read, set, and set for a while, also while a step is being compiled."""

import mlx.core as mx

from deltatune.ops.random_state import drawing_from, get_key, set_key


def draw():
    return mx.random.uniform(shape=(4,)).tolist()


def test_the_same_key_draws_the_same_numbers():
    mx.random.seed(1)
    key = get_key()
    first = [draw(), draw()]
    set_key(key)
    assert [draw(), draw()] == first
    mx.random.seed(1)
    assert [draw(), draw()] == first
    assert first[0] != first[1]


def test_drawing_from_a_key_leaves_the_state_as_it_was():
    mx.random.seed(2)
    expected = [draw(), draw()]
    mx.random.seed(2)
    first = draw()
    with drawing_from(mx.random.key(7)):
        inside = draw()
    assert [first, draw()] == expected
    with drawing_from(mx.random.key(7)):
        assert draw() == inside


def test_every_call_of_a_compiled_step_draws_new_numbers_and_can_repeat_them():
    def step():
        key = get_key()
        first = mx.random.uniform(shape=(4,))
        with drawing_from(key):
            again = mx.random.uniform(shape=(4,))
        return first, again

    compiled = mx.compile(step, inputs=mx.random.state, outputs=mx.random.state)
    mx.random.seed(3)
    eager = [step() for _ in range(3)]
    mx.random.seed(3)
    for first, again in (compiled() for _ in range(3)):
        expected = eager.pop(0)[0]
        assert mx.array_equal(first, again)
        assert mx.allclose(first, expected, rtol=1e-6)  # A compiled step may differ in the last digit.
