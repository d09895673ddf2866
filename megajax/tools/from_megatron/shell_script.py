"""Reads a launch script: its variables, conditions and `source`d files, up to the commands. Nothing is executed."""

import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megajax.errors import InputError, shown
from megajax.files import read_text, why_unreadable
from megajax.tools.from_megatron import shell_syntax as syntax
from megajax.tools.from_megatron.shell_syntax import ASSIGNMENT, SHELLS, CommandList, Word
from megajax.tools.from_megatron.shell_values import MARK, Values

MAX_BYTES = 2**20  # of a script
MAX_FILES = 50  # with those that it sources
MAX_STEPS = 20_000  # commands, those of loops counted each time
DECLARING = ("export", "declare", "local", "readonly", "typeset")
FILE_TESTS = {
    "-e": Path.exists,
    "-f": Path.is_file,
    "-d": Path.is_dir,
    "-r": Path.exists,
    "-s": lambda path: path.stat().st_size > 0,
}
COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


@dataclass(frozen=True)
class Line:
    """A command of a script, its words with the values of variables."""

    words: list[str]
    location: str  # "file, line n"
    outer: tuple[str, ...] = ()  # of `srun OPTIONS bash -c`, the words before the shell


class _Stop(Exception):
    """`exit`, or `return` of a function."""


class Script:
    """What a script says: the commands that it would run, and what could not be read."""

    def __init__(self, path: Path, arguments: list[str]):
        self.values = Values(str(path), [str(path), *arguments])
        self.lines: list[Line] = []
        self.warnings: list[str] = []
        self.texts: list[str] = []  # of the files, and of `bash -c`
        self.ended = ""  # the location of the `exit` that ended it
        self._absent: str | None = None  # the file that the newest test looked for and that is not here
        self._ran = True  # whether all commands since this was set are known
        self._functions: dict[str, CommandList] = {}
        self._open: list[Path] = []
        self._files = self._steps = 0
        self._outer: tuple[str, ...] = ()
        self._file(path)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def _at(self) -> str:
        return f"{self.values.file}, line {self.values.line}"

    def _file(self, path: Path) -> None:
        if path.resolve() in self._open:
            circle = " -> ".join(map(str, [*self._open, path]))
            raise InputError(f"the script sources itself, {shown(circle)} ({self._at}): remove one of these lines.")
        if self._files == MAX_FILES:
            raise InputError(f"{path} is one of more than {MAX_FILES} sourced files: write the launch line by itself.")
        try:
            text = read_text(path, MAX_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            cure = "give a shell script, or the launch line itself"
            raise InputError(f"{shown(path)} cannot be read, {why_unreadable(error)}: {cure}.") from None
        self.texts.append(text)
        self._files += 1
        outer, line = self.values.file, self.values.line
        self.values.file = str(path)
        self._open.append(path.resolve())
        try:
            self._block(syntax.parse(text.replace("\0", ""), str(path)))
        except _Stop:
            if len(self._open) > 1:
                return
        finally:
            self._open.pop()
            self.values.file, self.values.line = outer, line

    def _block(self, block: CommandList) -> bool | None:
        """Whether the last command succeeds; None if that is not known."""
        status: bool | None = True
        for before, command in block.commands:
            if (before == "&&" and status is False) or (before == "||" and status is not False):
                continue
            if before and self._gives_up(command):
                continue
            status = self._command(command)
        return status

    def _command(self, command: syntax.Command) -> bool | None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise InputError(f"{self.values.file} runs more than {MAX_STEPS:,} commands: give the launch line itself.")
        if isinstance(command, syntax.Simple):
            return self._simple(command)
        if isinstance(command, CommandList):
            return self._block(command)
        if isinstance(command, syntax.Function):
            self._functions[command.name] = command.body
        elif isinstance(command, syntax.If):
            self._if(command)
        elif isinstance(command, syntax.Case):
            self._case(command)
        elif isinstance(command, syntax.For):
            self._for(command)
        else:
            while (status := self._goes_on(command.condition)) is not command.is_until and status is not None:
                self._block(command.body)
            self._warn_about_condition(status, command.line)
        return True

    def _goes_on(self, condition: CommandList) -> bool | None:
        """Whether a loop goes on; None after a command that is not run, such as `read` or `kill -0`."""
        self._ran = True
        status = self._block(condition)
        return status if self._ran else None

    def _if(self, command: syntax.If) -> None:
        needs_file: CommandList | None = None
        for condition, body in command.branches:
            status = True if condition is None else self._block(condition)
            self._warn_about_condition(status, command.line)
            if status and self._gives_up(body):
                if needs_file is not None:
                    self._block(needs_file)
                    return
            elif status:
                self._block(body)
                return
            elif self._absent is not None and needs_file is None:
                needs_file = body

    def _gives_up(self, command: syntax.Command) -> bool:
        """Whether a command ends the script because a file is not on this machine; it may be where the script runs."""
        absent = self._absent
        if absent is None or not _ends(command):
            return False
        self._absent = None
        self.warn(f"{shown(absent)} is not here ({self._at}): the script is read as if it were, instead of its exit.")
        return True

    def _warn_about_condition(self, status: bool | None, line: int) -> None:
        if status is None:
            self.warn(f"the condition in {self.values.file}, line {line}, is not known: it counts as false.")

    def _case(self, command: syntax.Case) -> None:
        text = self.values.known(self.values.text(command.word), "the word of a case")
        falls = False
        for patterns, body, end in command.branches:
            if falls or any(fnmatch.fnmatchcase(text, self.values.text(pattern)) for pattern in patterns):
                self._block(body)
                if end not in (";&", ";;&"):
                    return
                falls = end == ";&"

    def _for(self, command: syntax.For) -> None:
        if command.words is None:
            self.warn(f"the loop in {self.values.file}, line {command.line}, is not read.")
            return
        for value in [value for word in command.words for value in self.values.fields(word)]:
            self.values.set(command.name, value)
            self._block(command.body)

    def _simple(self, command: syntax.Simple) -> bool | None:
        self.values.line, self._absent = command.line, None
        words = list(command.words)
        if len(words) > 1 and words[0].raw == "!":
            status = self._simple(syntax.Simple(words[1:], command.line))
            return None if status is None else not status
        while words and words[0].raw in DECLARING:
            words = [word for word in words[1:] if not word.raw.startswith("-")]
        while words and (found := ASSIGNMENT.match(words[0].raw)):
            self._assign(words.pop(0), found)
        if not words or words[0].raw in DECLARING:
            return True
        if words[0].raw in ("[[", "[", "test"):
            unset = dict(self.values.unset)
            status = self._test([self.values.fields(word) for word in words])
            self.values.unset = unset  # a test is how scripts ask whether a variable is set
            return status
        fields = [field for word in words for field in self.values.fields(word)]
        self.values.line = command.line
        return self._run(fields) if fields else True

    def _assign(self, word: Word, found: re.Match[str]) -> None:
        name, index, append = found[1], found[2], bool(found[3])
        if word.items is not None:
            self.values.set(name, [field for item in word.items for field in self.values.fields(item)], append)
        elif index is None:
            value = Word(word.raw[found.end() :], word.line)
            self.values.set(name, self.values.text(value), append)
        else:
            self.warn(f"{name}{index}=... in {self._at} is not read.")

    def _run(self, words: list[str]) -> bool | None:
        if words[0].rpartition("/")[2] == "sbatch":
            words = _unwrapped(words)
        name, arguments = words[0], words[1:]
        if name in self._functions:
            return self._call(name, words)
        if name in ("source", "."):
            self._source(arguments)
        elif name == "eval":
            self._text(" ".join(arguments))
        elif name in ("exit", "return"):
            self.ended = self._at if name == "exit" else ""
            raise _Stop
        elif name == "shift":
            del self.values.positional[1 : 1 + int(arguments[0] if arguments[:1] and arguments[0].isdigit() else 1)]
        elif name == "set" and "--" in arguments:
            self.values.positional[1:] = arguments[arguments.index("--") + 1 :]
        elif name == "unset":
            for each in arguments:
                self.values.variables.pop(each, None)
        elif name in ("true", ":", "false"):
            return name != "false"
        elif (at := _shell_at(words)) is not None:
            outer, self._outer = self._outer, (*self._outer, *words[:at])
            self.texts.append(words[at + 2])  # a script of sbatch has options
            self._text(words[at + 2])
            self._outer = outer
        elif name not in ("echo", "printf"):
            self._ran = False
            self.lines.append(Line(words, self._at, self._outer))
        return True

    def _call(self, name: str, words: list[str]) -> bool | None:
        outer = self.values.positional
        self.values.positional = [outer[0], *words[1:]]
        if len(self._open) > syntax.MAX_DEPTH:
            raise InputError(f"the function {name} calls itself ({self._at}): give the launch line itself.")
        self._open.append(Path(f"function {name}"))
        try:
            return self._block(self._functions[name])
        except _Stop:
            return None
        finally:
            self._open.pop()
            self.values.positional = outer

    def _text(self, text: str) -> None:
        """Read a text that the shell would run: of `eval`, or `bash -c`."""
        if MARK.fullmatch(text.strip()):
            self.values.known(text, "a command")
        if len(self._open) > syntax.MAX_DEPTH:
            raise InputError(f"eval is nested too deeply ({self._at}): give the launch line itself.")
        self._open.append(Path("eval"))
        try:
            self._block(syntax.parse(text, self.values.file, self.values.line))
        finally:
            self._open.pop()

    def _source(self, arguments: list[str]) -> None:
        name = arguments[0] if arguments else ""
        if MARK.search(name):
            self.warn(f"source {shown(self.values.written(name))} ({self._at}) is not read: its path is not known.")
            return
        beside = Path(self.values.positional[0]).parent
        found = next((path for path in (Path(name), beside / name) if name and _is(Path.is_file, path)), None)
        if found is None:
            self.warn(f"{shown(name)}, sourced in {self._at}, is not here: what it sets is missing.")
        else:
            self._file(found)

    def _test(self, words: list[list[str]]) -> bool | None:
        """The result of [[ ... ]], [ ... ] or test; None for one that is not known."""
        flat = [" ".join(field) for field in words[1:]]
        flat = flat[:-1] if flat and flat[-1] in ("]]", "]") else flat
        for sign, combine in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
            if sign in flat[1:]:
                at = flat.index(sign, 1)
                both = [self._test([[], *[[w] for w in part]]) for part in (flat[:at], flat[at + 1 :])]
                return None if None in both else combine(both)  # pyright: ignore
        if flat[:1] == ["!"]:
            status = self._test([[], *[[word] for word in flat[1:]]])
            return None if status is None else not status
        if any(MARK.search(word) for word in flat):
            return None
        if len(flat) == 1:
            return bool(flat[0])
        if len(flat) == 2:
            return self._unary(*flat)
        return _compared(*flat) if len(flat) == 3 else None

    def _unary(self, sign: str, text: str) -> bool | None:
        if sign in ("-z", "-n"):
            return bool(text) == (sign == "-n")
        if sign == "-v":
            return self.values.get(text) is not None
        if sign in FILE_TESTS:
            found = bool(text) and _is(FILE_TESTS[sign], Path(text))
            self._absent = None if found else text
            return found
        return None


def _ends(command: syntax.Command) -> bool:
    """Whether a command, or one of a list, is `exit` or `return`."""
    if isinstance(command, CommandList):
        return any(_ends(each) for _, each in command.commands)
    return isinstance(command, syntax.Simple) and command.words[0].raw in ("exit", "return")


def _compared(left: str, sign: str, right: str) -> bool | None:
    if sign in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (sign != "!=")
    if sign in COMPARISONS and all(re.fullmatch(r"-?\d{1,18}", text.strip()) for text in (left, right)):
        return COMPARISONS[sign](int(left), int(right))
    return None


def _shell_at(words: list[str]) -> int | None:
    """The index of the shell in `bash -c TEXT`, perhaps behind srun and its options."""
    found = (at for at, word in enumerate(words[:-2]) if word in SHELLS and re.fullmatch(r"-\w*c", words[at + 1]))
    return next(found, None)


def _unwrapped(words: list[str]) -> list[str]:
    """`sbatch OPTIONS --wrap TEXT` as `sbatch OPTIONS bash -c TEXT`, which runs the same."""
    for at, word in enumerate(words):
        option, equals, text = word.partition("=")
        if option == "--wrap" and (equals or at + 1 < len(words)):
            rest = at + 1 if equals else at + 2
            return [*words[:at], *words[rest:], SHELLS[0], "-c", text if equals else words[at + 1]]
    return words


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    try:
        return kind(path)
    except (OSError, ValueError):  # a name of 300 letters, or one with a null character
        return False
