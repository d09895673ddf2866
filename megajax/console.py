"""What all commands share: their names, parsers whose errors are sentences, and how they end after a mistake."""

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megajax.errors import InputError, UserError

ROOM, PERMISSION = "make room there", "choose a place that you may write to"
CURES = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: ROOM,
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION,
    errno.EROFS: PERMISSION,
}
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it

# subcommand: (the module whose main(arguments) it runs, what it does)
COMMANDS = {
    "train": ("megajax.train", "train a model as a config says, or resume its run"),
    "generate": ("megajax.generate", "sample text from a run"),
    "plot": ("megajax.plot", "draw loss, learning rate and gradient norm of runs"),
    "bench": ("megajax.bench", "measure the speed of configs"),
    "preprocess": ("megajax.data.preprocess", "turn JSON lines into the token files that training reads"),
    "schema": ("megajax.config.json_schema", "write the JSON schema of configs, for editors"),
}


def program_name(module: str) -> str:
    """How the user called `module`: "megajax train", "python -m megajax train" or "python -m megajax.train"."""
    called = Path(sys.argv[0])
    subcommand = next((name for name, (target, _) in COMMANDS.items() if target == module), "")
    if called.stem == "megajax":
        return f"megajax {subcommand}"
    if called.name == "__main__.py" and called.parent.name == "megajax":
        return f"python -m megajax {subcommand}"
    return f"python -m {module}"


class CommandParser(argparse.ArgumentParser):
    """The parser of a subcommand: its usage names the program as the user called it; errors are sentences.

    Call `parse_args` inside `user_errors`.
    """

    def __init__(self, module: str, **settings):
        super().__init__(prog=program_name(module), allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; {self.prog} --help shows what can be given.")


@contextmanager
def user_errors() -> Iterator[None]:
    """Around a command: a `UserError`, or a file that can't be written, is one sentence on stderr and exit status 2.

    A warning is a line on stderr.

    Ctrl-C ends the command with status 130.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _warn_in_a_line
        try:
            yield
            sys.stdout.flush()
        except UserError as error:
            _fail(str(error), 2)
        except BrokenPipeError:  # of a pager that was closed, say
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None
        except OSError as error:
            if error.errno not in CURES:
                raise
            _fail(f"{error.filename or 'a file'} could not be written ({error.strerror}): {CURES[error.errno]}.", 2)
        except KeyboardInterrupt:
            _fail("interrupted.", INTERRUPTED)


def _fail(sentence: str, status: int) -> NoReturn:
    print(f"megajax: error: {sentence}", file=sys.stderr)
    raise SystemExit(status) from None


def _warn_in_a_line(message: Warning | str, *_: object, **__: object) -> None:
    print(f"megajax: warning: {message}", file=sys.stderr)
