"""Cases of many formats in several processes at a time; one that ends is replaced, and its end is a failure."""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dev.fuzz.cases import FAILED, SECONDS, Outcome, last_place, work
from dev.fuzz.formats import FORMATS
from dev.fuzz.subject import Subject

TOGETHER = 250  # cases of a process
START_SECONDS, SILENT_SECONDS = 120, 12 * SECONDS  # on a busy machine
PRELOADED = ["dev.fuzz.preloaded"]  # so that a process is a fork of one that has imported everything


def run_all(formats: Sequence[str], seed: int, first: int, count: int, jobs: int) -> dict[str, list[Outcome]]:
    """The outcomes of the cases first .. first+count-1 of each format."""
    last = first + count
    shares = [(n, at, min(at + TOGETHER, last)) for at in range(first, last, TOGETHER) for n in formats]
    found: dict[str, list[Outcome]] = {name: [] for name in formats}
    with ThreadPoolExecutor(jobs) as threads:
        runs = threads.map(lambda share: run(FORMATS[share[0]], share[0], seed, *share[1:]), shares)
        for (name, *_), outcomes in zip(shares, runs, strict=True):
            found[name] += outcomes
    return found


def run(make: Callable[[Path], Subject], name: str, seed: int, first: int, last: int) -> list[Outcome]:
    """The outcomes of some cases; the end of the process, or its silence, is an outcome too."""
    context, outcomes = multiprocessing.get_context("forkserver"), []
    context.set_forkserver_preload(PRELOADED)
    while first < last:
        with tempfile.NamedTemporaryFile() as log:
            results, sender = context.Pipe(duplex=False)
            arguments = (make, name, seed, first, last, sender, log.name)
            process = context.Process(target=work, args=arguments, daemon=False)
            process.start()
            sender.close()
            silence = START_SECONDS
            try:
                while first < last:
                    if not results.poll(silence):
                        outcomes.append(Outcome(first, "", FAILED, f"silence at {last_place(log.name)}"))
                        first += 1
                        break
                    outcomes.append(results.recv())
                    first, silence = first + 1, SILENT_SECONDS
            except EOFError:
                process.join()
                outcomes.append(Outcome(first, "", FAILED, f"{how_ended(process.exitcode)} at {last_place(log.name)}"))
                first += 1
            finally:
                process.kill()
                process.join()
    return outcomes


def how_ended(status: int | None) -> str:
    if status is not None and status < 0:
        return f"the process ended by {signal.Signals(-status).name}"
    return f"the process ended with {status}"
