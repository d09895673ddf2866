"""The operations that a compiled module launches, from its text (`compiled.as_text()`): one Op per kernel or call.

A fused computation is one Op, its fusion. Loops are entered: an operation in a loop is one Op, for any number of
iterations.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")
# Instructions that launch no kernel.
SILENT = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id")
# Instructions that move data and compute nothing.
MOVES = {"copy", "transpose", "reshape", "slice", "dynamic-slice", "concatenate", "pad", "reverse"}

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^  (?:ROOT )?%([\w.-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
CALLERS = ("while", "call", "conditional")
CALLED = re.compile(r"\b(body|condition|to_apply|\w+_computations?)=\{?(%[\w.-]+(?:, %[\w.-]+)*)")


@dataclass(frozen=True)
class Array:
    """An array's dtype, in XLA's spelling, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or ["0"])[0])
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True)
class Instruction:
    """A line of the text."""

    name: str
    kind: str  # the opcode
    result: str  # its type
    operands: tuple[str, ...]  # by name
    attributes: str


@dataclass(frozen=True)
class Op:
    """An operation on the device. An asynchronous operation is represented by its start."""

    name: str  # as traces name it in `hlo_op`
    kind: str  # the opcode, without -start
    results: tuple[Array, ...]
    operands: tuple[Array, ...]
    attributes: str  # the rest of the line
    loops: int  # while loops around it
    fused: frozenset[str]  # opcodes inside a fusion that do something
    traffic: int  # bytes read and written; of an operand that is sliced, or updated in place, the part concerned
    inner: str = ""  # the name of a library call inside a fusion: traces may have either

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return found[1] if (found := re.search(r'custom_call_target="([^"]*)"', self.attributes)) else ""

    @property
    def scopes(self) -> tuple[str, ...]:
        """jax's name stack, outermost first, without the transformations: `jvp(mlp)` is `mlp`."""
        found = re.search(r'op_name="(jit\([^"]*)"', self.attributes)
        return tuple(re.sub(r".*\(|\)", "", part) for part in found[1].split("/")) if found else ()

    @property
    def only_moves(self) -> bool:
        """Whether it only copies or transposes."""
        return self.kind in MOVES or (self.kind == "fusion" and bool(self.fused) and self.fused <= MOVES)

    @property
    def only_converts(self) -> bool:
        """Whether it only changes the dtype."""
        kinds = self.fused if self.kind == "fusion" else {self.kind}
        return "convert" in kinds and kinds <= MOVES | {"convert"}

    @property
    def result_bytes(self) -> int:
        return sum(array.bytes for array in self.results)

    @property
    def operand_bytes(self) -> int:
        return sum(array.bytes for array in self.operands)

    @property
    def mesh_axes(self) -> tuple[dict[str, int], list[str]] | None:
        """(the size of each axis of the mesh, the axes of a collective); None if the text lists its devices."""
        found = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", self.attributes)
        if not found:
            return None
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        return sizes, re.findall(r"\w+", found[2])

    @property
    def group_size(self) -> int:
        """Number of devices of a collective."""
        if self.mesh_axes:
            sizes, axes = self.mesh_axes
            return math.prod(sizes[axis] for axis in axes)
        if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", self.attributes):
            return int(iota[1])
        listed = re.search(r"replica_groups=\{\{([\d,]*)\}", self.attributes)
        return len(listed[1].split(",")) if listed else 1

    def axes_of(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh of `sizes`, outermost first, that a collective communicates over."""
        if self.mesh_axes:
            return tuple(axis for axis in sizes if axis in self.mesh_axes[1] and sizes[axis] > 1)
        devices = math.prod(sizes.values())
        groups = self._groups or [list(range(devices))]
        if max(map(max, groups)) >= devices:
            return ()
        changing: set[int] = set()
        for group in groups:
            positions = np.unravel_index(group, list(sizes.values()))
            changing |= {i for i, along in enumerate(positions) if len(set(along.tolist())) > 1}
        return tuple(axis for i, axis in enumerate(sizes) if i in changing)

    @property
    def _groups(self) -> list[list[int]]:
        """The devices of each group of a collective, or of each pair of a permutation; empty if the text has none."""
        if self.mesh_axes:
            sizes, names = self.mesh_axes
            axes = [list(sizes).index(axis) for axis in names]
            devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
            return np.moveaxis(devices, axes, range(-len(axes), 0)).reshape(-1, self.group_size).tolist()
        if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", self.attributes):
            shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
            assert dims is not None
            return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
        listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", self.attributes)
        found = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else []
        return [[int(number) for number in group.split(",")] for group in found]

    def between_hosts(self, hosts_of: int) -> float:
        """Bytes that a host of `hosts_of` devices sends to others in a gather or a reduction; 0 for other operations.

        A group of n devices that is on several hosts forms a ring, so each of its hosts sends (n − 1)/n of the whole
        array, twice that for an all-reduce. Devices are numbered host by host.
        """
        passes = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}.get(self.kind, 0)
        hosts = ({device // hosts_of for device in group} for group in self._groups)
        sending = sum(1 for own in hosts if 0 in own and len(own) > 1)  # groups of host 0
        whole = max(self.operand_bytes, self.result_bytes)
        return sending * passes * whole * (self.group_size - 1) / self.group_size


def parse(text: str) -> list[Op]:
    """All operations that a module launches, in the order of its text."""
    computations, entry = _computations(text)
    ops: list[Op] = []

    def visit(name: str, loops: int) -> None:
        table = computations[name]
        for line in table.values():
            for role, called in CALLED.findall(line.attributes) if line.kind in CALLERS else ():
                for name in re.findall(r"%([\w.-]+)", called):
                    visit(name, loops + (role == "body"))
            if line.kind not in SILENT and not line.kind.endswith(("-done", "-update")):
                ops.append(_op(line, table, computations, loops))

    visit(entry, 0)
    return ops


def _computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Instructions by name, by computation; and the name of the entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if start := COMPUTATION.match(line):
            current = start[2]
            entry = current if start[1] else entry
            computations[current] = {}
        elif match := INSTRUCTION.match(line):
            result, _, rest = _split_type(match[2])
            kind, _, rest = rest.partition("(")
            operands, _, attributes = rest.partition(")")
            names = tuple(re.findall(r"%([\w.-]+)", operands))
            computations[current][match[1]] = Instruction(match[1], kind, result, names, attributes)
    return computations, entry


def _split_type(text: str) -> tuple[str, str, str]:
    """`(f32[2], s32[]) tuple(...)` → the type, a space, the rest."""
    if not text.startswith("("):
        return text.partition(" ")
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[: i + 1], " ", text[i + 2 :]
    raise ValueError(f"a type without an end: {text}")


def _arrays(type_text: str) -> tuple[Array, ...]:
    return tuple(Array(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in ARRAY.findall(type_text))


def _results(line: Instruction) -> tuple[Array, ...]:
    """The results' type of a start, whose type is `(operands, results, ...)`."""
    if not (line.kind.endswith("-start") and line.result.startswith("(")):
        return _arrays(line.result)
    parts, depth = [""], 0
    for character in line.result[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return _arrays(parts[0 if line.kind == "copy-start" else 1])


def _op(line: Instruction, table: dict, computations: dict, loops: int) -> Op:
    """The operation of an instruction; `table` holds its computation's."""
    kind = line.kind.removesuffix("-start")
    fusion = re.search(r"\bcalls=%([\w.-]+)", line.attributes) if kind == "fusion" else None
    if not fusion:
        # Treated as a fusion of one instruction, with its operands as parameters.
        inside = {name: replace(table[name], kind="parameter", operands=()) for name in line.operands}
        inside[line.name] = line
    else:
        inside = computations[fusion[1]]
        for inner in inside.values():
            if inner.kind.removesuffix("-start") in ("custom-call", *COLLECTIVES):  # on a slice, without a copy of it
                return replace(_op(inner, inside, computations, loops), name=line.name, inner=inner.name)
    results = _results(line)
    operands = tuple(array for name in line.operands for array in _arrays(table[name].result))
    fused = frozenset(i.kind for i in inside.values() if i.kind not in SILENT) if fusion else frozenset()
    read = sum(_read(source, inside) for source in inside.values() if source.kind == "parameter")
    return Op(line.name, kind, results, operands, line.attributes, loops, fused, read + _written(results, inside))


# Kinds that change part of their first operand in place, and the operand with the size of that part.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
READS_OF_A_PART = ("dynamic-slice", "slice", "gather")


def _read(source: Instruction, inside: dict[str, Instruction]) -> int:
    """Bytes read of an operand: all, unless it is only sliced or updated."""
    total = 0
    for user in inside.values():
        if source.name not in user.operands:
            continue
        if user.kind == "bitcast":
            total += _read(user, inside)
        elif user.kind in READS_OF_A_PART and user.operands[0] == source.name:
            total += _bytes(user)
        elif not (user.kind in UPDATES and user.operands[0] == source.name):
            return _bytes(source)
    return min(total, _bytes(source))


def _written(results: Sequence[Array], inside: dict[str, Instruction]) -> int:
    """Bytes written of the results; for an update in place only those of the part."""
    sizes = [array.bytes for array in results]
    for line in inside.values():
        if line.kind in UPDATES and _bytes(line) in sizes:
            sizes[sizes.index(_bytes(line))] = _bytes(inside[line.operands[UPDATES[line.kind]]])
    return sum(sizes)


def _bytes(line: Instruction) -> int:
    return sum(array.bytes for array in _arrays(line.result))
