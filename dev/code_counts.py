"""Size and shape of the code: `python -m dev.code_counts [ROOT]`.

Prints the statements of each folder (by AST, without docstrings), functions above LINES lines or PARAMETERS parameters
(without self), cycles of modules that import each other, and public names of classes that two modules define.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDERS, PACKAGE = ("megajax", "scripts", "dev"), "megajax"
LINES, PARAMETERS = 60, 7
Graph = Mapping[str, set[str]]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main(arguments: list[str]) -> int:
    """Print the counts; the exit status."""
    root = Path(arguments[0] if arguments else Path(__file__).parents[1])
    trees = {
        path.relative_to(root): ast.parse(path.read_bytes()) for folder in FOLDERS for path in _files(root / folder)
    }
    statements, files = Counter[str](), Counter[str]()
    for path, tree in trees.items():
        folder = "/".join(path.parts[:-1][:2])
        statements[folder] += sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(tree))
        files[folder] += 1
    print(f"{'folder':<24}{'files':>6}{'statements':>12}")
    for folder in sorted(statements):
        print(f"{folder:<24}{files[folder]:>6}{statements[folder]:>12,}")
    print(f"{'all':<24}{files.total():>6}{statements.total():>12,}")
    functions = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    _print(f"functions of more than {LINES} lines", _large(functions, LINES, _lines))
    _print(f"functions of more than {PARAMETERS} parameters", _large(functions, PARAMETERS, _parameters))
    modules = {_module(path): tree for path, tree in trees.items() if path.parts[0] == PACKAGE}
    graph = {name: set(_imports(tree, modules)) - {name} for name, tree in modules.items()}
    _print("cycles of modules", [f"{len(each)}: {', '.join(each)}" for each in cycles(graph)])
    repeated = [f"{name}: {', '.join(own)}" for name, own in repeated_classes(modules).items()]
    _print("public classes of one name", repeated)
    return 0


def repeated_classes(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """The public names of classes that several modules define, with these modules."""
    places = defaultdict[str, list[str]](list)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    return {name: own for name, own in sorted(places.items()) if len(own) > 1}


def cycles(graph: Graph) -> list[list[str]]:
    """The groups of modules that all lead to each other, the largest first."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return sorted((list(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def _reached(graph: Graph, start: str) -> set[str]:
    found, ahead = set[str](), [start]
    while ahead:
        for name in graph[ahead.pop()] - found:
            found.add(name)
            ahead.append(name)
    return found


def _imports(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """The modules of the package that a module imports, in functions too, but not for type checkers."""
    ahead: list[ast.AST] = [tree]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                if inner in modules or node.module in modules:
                    yield inner if inner in modules else node.module
        ahead += ast.iter_child_nodes(node)


def _large(functions: list, limit: int, measure) -> list[str]:
    found = sorted(((measure(node), str(path), node.name) for path, node in functions), reverse=True)
    return [f"{size} {path} {name}" for size, path, name in found if size > limit]


def _lines(function: ast.FunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def _parameters(function: ast.FunctionDef) -> int:
    own = function.args
    names = [each.arg for each in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg) if each]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _print(title: str, lines: list[str]) -> None:
    print(f"\n{title}: {len(lines)}")
    for line in lines:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
