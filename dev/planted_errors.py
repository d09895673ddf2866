"""Does the suite find small errors? `python dev/planted_errors.py --lines`, then `... [--seed 1] [--seconds 3000]`.

The first runs the suite and notes which tests reach each line (dev/lines_of_tests.py); it takes half as long again. The
second plants errors one at a time in a copy of the checkout: another comparison or sign, an operand, a statement or a
keyword argument left out, one arm of a condition always taken, an entry missing in a list. Of each it runs the tests
that reach its line, those of the module's own folder first, for as long as --most allows; of a line that runs at import
(a constant, a field, a decorator) those that reach a line with the name that it defines. A line is printed for each
error that none of them finds.
Read those: of some the program is the same, or only slower, and of some another test would tell. --lines again after
changes. --errors FILE takes somebody's errors instead: a JSON list of {"file": ..., "old": ..., "new": ...}.
"""

import argparse
import ast
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LINES = Path.home() / ".cache/megajax-tests/lines_of_tests"
TREES = Path("/tmp/planted_errors")
OTHER = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not"}
OTHER |= {ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
SIGNS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
# Of text, types and the way out of an error nothing is asserted.
UNCHANGED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
WORDS = {"warn", "warning", "error", "fail", "print", "add_argument", "Field", "cast", "TypeVar"}
HARMLESS = ("strict=", "dtype=", "num_warps", "TYPE_CHECKING", "precision=", "name=")
OUTCOMES = {0: "not found", 4: "not run", 5: "not run"}  # by pytest's status: 4 if a test has another name now
ON_GPUS = ("_kernel.py", "_kernels.py", "_triton.py", "transformer_engine.py")


class Planted(NamedTuple):
    constant: str  # the name of the module's that it changes, if it does
    file: str
    line: int
    statement: int  # its first line
    start: int  # bytes of the file
    end: int
    old: str
    new: str

    def into(self, data: bytes) -> bytes:
        """The file with the error."""
        return data[: self.start] + self.new.encode() + data[self.end :]

    def is_another_program(self) -> bool:
        data = (ROOT / self.file).read_bytes()
        try:
            return ast.dump(ast.parse(self.into(data))) != ast.dump(ast.parse(data))
        except SyntaxError:
            return False


class Planter(ast.NodeVisitor):
    """Collects the errors that can be planted in a file."""

    def __init__(self, path: Path):
        self.file, self.data, self.found = path.relative_to(ROOT).as_posix(), path.read_bytes(), list[Planted]()
        lengths = (len(line) for line in self.data.splitlines(keepends=True))
        self.starts, self.statement, self.depth, self.constant = [0], 0, 0, ""
        for length in lengths:
            self.starts.append(self.starts[-1] + length)
        self.visit(ast.parse(self.data))

    def place(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, *nodes: ast.expr | ast.stmt) -> str:
        return self.data[self.place(nodes[0])[0] : self.place(nodes[-1])[1]].decode()

    def plant(self, line: int, start: int, end: int, new: str) -> None:
        old = self.data[start:end].decode()
        if not any(word in old for word in HARMLESS):
            self.found.append(Planted(self.constant, self.file, line, self.statement, start, end, old, new))

    def instead(self, node: ast.expr | ast.stmt, new: str) -> None:
        self.plant(node.lineno, *self.place(node), new)

    def between(self, left: ast.expr, right: ast.expr, new: str) -> None:
        self.plant(left.lineno, self.place(left)[1], self.place(right)[0], new)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, UNCHANGED) or (isinstance(node, ast.Call) and _called(node) in WORDS):
            return
        outer = self.statement
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        self.depth += is_function
        if not self.depth and isinstance(node, ast.Assign | ast.AnnAssign):
            self.constant = _constant(node)
        if self.depth:
            self.plant_in(node)
        if self.depth or self.constant:
            self.plant_in_list(node)
        for child in _children(node):
            self.visit(child)
        self.depth -= is_function
        self.statement = outer
        if not self.depth and isinstance(node, ast.stmt):
            self.constant = ""

    def plant_in_list(self, node: ast.AST) -> None:
        """An entry is left out."""
        match node:
            case (
                ast.Tuple(elts=entries, ctx=ast.Load()) | ast.List(elts=entries, ctx=ast.Load()) | ast.Set(elts=entries)
            ):
                places = [self.place(entry) for entry in entries]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                both = zip(keys, values, strict=True)
                places = [(self.place(key)[0], self.place(value)[1]) for key, value in both if key is not None]
            case _:
                return
        if len(places) > 2:  # a pair has two meanings
            for (start, end), (after, _) in zip(places, [*places[1:], (places[-1][1], 0)], strict=True):
                self.plant(self.data.count(b"\n", 0, start) + 1, start, max(end, after), "")

    def plant_in(self, node: ast.AST) -> None:
        match node:
            case ast.Compare(ops=[op], comparators=[right]):
                self.between(node.left, right, f" {OTHER[type(op)]} ")
            case ast.BinOp() if type(node.op) in SIGNS and not _has_text(node):
                sign, other = SIGNS[type(node.op)]
                old = self.data[self.place(node.left)[1] : self.place(node.right)[0]].decode()
                self.between(node.left, node.right, old.replace(sign, other, 1))
            case ast.BoolOp(values=[first, *rest]):
                self.instead(node, self.text(first, *rest[:-1]))
                self.instead(node, self.text(*rest))
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                self.instead(node, f"({self.text(node.operand)})")
            case ast.IfExp():
                self.instead(node, f"({self.text(node.body)})")
                self.instead(node, f"({self.text(node.orelse)})")
            case ast.If() if not any(isinstance(each, ast.NamedExpr) for each in ast.walk(node.test)):
                self.instead(node.test, f"not ({self.text(node.test)})")
            case ast.AugAssign() | ast.Expr(value=ast.Call()):
                self.instead(node, "pass")
            case ast.comprehension():
                for condition in node.ifs:
                    self.instead(condition, "True")
            case ast.keyword(arg=str(), value=value) if not isinstance(value, ast.Constant):
                start, end = self.place(node)
                rest = self.data[end:]
                comma = len(rest) - len(rest.lstrip()) + 1 if rest.lstrip().startswith(b",") else 0
                self.plant(node.value.lineno, start, end + comma, "")


def _children(node: ast.AST) -> Iterable[ast.AST]:
    """Without types and decorators."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.body
        case ast.AnnAssign():
            return [node.value] if node.value is not None else []
    return ast.iter_child_nodes(node)


def _constant(node: ast.Assign | ast.AnnAssign) -> str:
    """The name in capitals that a statement gives a value."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) and target.id.isupper() else ""


def _used(node: ast.AST) -> str:
    """The name that an expression reads: of a variable, a field or an argument."""
    return getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or ""


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _has_text(node: ast.AST) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        for n in ast.walk(node)
    )


def environment_of(tree: Path) -> dict[str, str]:
    """That of tests in a copy of the checkout."""
    path = os.pathsep.join(str(tree / folder) for folder in ("", "tests/references", "dev"))
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def note_lines() -> int:
    """Run the suite, and write which tests reach each line."""
    shutil.rmtree(LINES, ignore_errors=True)
    LINES.mkdir(parents=True)
    environment = environment_of(ROOT) | {"LINES_OF_TESTS": str(LINES)}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "lines_of_tests", "-n", "2", "--dist", "loadfile"]
    status = subprocess.run(pytest, cwd=ROOT, env=environment, check=False).returncode
    if status > 1:  # it did not come to all tests, and an error that the others find would not count as found
        shutil.rmtree(LINES)
    return status


class Reached:
    """Which tests reach each line, as --lines noted it."""

    def __init__(self) -> None:
        self.reached, self.seconds = collections.defaultdict[str, set[str]](set), dict[str, float]()
        self.uses = collections.defaultdict[str, list[str]](list)  # of a name: "file:line"
        within = collections.defaultdict[str, set[str]](set)  # constants whose values have the constant
        for path in (ROOT / "megajax").rglob("*.py"):
            for statement in ast.parse(path.read_bytes()).body:
                own = _constant(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ""
                for node in ast.walk(statement):
                    if (name := _used(node)) and isinstance(node, ast.expr | ast.keyword):
                        self.uses[name].append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno}")
                        if name.isupper():
                            within[name] |= {own} - {name, ""}
        for name, others in within.items():
            self.uses[name] += [line for other in others for line in self.uses[other]]
        for file in LINES.glob("*.json"):
            found = json.loads(file.read_text(encoding="utf-8"))
            self.seconds |= found["seconds"]
            for line, tests in found["reached"].items():
                self.reached[line] |= {*tests}

    def tests_of(self, file: str, lines: Iterable[int], most: float, *names: str) -> tuple[list[str], float]:
        """The tests that reach a line, or one with a name, those of the module first, and their seconds."""
        places = [*(f"{file}:{line}" for line in lines), *(place for name in names for place in self.uses[name])]
        folder, stem = Path(file).parts[1], Path(file).stem

        def cost(test: str) -> float:
            return (self.seconds[test] + 0.3) * (0.3 if folder in test else 1) * (0.5 if stem in test else 1)

        chosen, total = list[str](), 0.0
        for test in sorted({test for place in places for test in self.reached[place]}, key=cost):
            if not chosen or total + self.seconds[test] <= most:
                chosen.append(test)
                total += self.seconds[test]
        return chosen, total


def drawn(seed: int, most: float, constants: bool) -> Iterator[tuple[Planted, list[str], float]]:
    """Errors at lines drawn at random, one a line, each with the tests to run and their seconds."""
    reached = Reached()
    files = [path for path in sorted((ROOT / "megajax").rglob("*.py")) if not path.name.endswith(ON_GPUS)]
    errors, seen = [error for path in files for error in Planter(path).found], set[tuple[str, int]]()
    errors = [error for error in errors if error.constant or not constants]
    random.Random(seed).shuffle(errors)
    for error in errors:
        tests, total = reached.tests_of(error.file, (error.line, error.statement), most, error.constant)
        place = error.file, error.start if error.constant else error.line
        if place in seen or not tests or not error.is_another_program():
            continue
        seen.add(place)
        yield error, tests[:150], total


def given(path: Path, most: float) -> list[tuple[Planted, list[str], float]]:
    """The errors of a JSON file, each with the tests that reach a line of what it changes, and their seconds."""
    reached, errors = Reached(), []
    for error in json.loads(path.read_text(encoding="utf-8")):
        data, old = (ROOT / error["file"]).read_bytes(), error["old"].encode()
        if data.count(old) != 1:
            raise SystemExit(f"{path}: {error['file']} has {data.count(old)} times {error['old']!r}; one is needed.")
        start = data.index(old)
        first = data.count(b"\n", 0, start) + 1
        lines = range(first, first + old.count(b"\n") + 1)
        tests, total = reached.tests_of(error["file"], lines, most, *_names_at(ast.parse(data).body, lines))
        planted = Planted("", error["file"], first, first, start, start + len(old), error["old"], error["new"])
        errors.append((planted, tests, total))
    return errors


def _names_at(body: Iterable[ast.stmt], lines: range) -> set[str]:
    """What the statements at the lines that run at import define: constants, fields, decorated functions, classes."""
    names = set[str]()
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() if node.lineno in lines or any(
                decorator.lineno in lines for decorator in node.decorator_list
            ):
                names.add(node.name)
            case ast.ClassDef() if within := _names_at(node.body, lines):
                names |= within if any(not name.startswith("__") for name in within) else {node.name}
            case ast.Assign() | ast.AnnAssign() if {*range(node.lineno, (node.end_lineno or 0) + 1)} & {*lines}:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                names |= {target.id} if isinstance(target, ast.Name) else set()
    return names


def work(
    tree: Path,
    errors: Iterator[tuple[Planted, list[str], float]],
    counts: collections.Counter[str],
    lock: threading.Lock,
    end: float,
) -> None:
    """Plant errors in a copy of the checkout until the time is up."""
    while time.monotonic() < end:
        with lock:
            if (drawn_or_given := next(errors, None)) is None:
                return
        error, tests, seconds = drawn_or_given
        if not tests:
            with lock:
                counts["not reached"] += 1
                print(f"{error.file}:{error.line}: {error.old!r} -> {error.new!r} (no test reaches it)", flush=True)
            continue
        file, arguments = tree / error.file, tree / "tests.txt"
        data = file.read_bytes()
        file.write_bytes(error.into(data))
        arguments.write_text("\n".join(tests), encoding="utf-8")
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"@{arguments}"]
        process = subprocess.Popen(
            pytest,
            cwd=tree,
            env=environment_of(tree),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(60 + 4 * seconds)
        except subprocess.TimeoutExpired:  # found: it never ends
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        file.write_bytes(data)
        with lock:
            counts[OUTCOMES.get(status, "found")] += 1
            if status == 0:
                print(f"{error.file}:{error.line}: {error.old!r} -> {error.new!r} ({len(tests)} tests)", flush=True)


def main() -> int:
    """Plant errors until the time is up, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true", help="note which tests reach each line")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--constants", action="store_true", help="only missing entries of the modules' constants")
    parser.add_argument("--errors", type=Path, metavar="FILE", help="plant these errors, once each")
    parser.add_argument("--seconds", type=float, default=3000.0, help="how long errors are planted (default: 3000)")
    parser.add_argument("--most", type=float, default=60.0, help="seconds of tests for an error (default: 60)")
    parser.add_argument("--workers", type=int, default=2, help="errors at the same time (default: 2)")
    parser.add_argument("--trees", type=Path, default=TREES, help=f"a folder for copies of the checkout ({TREES})")
    options = parser.parse_args()
    if options.lines:
        return note_lines()
    if not any(LINES.glob("*.json")):
        print("which tests reach a line is not known: run this with --lines first.", file=sys.stderr)
        return 2
    trees = [options.trees / str(number) for number in range(options.workers)]
    for tree in trees:
        shutil.rmtree(tree, ignore_errors=True)
        subprocess.run(["git", "clone", "-q", ROOT, tree], check=True)
    counts, lock = collections.Counter[str](), threading.Lock()
    seeded = drawn(options.seed, options.most, options.constants)
    errors = iter(given(options.errors, options.most)) if options.errors else seeded
    end = time.monotonic() + options.seconds
    threads = [threading.Thread(target=work, args=(tree, errors, counts, lock, end)) for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
