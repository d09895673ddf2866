"""Reads damaged files in a process with limits on memory and time."""

import faulthandler
import os
import random
import re
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dev.fuzz.mutation import Mutator
from dev.fuzz.subject import Subject
from megajax.errors import MOST_SHOWN, UserError

SECONDS = 10  # of the processor, for one case
HEADROOM = 2**30  # bytes of address space beside those after the first read
LONGEST = 10_000  # characters of a sentence
REPEATED = re.compile(rf"(.)\1{{{MOST_SHOWN}}}")  # of a value that is not cut: the long words repeat a letter
READ, SENTENCE, FAILED = "read", "sentence", "failed"


class Outcome(NamedTuple):
    """How a case ended; of a failure `kind` is the same for cases that have the same reason."""

    case: int
    file: str
    ends: str
    kind: str = ""
    why: str = ""
    seconds: float = 0.0


def mutated(subject: Subject, name: str, seed: int, case: int) -> tuple[Path, bool]:
    """Change one file as the number says; the file, and whether the others are made to fit it."""
    if subject.damaged:
        return subject.files[case], False
    generator = random.Random(f"{name} {seed} {case}")
    path = generator.choice(subject.files)
    data, mutate = path.read_bytes(), Mutator(generator, subject.words)
    packing = subject.packings.get(path)
    if packing is not None and generator.random() < 0.5:
        unpack, pack = packing
        data = pack(mutate(unpack(data)))
    else:
        data = mutate(data)
    path.write_bytes(data)
    return path, subject.repair is not None and generator.random() < 0.5


def cases(
    make: Callable[[Path], Subject], name: str, seed: int, first: int, count: int, ready: Callable[[], None]
) -> Iterator[Outcome]:
    """The outcomes of the cases first .. count-1; calls `ready` when the valid files have been read once."""
    with tempfile.TemporaryDirectory() as folder:
        subject = make(Path(folder))
        valid = {path: path.read_bytes() for path in everything(Path(folder))}
        for path in () if subject.damaged else [*dict.fromkeys(subject.files)][: count - first]:
            subject.read(path)
            restore(valid, path)
        ready()
        for case in range(first, count):
            path, repaired = mutated(subject, name, seed, case)
            if repaired and subject.repair is not None:
                subject.repair()
            yield outcome(case, path, subject.read)
            restore(valid, path)


def everything(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def restore(valid: dict[Path, bytes], changed: Path) -> None:
    """Write the files again that differ from the valid ones: the changed one, and those that a reader has changed."""
    for path, data in valid.items():
        if path == changed or not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def outcome(case: int, path: Path, read: Callable[[Path], object]) -> Outcome:
    """Read once. A sentence is one line, and perhaps a list of keys below it."""
    start, ends, kind, why = time.process_time(), READ, "", ""
    try:
        read(path)
    except UserError as error:
        ends, why = SENTENCE, str(error)
        if len(why) > LONGEST or not all(line.startswith("  ") for line in why.splitlines()[1:]):
            ends, kind = FAILED, f"a long sentence: {why[:60]}"
        elif REPEATED.search(why):
            ends, kind = FAILED, f"a long value: {REPEATED.sub('...', why)[:60]}"
    except BaseException as error:  # also those of Rust's panics
        if isinstance(error, KeyboardInterrupt):
            raise
        ends, kind, why = FAILED, place(error), f"{type(error).__name__}: {error}"
    return Outcome(case, path.name, ends, kind, why[:2000], time.process_time() - start)


def place(error: BaseException) -> str:
    """The innermost line of megajax, and the type of the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/megajax/" in frame.filename]
    where = f"{frames[-1].filename.rpartition('/megajax/')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{where} {type(error).__name__}"


def work(make: Callable[[Path], Subject], name: str, seed: int, first: int, count: int, results: Any, log: str) -> None:
    """Send the outcomes of cases, from a process that ends above the limits. `log` gets the stack of its end."""
    for stream in (1, 2):  # of libraries
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    stacks = open(log, "w", encoding="utf-8")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGXCPU, stacks, chain=True)
    warnings.simplefilter("ignore")

    def limit_memory() -> None:
        in_use = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + HEADROOM, resource.RLIM_INFINITY))
        limit_seconds()

    def limit_seconds() -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + 2 * SECONDS, resource.RLIM_INFINITY))

    try:
        for found in cases(make, name, seed, first, count, limit_memory):
            results.send(found)
            limit_seconds()
    except BaseException:
        traceback.print_exc(file=stacks)
        stacks.flush()
        raise


def last_place(log: str) -> str:
    """The innermost line of megajax in the stack that a process has left."""
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    found = re.search(r'File ".*/megajax/(?!.*/megajax/)(.*)", line (\d+)', text)
    return f"{found[1]}:{found[2]}" if found else next(iter(text.splitlines()[-1:]), "?")
