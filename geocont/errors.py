"""The one exception whose message is meant for a person rather than for a debugger."""


class UserError(Exception):
    """Something the user can put right: a path, an option, a pattern.

    The message is one line that names the key, the value and the way out. The ``geocont`` command prints it without a
    stack trace and exits with status 2; in a library it is an ordinary exception.
    """
