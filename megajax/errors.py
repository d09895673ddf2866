"""The user's mistakes: one sentence each, exit status 2, never a traceback."""

import errno
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from operator import attrgetter
from os import PathLike
from os.path import dirname, exists
from types import SimpleNamespace
from typing import Any

MOST_SHOWN = 200  # characters of a value in a sentence
LONGEST_LINE = 1000  # characters of a sentence
LONG_WORD = re.compile(r"[^\s/:]{256,}")  # no name of a file, so a value
OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # errors of the system that no reading has
ACCESS_CURE = "correct the path, or its permissions"


class UserError(ValueError):
    """A mistake that the user can correct; the message is one sentence with the correction.

    It is one line, or a line and a list that is indented by two spaces, whatever values and paths are in it.
    """

    def __init__(self, sentence: str):
        super().__init__("\n  ".join(map(_line, sentence.split("\n  "))))


class ConfigError(UserError):
    """A config key is unknown, has a bad value, or cannot be combined with another key."""


class InputError(UserError):
    """A file or directory that the run needs is missing, damaged or does not fit the config."""


class ThreadError(UserError):
    """A background thread that the run needs has failed. No mistake of the user: the exit status is that of a crash."""


class LostReaderError(UserError):
    """A process of `data.workers` was ended from outside. The exit status is that of a lost process."""


def not_downloaded(path: str) -> str:
    """The end of a sentence about a missing `path`: a name of Hugging Face's hub, ORG/NAME, is not looked up there."""
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) and not exists(dirname(path))
    return "; nothing is downloaded" if is_hub_name else ""


def _line(text: str) -> str:
    """A line of a message: printable, with values cut, and without its middle if it is long: a cure is at the end."""
    text = LONG_WORD.sub(lambda word: shown(word[0]), text)
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE // 2]} ... {text[-LONGEST_LINE // 3 :]}"
    return _printable(text)


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """A value, or another library's message, in a sentence: printable, one line, at most 200 characters."""
    try:
        text = str(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a number of more than {sys.get_int_max_str_digits()} digits"
    head = text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
    return _printable(head)


def array_form(value: object) -> str:
    """The dtype and shape of an array, "float32[2, 3]"; the type of something else."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{getattr(value, 'dtype', '')}{[*shape]}"


def accepts(function: Callable[..., Any], *arguments: object) -> bool:
    """Whether a function of the user's takes these positional arguments; True for one that does not say."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a built-in one without a signature
        return True
    return True


def check_methods(made: type[Any], base: type[Any]) -> None:
    """Raise ConfigError if a method of `made`, a subclass of `base`, takes other arguments than that of `base`."""
    for name in dir(base):
        declared, own = inspect.getattr_static(base, name), inspect.getattr_static(made, name)
        if name.startswith("_") or own is declared or not inspect.isroutine(method := getattr(base, name)):
            continue
        arguments = [*inspect.signature(method).parameters]
        if not accepts(getattr(made, name), *arguments):
            wanted = f"{name}({', '.join(arguments)})"
            raise ConfigError(f"{made.__name__}.{name} does not take what it is called with: write {wanted}.")


def counted(number: int | str, noun: str) -> str:
    """A number, or the text of one, and the noun, in the plural unless the number is 1: "4,096 tokens"."""
    shown = number if isinstance(number, str) else f"{number:,}"
    if shown == "1":
        return f"1 {noun}"
    stem, end = (noun[:-1], "ies") if noun.endswith("y") else (noun, "es" if noun.endswith(("s", "tch")) else "s")
    return f"{shown} {stem}{end}"


def reading(path: str | PathLike[str], cure: str = "copy it again") -> AbstractContextManager[None]:
    """Around the reading of a file from others: an error that no check foresaw is a sentence with the path."""
    return reported(f"{path} is damaged or not of this format", cure)


def file_reader[**P, T](*paths: str, cure: str = "copy it again") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function, or a generator, that reads a file from others: `reading` around each call.

    `paths` are the names of its arguments, or attributes of these, that may have the path; the first that is not None
    has it.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        def guard(*arguments: P.args, **named: P.kwargs) -> AbstractContextManager[None]:
            given = signature.bind(*arguments, **named)
            given.apply_defaults()
            found = (attrgetter(path)(SimpleNamespace(**given.arguments)) for path in paths)
            return reading(next((path for path in found if path is not None), "a file"), cure)

        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> T:
            with guard(*arguments, **named):
                return function(*arguments, **named)

        @wraps(function)
        def iterate(*arguments: P.args, **named: P.kwargs) -> Any:
            with guard(*arguments, **named):
                yield from function(*arguments, **named)  # pyright: ignore

        return iterate if inspect.isgeneratorfunction(function) else call

    return decorate


@contextmanager
def reported(problem: str, cure: str) -> Iterator[None]:
    """Around the work of a library on a file from others: an error of any kind is a sentence.

    One of the system, such as missing permissions, keeps its reason. The error itself is the cause, which `--traceback`
    prints. Readers of libraries assert things about a file; only an assertion or an unknown name of megajax itself is a
    mistake of ours.
    """
    try:
        yield
    except (UserError, ImportError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, (AssertionError, NameError)) and _raised_in(error).startswith("megajax."):
            raise
        if isinstance(error, OSError) and error.errno in OF_WRITING:  # of the copy that is made of it
            raise
        if isinstance(error, OSError) and error.strerror:  # of the system, not of the library about the content
            place = shown(error.filename or "a file")
            raise InputError(f"{place} cannot be read ({error.strerror}): {ACCESS_CURE}.") from error
        name, text = type(error).__name__, str(error).partition("\n")[0]
        reason = text if type(error) is Exception else f"{name}: {text}" if text else name  # tokenizers' have no name
        raise InputError(f"{problem} ({shown(reason)}): {cure}.") from error


def _raised_in(error: BaseException) -> str:
    """The name of the module that raised an error."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else at.tb_frame.f_globals.get("__name__", "")
