"""The exception for mistakes that the user can correct, and how other errors are quoted in messages."""

import re
from collections.abc import Sequence

# How MLX says on each device that there is no memory left.
_NO_MEMORY = re.compile(r"out of memory|OutOfMemory|Insufficient Memory|Unable to allocate|\[metal::malloc\]")


class NotFiniteError(ArithmeticError):
    """A model gave a token a probability that is not finite, behind one of the `rows` of tokens that it had read."""

    def __init__(self, *rows: Sequence[int]):
        super().__init__("a probability is not finite")
        self.rows = rows


class UserError(ValueError):
    """A mistake that the user can correct; its message names the expected value, the actual one and the remedy.

    The command line prints the message without a traceback, and exits with code 2.
    """

    # Whether every rank of a launched run ends with it; None where that is not known.
    everywhere: bool | None = None


class NoResultError(UserError):
    """A loss or an answer that is not finite, which is no result."""


def lacks_memory(error: BaseException) -> bool:
    """Whether an error of MLX says that the device has no memory left."""
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def reason(error: BaseException) -> str:
    """Return the first 400 characters of an error's message, in one line."""
    text = " ".join(str(error).split())
    return f"missing key {text}" if isinstance(error, KeyError) else text[:400]


def first_few(names: Sequence[str], most: int = 3, separator: str = "; ") -> str:
    """Join the first `most` names, and count the rest."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
