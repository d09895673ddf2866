"""Shared by all commands: their names, common arguments, and the exit after a mistake."""

import argparse
import errno
import io
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

from megajax import threads
from megajax.errors import LostReaderError, ThreadError, UserError, shown

SPACE, PERMISSION = "free disk space there", "choose a directory that you may write to"
CURES = {
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EFBIG: SPACE,
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION,
    errno.EROFS: PERMISSION,
}
PATH = "correct the path"
UNUSABLE = {  # names that no file can have, which any check of a path finds first
    errno.ENAMETOOLONG: "shorten the name",
    errno.ELOOP: "remove a link of the circle",
    errno.EISDIR: PATH,
    errno.ENOTDIR: PATH,
    errno.EEXIST: "remove or move that file, since a directory is made there",
}
TRACEBACK = "MEGAJAX_TRACEBACK"  # a variable, so that processes that this one starts have it too
PLATFORMS, UNKNOWN_BACKEND = "JAX_PLATFORMS", "is not in the list of known backends"  # jax's words
INDENT = 11 * " "  # of the summary, after its labels
STYLES = {"bold": "1", "red": "31", "yellow": "33"}
# Exit statuses: the last three mean a lost or hanging process, a stop on request after saving, and Ctrl-C as in shells.
DONE, CRASH, MISTAKE, BAD_NUMBERS, LOST, STOPPED, INTERRUPTED = 0, 1, 2, 3, 4, 75, 130
early_warnings = deque[str](maxlen=100)  # shown before a run directory keeps them

# subcommand: (the module whose main(arguments) it runs, its help)
COMMANDS = {
    "train": ("megajax.train", "train the model of a config, or resume its run"),
    "launch": ("megajax.launch", "train in several processes on this host, and restart after crashes"),
    "preflight": ("megajax.tools.preflight.__main__", "measure GPUs, links and disk before a run"),
    "plan": ("megajax.tools.plan.__main__", "find the fastest mesh of a config for N GPUs, without a GPU"),
    "compile": ("megajax.tools.compile", "compile a config's step for H200s, without a GPU: does it fit?"),
    "verify": ("megajax.tools.verify.__main__", "compare meshes with one device, on the CPU, with a small model"),
    "generate": ("megajax.generate", "continue text with a run or a Hugging Face model"),
    "chat": ("megajax.chat", "talk with a run or a Hugging Face model in the terminal"),
    "evaluate": ("megajax.evaluate", "loss, perplexity and bits per byte of texts"),
    "checkpoints": ("megajax.checkpoint.inspect", "list a run's checkpoints, or verify them"),
    "status": ("megajax.status", "a line for each run: step, loss, speed, last save, alive or not"),
    "average": ("megajax.average", "average checkpoints of a run, or write its moving average"),
    "schedule": ("megajax.tools.schedule", "draw a pipeline's schedule, and simulate it"),
    "plot": ("megajax.tools.plot", "draw loss, learning rate and gradient norm of runs"),
    "bench": ("megajax.tools.bench", "measure the speed of configs"),
    "explain-weight": ("megajax.tools.explain_weight", "the forms, bytes and collectives of one weight in a step"),
    "profile": ("megajax.tools.profile.__main__", "show where a step's time goes, beside the planner's estimate"),
    "preprocess": ("megajax.data.preprocess", "convert JSON lines to the token files for training"),
    "inspect": ("megajax.data.inspect", "describe token files, or show samples of a config as text"),
    "from-megatron": (
        "megajax.tools.from_megatron.__main__",
        "translate a launch script of Megatron-LM into a config",
    ),
    "export-megatron": (
        "megajax.tools.export_megatron.__main__",
        "write a run's weights as a checkpoint of Megatron-Core",
    ),
    "hf": ("megajax.hf.__main__", "convert between runs and models in Hugging Face's format"),
    "schema": ("megajax.config.json_schema", "print the JSON schema of configs, for editors"),
}


def program_name(module: str) -> str:
    """The user's call of `module`: "megajax train", "python -m megajax train" or "python -m megajax.train"."""
    called = Path(sys.argv[0])
    subcommand = next((name for name, (target, _) in COMMANDS.items() if target == module), "")
    if called.stem == "megajax":
        return f"megajax {subcommand}"
    if called.name == "__main__.py" and called.parent.name == "megajax":
        return f"python -m megajax {subcommand}"
    return f"python -m {module.removesuffix('.__main__')}"


def command(name: str, *arguments: object) -> str:
    """The command line of subcommand `name` for the user to paste: called as this one is, its arguments quoted."""
    return " ".join([program_name(COMMANDS[name][0]), *map(shlex.quote, map(str, arguments))])


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that uses a trained model; `inference.load.load_chosen` reads them."""
    parser.add_argument("run", metavar="RUN_OR_HF_FOLDER", help="a run, RUN/checkpoints/STEP, or a Hugging Face folder")
    parser.add_argument("--mesh", help="axes of the mesh, such as tensor=2,fsdp=2 (default: one device)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the model's)")


def add_sampling_arguments(parser: argparse.ArgumentParser, tokens: int) -> None:
    """The arguments of a command that generates text; `inference.sampling.chosen_sampling` checks them."""
    parser.add_argument("--tokens", type=int, default=tokens, help=f"most new tokens per text (default: {tokens})")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the K likeliest tokens (default: 0, all)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the likeliest tokens up to this sum (default: 1)",
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="least probability, as a share of the likeliest token's (default: 0)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument(
        "--speculate",
        type=int,
        default=0,
        metavar="N",
        help="draft N tokens in each step with the multi-token prediction modules (default: 0, none)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add_template_arguments(parser)


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    """The chat template's arguments of a command; `inference.prompts.chosen_arguments` reads them."""
    parser.add_argument(
        "--chat-template-args",
        default="{}",
        metavar="ARGS",
        help="arguments of the chat template besides those of the training, such as '{enable_thinking: false}'",
    )


def size(count: float) -> str:
    """A number of bytes in a file or on a network as text: 1.23 GB."""
    return amount(count, "B")


def memory_size(count: float) -> str:
    """A number of bytes in memory as text: 1.23 GiB."""
    return amount(count, "B", ("", "Ki", "Mi", "Gi"), 1024)


def amount(count: float, unit: str, prefixes: Sequence[str] = ("", "k", "M", "G", "T"), base: int = 1000) -> str:
    """A number with the largest prefix that leaves 1 or more of it: 6.39 MFLOP."""
    power = 0
    while power < len(prefixes) - 1 and float(f"{count:.3g}") >= base:
        count, power = count / base, power + 1
    digits = f"{count:.0f}" if count >= 100 else f"{count:.3g}"
    return f"{digits} {prefixes[power]}{unit}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table, its columns side by side; those with an index in `right` are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines


def terminal_width() -> int | None:
    """The width of the terminal that stdout is; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def hide_native_lines(beginning: bytes) -> None:
    """Leave out the lines with this beginning that native libraries write to stdout from now on."""
    sys.stdout.flush()
    shown, (reader, writer) = os.dup(1), os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    # Python's own lines do not pass the pipe: stdout stays a terminal, and the end of the process loses nothing.
    sys.stdout = open(shown, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)

    def copy() -> None:
        with open(reader, "rb") as lines:
            for line in lines:
                if not line.startswith(beginning):
                    os.write(shown, line)

    threads.start("the copy of native output", copy)


def fold(text: str, stream: IO[str] | None = None) -> str:
    """A summary for a terminal: its lines cut at the terminal's width, with an indent, their labels in bold.

    Unchanged in a file or a pipe; without colour if NO_COLOR is set.
    """
    out: IO[str] = stream or sys.stdout
    if not out.isatty():
        return text
    width, lines = shutil.get_terminal_size().columns, []
    for line in text.splitlines():
        cut = textwrap.wrap(line, max(width, 40), subsequent_indent=INDENT, break_on_hyphens=False) or [line]
        label = re.match(r"[a-z]+ {2,}", cut[0])
        if label:
            cut[0] = paint(label[0], "bold", out) + cut[0][label.end() :]
        lines += cut
    return "\n".join(lines)


def paint(text: str, style: str, stream: IO[str]) -> str:
    """The text in a style for a terminal; unchanged elsewhere, and if NO_COLOR is set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


@contextmanager
def user_errors() -> Iterator[None]:
    """Around a command: a `UserError`, or a file that cannot be written, is one sentence on stderr and exit status 2.

    A warning is one line on stderr. Ctrl-C ends the command with status 130. Characters that stdout's encoding does not
    have are printed by their codes. With --traceback, or MEGAJAX_TRACEBACK=1, the traceback comes first.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings(), threads.watching_others():
        warnings.showwarning = _warn_in_a_line
        try:
            yield
            sys.stdout.flush()
        except BrokenPipeError:  # for example, a pager was closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(DONE) from None
        except (UserError, OSError, RuntimeError, KeyboardInterrupt) as error:
            if (found := outcome(error)) is None:
                raise
            _fail(*found)
        finally:
            early_warnings.clear()


def outcome(error: BaseException) -> tuple[str, int] | None:
    """The sentence and the exit status of an error that ends a command; None if it is no mistake of the user's."""
    if isinstance(error, LostReaderError):
        return str(error), LOST
    if isinstance(error, UserError):
        return str(error), CRASH if isinstance(error, ThreadError) else MISTAKE
    if isinstance(error, KeyboardInterrupt):
        return "interrupted.", INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return "nobody reads the output.", DONE
    if isinstance(error, OSError) and error.errno in UNUSABLE:
        name = shown(error.filename2 or error.filename or "a file")  # the second one: the target of a renaming
        return f"{name} cannot be opened ({error.strerror}): {UNUSABLE[error.errno]}.", MISTAKE
    if isinstance(error, OSError) and error.errno in CURES:
        name = error.filename or "a file"
        return f"{name} could not be written ({error.strerror}): {CURES[error.errno]}.", MISTAKE
    if isinstance(error, RuntimeError) and UNKNOWN_BACKEND in (text := str(error)):
        known = text.partition(UNKNOWN_BACKEND)[2].partition(".")[0]
        given = shown(os.environ.get(PLATFORMS, ""))
        return f"{PLATFORMS}={given} has a name that jax does not know{known}: correct or unset it.", MISTAKE
    return None


def described(error: BaseException) -> tuple[str, int]:
    """The sentence and the exit status of any error that ends a command; of SystemExit those of its cause."""
    if isinstance(error, SystemExit):
        sentence = described(error.__context__)[0] if error.__context__ is not None else ""
        return sentence, error.code if isinstance(error.code, int) else CRASH
    return outcome(error) or (str(error) or type(error).__name__, CRASH)


def _fail(sentence: str, status: int) -> NoReturn:
    if status == MISTAKE and os.environ.get(TRACEBACK) not in (None, "", "0"):
        traceback.print_exc()
    print(paint("megajax: error:", "red", sys.stderr), sentence, file=sys.stderr)
    raise SystemExit(status) from None


def _warn_in_a_line(message: Warning | str, *_: object, **__: object) -> None:
    early_warnings.append(str(message))
    print(paint("megajax: warning:", "yellow", sys.stderr), message, file=sys.stderr)
