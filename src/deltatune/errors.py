"""The one exception that means: the user can mend this. The command line prints its message and exits with 2.

And the words of other errors, for such messages.
"""


class UserError(ValueError):
    """What was expected, what came, and what to do, in one message for a person."""


def first_line(error: BaseException) -> str:
    """The first line of an error's words; its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def reason(error: BaseException) -> str:
    """An error's words in one line, the first 400 characters."""
    text = " ".join(str(error).split())
    return f"missing key {text}" if isinstance(error, KeyError) else text[:400]
