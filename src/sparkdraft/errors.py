"""The one error that a user is shown without a traceback."""


class UserError(Exception):
    """Something the user gave is wrong. The message names what, where, and how to mend it; the exit code is 2."""
