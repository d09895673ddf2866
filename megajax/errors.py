"""The user's mistakes: one sentence each, exit status 2, never a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

MOST_SHOWN = 200  # characters of a value in a sentence


class UserError(ValueError):
    """A mistake that the user can correct; the message is one sentence with the correction."""


class ConfigError(UserError):
    """A config key is unknown, has a bad value, or cannot be combined with another key."""


class InputError(UserError):
    """A file or directory that the run needs is missing, damaged or does not fit the config."""


class ThreadError(UserError):
    """A background thread that the run needs has failed. No mistake of the user: the exit status is that of a crash."""


def shown(value: object) -> str:
    """A value, or another library's message, in a sentence: printable, one line, at most 200 characters."""
    try:
        text = str(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a number of more than {sys.get_int_max_str_digits()} digits"
    head = text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in head)


@contextmanager
def reading(path: str | PathLike[str], cure: str = "copy it again") -> Iterator[None]:
    """Around the reading of a file from others: an error that no check foresaw is a sentence with the path.

    The error itself is the cause, which `--traceback` prints.
    """
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InputError(f"{path} is damaged or not of this format ({shown(reason)}): {cure}.") from error
