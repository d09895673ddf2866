"""Proof that a change of the code changes no program: the lowered steps of small models, and golden runs.

    python -m dev.programs write DIR [--only PATTERN]    # the canonical StableHLO of each program, and index.json
    python -m dev.programs compare OLD NEW               # equal and different programs; exit status 1 if one differs
    python -m dev.programs runs DIR [--only PATTERN]     # golden runs: metrics of each step, and checkpoints
    python -m dev.programs repeat DIR [--only PATTERN]   # this code repeats them, from the start and resumed

Call `write` and `runs` with the old code, `compare` and `repeat` with the new. PATTERN is a regular expression.
"""

import argparse
import difflib
import gzip
import hashlib
import itertools
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from dev.programs.cases import CASES
from dev.programs.lowering import modules, prepare
from dev.programs.runs import repeat_all, train_all

SHOWN = 200  # characters of a line
WINDOW = 400  # lines in which a diff is looked for; of whole texts it would take minutes
Index = dict[str, dict[str, Any]]


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("write", "runs", "repeat"):
        command = commands.add_parser(name)
        command.add_argument("directory", type=Path)
        command.add_argument("--only", default="", help="names that have this regular expression")
    command = commands.add_parser("compare")
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "compare":
        return compare(options.old, options.new)
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if options.command == "write":
        return write(directory, options.only)
    if options.command == "runs":
        return train_all(directory, options.only) or 0
    return 1 if repeat_all(directory, options.only) else 0


def write(directory: Path, only: str) -> int:
    """Lower the programs; 1 if one cannot be made."""
    prepare()
    from dev.programs.canonical import canonical_text, function_count

    index, failed = read_index(directory), 0
    for name, case in CASES.items():
        if not re.search(only, name):
            continue
        start = time.perf_counter()
        index = {each: entry for each, entry in index.items() if each.rpartition(".")[0] != name}
        try:
            for kind, module in modules(case).items():
                text = canonical_text(module).encode()
                Path(directory, f"{name}.{kind}.mlir.gz").write_bytes(gzip.compress(text, mtime=0))
                index[f"{name}.{kind}"] = {
                    "sha256": hashlib.sha256(text).hexdigest(),
                    "lines": text.count(b"\n"),
                    "functions": function_count(module),
                }
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        except Exception as error:
            failed += 1
            index[f"{name}.error"] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        Path(directory, "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    print(f"{len(index) - failed} programs, {sum(entry.get('lines', 0) for entry in index.values()):,} lines")
    return 1 if failed else 0


def compare(old: Path, new: Path) -> int:
    """Print the programs that differ, with the first lines of each difference; 1 if there is one."""
    before, after = read_index(old), read_index(new)
    if not before or not after:
        raise SystemExit(f"{new if before else old} has no programs: write them first.")
    equal, different, functions = 0, 0, list[str]()
    for name in before | after:
        if name not in before or name not in after or "error" in before[name] | after[name]:
            different += 1
            reasons = [
                f"{own.get(name, {}).get('error', 'not there' if name not in own else 'there')}"
                for own in (before, after)
            ]
            print(f"\n{name}: {reasons[0]} → {reasons[1]}")
        elif before[name]["sha256"] == after[name]["sha256"]:
            equal += 1
            counts = [own[name]["functions"] for own in (before, after)]
            functions += [f"{name} {counts[0]} → {counts[1]}"] if counts[0] != counts[1] else []
        else:
            different += 1
            texts = [gzip.decompress(Path(own, f"{name}.mlir.gz").read_bytes()).decode() for own in (old, new)]
            print("\n".join(["", *difference(name, *texts)]))
    if functions:
        print(f"\nequal, with another number of functions: {', '.join(functions)}")
    print(f"\n{equal} programs are equal, {different} differ")
    return 1 if different else 0


def difference(name: str, old: str, new: str) -> list[str]:
    """A title and the first lines of a diff, without the numbers of values, as a new operation changes all that follow.

    The numbers are shown where nothing else differs.
    """
    before, after = ([re.sub(r"%\d+", "%", line) for line in text.splitlines()] for text in (old, new))
    kind = "the same operations in another order" if Counter(before) == Counter(after) else "other operations"
    if before == after:
        kind, before, after = "the same operations with other operands", old.splitlines(), new.splitlines()
    changed = Counter(before) - Counter(after), Counter(after) - Counter(before)
    first = next((i for i, (a, b) in enumerate(itertools.zip_longest(before, after)) if a != b), 0)
    start = max(0, first - 2)
    old_lines, new_lines = before[start : first + WINDOW], after[start : first + WINDOW]
    lines = list(difflib.unified_diff(old_lines, new_lines, "", "", "", "", 2, lineterm=""))[2:22]
    counts = f"−{changed[0].total()} +{changed[1].total()} lines of {len(before)}"
    return [f"{name}: {kind}, {counts}, from line {first + 1}", *(line[:SHOWN] for line in lines)]


def read_index(directory: Path) -> Index:
    """By program; empty without a file."""
    path = directory / "index.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
