"""The one error that a user is shown without a traceback."""


class UserError(Exception):
    """Something the user gave is wrong. The message names what, where, and how to mend it; the exit code is 2."""


class Stopped(Exception):
    """A stage was told to stop (SIGTERM, Ctrl-C) and saved its state. The message says how to go on; the exit code is 0."""
