"""A batch that is shown early moves the place in the data only when it is taken."""

import pytest

from deltatune.data.batches.order import PeekableOrder
from deltatune.errors import UserError


class Counting:
    """An order with numbers as batches, of which one fails the first time."""

    def __init__(self, broken=None):
        self.at, self.broken = 0, broken

    def __next__(self):
        if self.at == self.broken:
            self.broken = None
            raise UserError("a bad row")
        self.at += 1
        return self.at

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]


def test_a_batch_is_shown_once_and_then_taken():
    order = PeekableOrder(Counting())
    assert next(order) == 1
    assert (order.peek(), order.peek()) == (2, 2)
    assert order.state() == {"at": 1}
    assert (next(order), order.state()) == (2, {"at": 2})
    assert next(order) == 3


def test_going_back_forgets_what_was_shown():
    order = PeekableOrder(Counting())
    order.peek()
    order.restore(order.state(), {})
    assert (next(order), next(order)) == (1, 2)
    order.peek()
    order.restore({"at": 7}, {})
    assert next(order) == 8


def test_a_batch_that_cannot_be_had_says_so_when_it_is_taken():
    order = PeekableOrder(Counting(broken=1))
    assert next(order) == 1
    assert order.peek() is None
    assert order.peek() is None
    assert order.state() == {"at": 1}
    with pytest.raises(UserError, match="a bad row"):
        next(order)
    assert next(order) == 2
