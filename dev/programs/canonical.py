"""The canonical text of a lowered program: equal for programs whose operations, order, shapes and shardings are equal.

Calls are inlined, constants are written where they are used, values are numbered in the order of their first use, and
operations without an effect are left out. What a loop carries, and what goes in and out of a program, a shard_map and
a barrier, is sorted by these numbers. So names, the cut into functions, and the order of arguments and of the arrays in
a dictionary do not count.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megajax.jax_internals import ir

LONG = 200  # characters; a longer attribute is written as its hash
NAMING = {"jax.result_info", "jax.arg_info", "callee", "sym_name", "sym_visibility"}  # attributes with Python's names
FOLDED = {"stablehlo.broadcast_in_dim", "stablehlo.iota", "stablehlo.convert", "stablehlo.reshape"}  # of constants
BARRIER, CASE, IF = "stablehlo.optimization_barrier", "stablehlo.case", "stablehlo.if"
WHILE, LOCAL = "stablehlo.while", "sdy.manual_computation"
Value = int | str  # a number, or the text of a constant
Column = tuple[tuple[Value, ...], str]  # values that belong together, and their type


@dataclass(eq=False)
class Line:
    """An operation: its name and attributes, the values that it uses and defines, their types, and its regions."""

    name: str
    attributes: dict[str, str]
    uses: list[Value]
    defines: list[Value]
    use_types: list[str]  # of shard_map's: shardings
    types: list[str]
    blocks: list["Block"]
    has_effect: bool

    def columns(self) -> list[Column] | None:
        """The values of an operation whose operands may stand in any order; None: the order counts."""
        returned, taken = [each.returns for each in self.blocks], [each.arguments for each in self.blocks]
        if self.name == WHILE:
            return _columns(self.types, self.uses, *taken, returned[1], self.defines)
        if self.name == BARRIER:
            return _columns(self.types, self.uses, self.defines)
        if self.name in (CASE, IF):
            return _columns(self.types, *returned, self.defines)
        if self.name == LOCAL:
            return _columns(self.use_types, self.uses, *taken) + _columns(self.types, *returned, self.defines)
        return None

    def remove_unused(self, used: set[int], of_results: bool) -> None:
        """Remove the results, or the operands, of a shard_map or a choice that are not in `used`."""
        values = self.defines if of_results else self.blocks[0].arguments
        kept = [index for index, value in enumerate(values) if value in used]
        own = "returns" if of_results else "arguments"
        for block in self.blocks:
            setattr(block, own, [getattr(block, own)[index] for index in kept])
        for name in ("defines", "types") if of_results else ("uses", "use_types"):
            setattr(self, name, [getattr(self, name)[index] for index in kept])


@dataclass(eq=False)
class Block:
    """A region."""

    arguments: list[Value]
    lines: list[Line]
    returns: list[Value]


def canonical_text(module: ir.Module) -> str:
    """The text of a module with a public function `main`."""
    return "\n".join(_Reader(module).main()) + "\n"


def function_count(module: ir.Module) -> int:
    """The functions of a module. XLA inlines them, so their number changes only the time to lower and to compile."""
    return sum(op.operation.name == "func.func" for op in module.body.operations)


class _Reader:
    """A module, read once: its functions, meshes and the texts of attributes."""

    def __init__(self, module: ir.Module):
        operations = [op.operation for op in module.body.operations]
        self._functions = {_name(op): op for op in operations if op.name == "func.func"}
        meshes = {_name(op): str(op.attributes["mesh"]) for op in operations if op.name == "sdy.mesh"}
        self._meshes = dict.fromkeys(meshes.values())  # jax may declare one mesh by several names
        self._symbols = {name: f"mesh_{[*self._meshes].index(mesh)}" for name, mesh in meshes.items()}
        self._texts = dict[Any, str]()
        self._fresh = itertools.count()
        self._values = dict[Any, Value]()  # a function's values are those of its last call

    def main(self) -> Iterator[str]:
        """The lines of the program."""
        function = self._functions["main"]
        block = self._block(function.regions[0].blocks[0])
        _remove_dead(block.lines, {value for value in block.returns if isinstance(value, int)})
        numbers = _Numbers()
        body = list(numbers.lines(block.lines, "  "))
        given, returned = self._attributes(function, "arg_attrs"), self._attributes(function, "res_attrs")
        results = [numbers.name(value) for value in block.returns]
        arguments = list[tuple[float, str]]()
        types = (self._text(each.type) for each in function.regions[0].blocks[0].arguments)
        for value, kind, own in zip(block.arguments, types, given, strict=True):
            if "tf.aliasing_output" in own:
                own["tf.aliasing_output"] = results[int(own["tf.aliasing_output"].split()[0])]
            name = numbers.name(value) if value in numbers.of else "unused"
            arguments.append((numbers.of.get(value, float("inf")), f"  argument {name}: {kind} {_dictionary(own)}"))
        yield from (f"mesh_{index} = {mesh}" for index, mesh in enumerate(self._meshes))
        yield from (line for _, line in sorted(arguments))
        yield from body
        outputs = zip(block.returns, results, returned, strict=True)
        found = sorted(
            (numbers.of.get(value, -1), f"  result {name} {_dictionary(own)}") for value, name, own in outputs
        )
        yield from (line for _, line in found)

    def _attributes(self, function: Any, name: str) -> list[dict[str, str]]:
        """Those of each argument or result."""
        if name not in function.attributes:
            kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
            return [{} for _ in (kind.inputs if name == "arg_attrs" else kind.results)]
        values = [ir.DictAttr(each) for each in ir.ArrayAttr(function.attributes[name])]
        return [self._texts_of({each.name: each.attr for each in own}) for own in values]

    def _texts_of(self, attributes: dict[str, Any]) -> dict[str, str]:
        return {name: self._text(attributes[name]) for name in sorted(attributes.keys() - NAMING)}

    def _text(self, value: Any) -> str:
        """The text of a type or an attribute."""
        if value not in self._texts:
            self._texts[value] = re.sub(r"@(\w+)", lambda match: f"@{self._symbol(match[1])}", str(value))
        return self._texts[value]

    def _symbol(self, name: str) -> str:
        """The canonical name of a mesh, or of a function that an attribute names."""
        if name not in self._symbols and name in self._functions:
            block = self._block(self._functions[name].regions[0].blocks[0])
            self._symbols[name] = f"function_{_hash(chr(10).join(_Numbers().block(block, '')))}"
        return self._symbols.get(name, name)

    def _block(self, block: Any) -> Block:
        arguments, lines = self._define(block.arguments), self._lines(block)
        return Block(arguments, lines, lines.pop().uses)

    def _define(self, values: Iterable[Any]) -> list[Value]:
        values = list(values)
        self._values |= {value: next(self._fresh) for value in values}
        return [self._values[value] for value in values]

    def _lines(self, block: Any) -> list[Line]:
        """The operations of a block in order, those of the functions that it calls in place of the calls."""
        lines = list[Line]()
        for view in block.operations:
            op = view.operation
            if op.name == "stablehlo.constant":
                self._values[op.results[0]] = _short(self._text(op.attributes["value"]))
            elif op.name in FOLDED and all(isinstance(self._values[operand], str) for operand in op.operands):
                self._values[op.results[0]] = _short(_Numbers().call(self._line(op)))
            elif op.name == "func.call":
                body = self._functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value].regions[0].blocks[0]
                passed = [self._values[operand] for operand in op.operands]
                self._values |= dict(zip(body.arguments, passed, strict=True))
                own = self._lines(body)
                self._values |= dict(zip(op.results, own.pop().uses, strict=True))
                lines += own
            else:
                lines.append(self._line(op))
        return lines

    def _line(self, op: Any) -> Line:
        uses = [self._values[operand] for operand in op.operands]
        blocks = [self._block(block) for region in op.regions for block in region.blocks]
        attributes = self._texts_of({name: op.attributes[name] for name in op.attributes})
        nested = any(line.has_effect for block in blocks for line in block.lines)
        has_effect = nested or attributes.get("has_side_effect") == "true"
        of_uses, of_results = ([self._text(value.type) for value in values] for values in (op.operands, op.results))
        if op.name == LOCAL:
            of_uses, of_results = _each(attributes.pop("in_shardings")), _each(attributes.pop("out_shardings"))
        return Line(op.name, attributes, uses, self._define(op.results), of_uses, of_results, blocks, has_effect)


class _Numbers:
    """Gives values their numbers in the order of first use, and writes lines with them."""

    def __init__(self):
        self.of = dict[Value, int]()

    def name(self, value: Value) -> str:
        """`%number`, or the constant."""
        return value if isinstance(value, str) else f"%{self.of.setdefault(value, len(self.of))}"

    def names(self, values: Iterable[Value]) -> str:
        """Names with commas."""
        return ", ".join(map(self.name, values))

    def call(self, line: Line) -> str:
        """An operation without its results and regions."""
        return f"{line.name}({self.names(line.uses)}) {_dictionary(line.attributes)} : {', '.join(line.types)}"

    def lines(self, lines: list[Line], indent: str) -> Iterator[str]:
        """The text of some operations."""
        for line in lines:
            columns = line.columns()
            if columns is None:
                yield f"{indent}{self.names(line.defines)} = {self.call(line)}"
                for block in line.blocks:
                    yield from self.block(block, indent + "  ")
                continue
            choice = f"({self.names(line.uses)})" if line.name in (CASE, IF) else ""
            yield f"{indent}{line.name}{choice} {_dictionary(line.attributes)}"
            for block in line.blocks:
                yield f"{indent}  region"
                yield from self.lines(block.lines, indent + "    ")
            if line.name == WHILE:
                yield f"{indent}  while {self.names(line.blocks[0].returns)}"
            columns.sort(key=self._position)
            yield from (f"{indent}  {self.names(values)} : {kind}" for values, kind in columns)

    def _position(self, column: Column) -> tuple[list[float], str, str]:
        values, kind = column
        constants = ", ".join(value for value in values if isinstance(value, str))
        return [self.of.get(value, float("inf")) for value in values], kind, constants

    def block(self, block: Block, indent: str) -> Iterator[str]:
        """The text of a region whose arguments have an order."""
        yield f"{indent}region({self.names(block.arguments)})"
        yield from self.lines(block.lines, indent + "  ")
        yield f"{indent}  return {self.names(block.returns)}"


def _remove_dead(lines: list[Line], used: set[int]) -> None:
    """Remove what has neither an effect nor a used result; `used`: the values that later lines use, which grows."""
    kept = list[Line]()
    for line in reversed(lines):
        if not line.has_effect and not used.intersection(line.defines):
            continue
        if line.name in (CASE, IF, LOCAL):
            line.remove_unused(used, of_results=True)
        for block in line.blocks:
            used.update(value for value in block.returns if isinstance(value, int))
            _remove_dead(block.lines, used)
        if line.name == LOCAL:
            line.remove_unused(used, of_results=False)
        used.update(value for value in line.uses if isinstance(value, int))
        kept.append(line)
    lines[:] = reversed(kept)


def _columns(types: list[str], *values: list[Value]) -> list[Column]:
    return list(zip(zip(*values, strict=True), types, strict=True))


def _each(shardings: str) -> list[str]:
    """`#sdy.sharding_per_value<[<@mesh, ...>, <@mesh, ...>]>` → the text of each."""
    inner = shardings[shardings.index("[") + 1 : shardings.rindex("]")]
    return re.split(r"(?<=>), (?=<@)", inner) if inner else []


def _dictionary(attributes: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name} = {_short(text)}" for name, text in attributes.items()) + "}"


def _short(text: str) -> str:
    return text if len(text) <= LONG else f"hash {_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(op: Any) -> str:
    return ir.StringAttr(op.attributes["sym_name"]).value
