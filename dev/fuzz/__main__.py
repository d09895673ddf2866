"""Hostile inputs: damaged files of each format, read in processes with limits on time and memory.

`python -m dev.fuzz` writes valid files of each format, changes copies of them (bits, bytes, length fields, text,
values of JSON, nesting, cut and joined), and reads each copy. A read must end in success or in one sentence
(`UserError`). Another exception, the end of the process, and a read above the limits are failures; they are printed by
kind, with the number that repeats one: `python -m dev.fuzz --case FORMAT:NUMBER`. Exit status 1 if there is one.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

from dev.fuzz.cases import FAILED, READ, SENTENCE, Outcome, mutated
from dev.fuzz.formats import FORMATS
from dev.fuzz.runner import run_all


def main(arguments: list[str]) -> int:
    """Run the fuzzer; the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--formats", nargs="*", default=[*FORMATS], choices=[*FORMATS], metavar="FORMAT")
    parser.add_argument("--count", type=int, default=2500, help="cases of each format")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--case", metavar="FORMAT:NUMBER", help="repeat one case here, with its traceback")
    options = parser.parse_args(arguments)
    os.environ |= {"JAX_PLATFORMS": "cpu", "RUST_BACKTRACE": "0"}
    if options.case:
        name, _, number = options.case.partition(":")
        repeat(name, options.seed, int(number))
        return 0
    found = run_all(options.formats, options.seed, options.first, options.count, options.jobs)
    kinds: dict[tuple[str, str], list[Outcome]] = {}
    for name, outcomes in found.items():
        for each in outcomes:
            if each.ends == FAILED:
                kinds.setdefault((name, each.kind), []).append(each)
    for (name, kind), same in sorted(kinds.items()):
        first = same[0]
        print(f"{name}:{first.case} {first.file} ({len(same)} cases) {kind} {json.dumps(first.why[:200])}")
    print(
        "| format | cases | read | sentence | failed | kinds of failure | longest, s |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    for name, outcomes in found.items():
        counts = [sum(each.ends == end for each in outcomes) for end in (READ, SENTENCE, FAILED)]
        longest = max((each.seconds for each in outcomes), default=0.0)
        own = sum(1 for format, _ in kinds if format == name)
        print(f"| {name} | {len(outcomes)} | {' | '.join(map(str, counts))} | {own} | {longest:.2f} |")
    return 1 if kinds else 0


def repeat(name: str, seed: int, case: int) -> None:
    """Read one case without limits; the folder with the damaged file remains if it fails."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-{case}-"))
    subject = FORMATS[name](folder)
    path, repaired = mutated(subject, name, seed, case)
    if repaired and subject.repair is not None:
        subject.repair()
    print(f"reading {path}", flush=True)
    warnings.simplefilter("ignore")
    subject.read(path)
    print("read")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
