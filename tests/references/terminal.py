"""A stream that says it is a terminal."""

import io


class Terminal(io.StringIO):
    """For contextlib.redirect_stdout and redirect_stderr."""

    def isatty(self) -> bool:
        return True
