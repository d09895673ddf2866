"""How a parameter of megajax corresponds to tensors of a Hugging Face model.

A pattern in the notation of einops, such as `(heads head) embed -> embed heads head`, says how the dimensions of one
tensor become those of the parameter; `()` is a dimension of length 1. Read from right to left it is the way back. So
each entry of a family's table is its own inverse, and a slice of a parameter is read from the slice of a tensor that
holds it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.config import ModelConfig
from megajax.hf.defaults import Json
from megajax.hf.folder import text_names
from megajax.hf.quantised import Slices
from megajax.layout.kinds import stacked_layers
from megajax.sharding import ENCODER, VISION


class Selected(NamedTuple):
    """The numbers of a tensor's axis that a parameter has, in the parameter's order."""

    axis: str  # its name in the pattern
    indices: tuple[int, ...]
    length: int  # of the axis in the tensor


@dataclass(frozen=True)
class Tensor:
    """One parameter, or one layer's and expert's part of it, and the tensor that holds it.

    `ours` is a parameter's name, or that of a layer's state (`model.block.state_by_name`). `theirs` may contain {layer}
    and {expert}: then each layer of the parameter's first dimension, and each expert of the second, is a tensor of its
    own.
    """

    ours: str
    theirs: str
    pattern: str = ""  # "" if all dimensions agree
    fused: int | None = None  # the dimension of the tensor that several parameters share
    start: int = 0  # where this one begins in it
    step: int = 1  # from one of its indices to the next: 1 if the parameters are side by side, else they take turns
    selected: Selected | None = None  # None: the parameter has its axes of the tensor whole and in the same order
    first_layer: int = 0  # the model's layer that is the tensors' {layer} 0
    factor: float = 1.0  # the parameter's numbers are the tensor's times this

    @property
    def stacked(self) -> int:
        """How many leading dimensions of the parameter are spread over tensors."""
        return ("{layer}" in self.theirs) + ("{expert}" in self.theirs)

    @property
    def dimensions(self) -> int:
        """Those of the tensor, if it has a pattern."""
        return len(self._axes[0])

    @cached_property
    def _axes(self) -> tuple[list[list[str]], list[str]]:
        """(their dimensions, each a list of axes; our axes)."""
        left, right = self.pattern.split("->")
        groups: list[list[str]] = []
        inside = False
        for word in left.replace("(", " ( ").replace(")", " ) ").split():
            if word == "(":
                groups.append([])
            if word in "()":
                inside = word == "("
            elif inside:
                groups[-1].append(word)
            else:
                groups.append([word])
        return groups, right.split()

    @property
    def _whole(self) -> set[str]:
        """The axes that are read whole: a block of a tensor is cut along the first axis of a dimension only."""
        inner = {axis for group in self._axes[0] for axis in group[1:]}
        return inner | ({self.selected.axis} if self.selected else set())

    def _sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """The lengths of the axes in the tensor, for the parameter's `shape` without its stacked dimensions."""
        sizes = dict(zip(self._axes[1], shape, strict=True))
        return sizes | ({self.selected.axis: self.selected.length} if self.selected else {})

    @property
    def leading_axis(self) -> int:
        """The parameter's dimension, without the stacked ones, along which a tensor is cut; the outermost if possible.

        A selected axis is not cut, unless there is no other: then each piece reads all of it.
        """
        if not self.pattern:
            return 0
        groups, ours = self._axes
        first = [group[0] for group in groups if group]
        return ours.index(next((axis for axis in first if axis not in self._whole), first[0]))

    def without_starts(self, wanted: Slices) -> Slices:
        """`wanted` for `to_ours`, the same for all blocks of one shape."""
        ours, whole = (self._axes[1], self._whole) if self.pattern else ([], set())
        return tuple(
            s if i < len(ours) and ours[i] in whole else slice(0, s.stop - s.start) for i, s in enumerate(wanted)
        )

    @property
    def conversion(self) -> "Tensor":
        """What `to_ours` and `multiplied` depend on: the same for tensors that one program can convert."""
        return Tensor("", "", self.pattern, selected=self.selected, factor=self.factor)

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this part of a tensor, for the parameter's `shape` without its stacked dimensions.

        With `selected`, other parameters' numbers may be between this one's.
        """
        if not self.pattern:
            return tuple(shape)
        sizes = self._sizes(shape)
        return tuple(math.prod(sizes[axis] for axis in group) for group in self._axes[0])

    def their_slices(self, shape: Sequence[int], wanted: Slices) -> Slices:
        """The smallest block of the tensor that holds the slices `wanted` of the parameter, with axes read whole."""
        if not self.pattern:
            slices = list(wanted)
        else:
            (groups, ours), sizes = self._axes, self._sizes(shape)
            want = dict(zip(ours, wanted, strict=True)) | {axis: slice(0, sizes[axis]) for axis in self._whole}
            slices = []
            for group in groups:
                size = math.prod(sizes[axis] for axis in group[1:])
                own = want[group[0]] if group else slice(0, 1)
                slices.append(slice(own.start * size, own.stop * size))
        if self.fused is not None:
            slices[self.fused] = self.in_fused(slices[self.fused])
        return tuple(slices)

    def in_fused(self, rows: slice) -> slice:
        """A slice of this part in the dimension that it shares with others."""
        first = self.start + rows.start * self.step
        return slice(first, first + (rows.stop - rows.start - 1) * self.step + 1, self.step)

    def to_ours(self, block: Any, shape: Sequence[int], wanted: Slices) -> Any:
        """A block of the tensor (NumPy or jax), as `their_slices` names it → the slices `wanted` of the parameter."""
        if not self.pattern:
            return block
        (groups, ours), sizes, whole = self._axes, self._sizes(shape), self._whole
        want = dict(zip(ours, wanted, strict=True))
        lengths = {axis: sizes[axis] if axis in whole else want[axis].stop - want[axis].start for axis in ours}
        flat = [axis for group in groups for axis in group]
        block = block.reshape([lengths[axis] for axis in flat]).transpose([flat.index(axis) for axis in ours])
        if self.selected is not None:
            axis = self.selected.axis
            block = block.take(np.array(self.selected.indices[want[axis]]), ours.index(axis))
            whole.remove(axis)
        return block[tuple(want[axis] if axis in whole else slice(None) for axis in ours)]

    def put(self, tensor: np.ndarray, array: np.ndarray) -> None:
        """Write the parameter `array`, or one layer's and expert's part, into its numbers of the whole `tensor`."""
        if self.fused is not None:
            rows = slice(0, self.their_shape(array.shape)[self.fused])
            tensor = tensor[(slice(None),) * self.fused + (self.in_fused(rows),)]
        if not self.pattern:
            tensor[...] = array
            return
        (groups, ours), sizes = self._axes, self._sizes(array.shape)
        flat = [axis for group in groups for axis in group]
        parts = tensor.reshape([sizes[axis] for axis in flat], copy=False)
        indices = {self.selected.axis: np.array(self.selected.indices)} if self.selected else {}
        part = tuple(indices.get(axis, slice(None)) for axis in flat)
        parts[part] = array.transpose([ours.index(axis) for axis in flat])

    def multiplied(self, block: Any) -> Any:
        """Numbers of the tensor → the parameter's: FP32, unless they are the same."""
        return block if self.factor == 1 else block.astype(np.float32) * np.float32(self.factor)

    def divided(self, array: np.ndarray) -> np.ndarray:
        """Numbers of the parameter → the tensor's."""
        return array if self.factor == 1 else np.divide(array, self.factor, dtype=np.float32)

    def as_in_folder(self, array: np.ndarray, block: np.ndarray) -> np.ndarray:
        """`divided`, and the numbers of `block` where these give the array's: in FP32 a product may not divide back."""
        if self.factor == 1:
            return array
        return np.where(array == self.multiplied(block), block.astype(np.float32), self.divided(array))


def with_factors(tensors: Sequence[Tensor], factors: Mapping[str, float]) -> list[Tensor]:
    """Entries with factors by the parameters' names, those of layers by their names in a block: `mlp.down`."""
    names = (tensor.ours.split(".", 2)[2] if tensor.ours.startswith("blocks.") else tensor.ours for tensor in tensors)
    return [replace(tensor, factor=factors.get(name, 1.0)) for tensor, name in zip(tensors, names, strict=True)]


def tensor_names(tensor: Tensor, model: ModelConfig) -> dict[tuple[int, ...], str]:
    """The tensors of a parameter, by the indices (row, expert) of the dimensions that are spread over tensors."""
    if "{layer}" not in tensor.theirs:
        return {(): tensor.theirs}
    ours, own = tensor.ours, model
    for prefix, second in ((ENCODER, model.of_encoder), (VISION, model.of_vision)):
        if ours.startswith(prefix) and second is not None:
            ours, own = ours.removeprefix(prefix), second
    layers = stacked_layers(own)[ours.split(".")[1]]
    if "{expert}" not in tensor.theirs:
        return {(row,): tensor.theirs.format(layer=layer - tensor.first_layer) for row, layer in enumerate(layers)}
    return {
        (row, expert): tensor.theirs.format(layer=layer - tensor.first_layer, expert=expert)
        for row, layer in enumerate(layers)
        for expert in range(model.num_experts or 0)
    }


def tensors_by_name(entries: Sequence[Tensor], model: ModelConfig) -> dict[str, list[tuple[Tensor, tuple[int, ...]]]]:
    """By the name of a tensor its parts, each with its stacked indices in the parameter."""
    parts: dict[str, list[tuple[Tensor, tuple[int, ...]]]] = {}
    for tensor in entries:
        for at, name in tensor_names(tensor, model).items():
            parts.setdefault(name, []).append((tensor, at))
    return parts


def whole_shape(parts: Iterable[tuple[Tensor, Sequence[int]]]) -> tuple[int, ...]:
    """The shape of a tensor whose parts are those of parameters with these shapes, without stacked dimensions."""
    shape: list[int] = []
    for tensor, size in parts:
        part = tensor.their_shape(size)
        shape = shape or [*part]
        if tensor.fused is not None:
            shape[tensor.fused] = max(shape[tensor.fused], tensor.in_fused(slice(0, part[tensor.fused])).stop)
    return tuple(shape)


def assembled(parts: Sequence[tuple[Tensor, np.ndarray]]) -> np.ndarray:
    """The tensor whose parts these parameters are, together all of it."""
    out = np.empty(whole_shape((tensor, array.shape) for tensor, array in parts), parts[0][1].dtype)
    for tensor, array in parts:
        tensor.put(out, array)
    return out


def in_turns(theirs: str, dimension: int, parts: Sequence[str]) -> list[Tensor]:
    """Entries of parameters whose columns alternate along a dimension of one tensor."""
    return [Tensor(ours, theirs, "", dimension, start, len(parts)) for start, ours in enumerate(parts)]


def side_by_side(theirs: str, dimension: int, parts: Mapping[str, tuple[str, int]]) -> list[Tensor]:
    """Entries of parameters that share one tensor along a dimension: by name (pattern, length in that dimension)."""
    out, start = [], 0
    for ours, (pattern, length) in parts.items():
        out.append(Tensor(ours, theirs, pattern, dimension, start))
        start += length
    return out


class Family:
    """One family of models: how its config.json and its tensors correspond to megajax's.

    By default its folders have the tensors of its parameters, each once and in one form.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]  # keys of config.json that differ from those of `model` in name only

    def read(self, config: Json) -> Json:
        """A complete config.json → the section `model`; ValueError for an option that megajax's model does not have."""
        raise NotImplementedError

    def write(self, model: ModelConfig) -> Json:
        """The section `model` → config.json, without what depends on the run; ValueError for another family's model."""
        raise NotImplementedError

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        """An entry of each parameter, and of the layers' state that the family's model has."""
        raise NotImplementedError

    def stored_names(self, names: Iterable[str], folder: Path) -> dict[str, str]:
        """The names of tensors as in `tensors` → those in a folder."""
        return text_names(names, folder)

    def unused(self, config: Json) -> tuple[str, ...]:
        """Beginnings of the names of tensors that config.json promises and a run may leave out."""
        return ()

    def copies(self, model: ModelConfig) -> list[Tensor]:
        """Entries of tensors that repeat parameters: they are written, and must be equal where a folder has them."""
        return []

    def alternatives(self, model: ModelConfig) -> list[Tensor]:
        """Entries of other tensors with the same parameters: they are read where a folder has them."""
        return []
