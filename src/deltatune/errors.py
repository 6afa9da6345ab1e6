"""The one exception that means: the user can mend this. The command line prints its message and exits with 2."""


class UserError(ValueError):
    """What was expected, what came, and what to do, in one message for a person."""
