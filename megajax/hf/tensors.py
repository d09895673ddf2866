"""How a parameter of megajax corresponds to tensors of a Hugging Face model.

A pattern in the notation of einops, such as `(heads head) embed -> embed heads head`, says how the dimensions of one
tensor become those of the parameter; read from right to left it is the way back. So each entry of a family's table is
its own inverse, and a slice of a parameter is read from the slice of a tensor that holds it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megajax.config import ModelConfig
from megajax.config.kinds import block_layers

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """One parameter, or one layer's and expert's part of it, and the tensor that holds it.

    `theirs` may contain {layer} and {expert}: then each layer of the parameter's first dimension, and each expert of
    the second, is a tensor of its own.
    """

    ours: str
    theirs: str
    pattern: str = ""  # "" if all dimensions agree
    fused: int | None = None  # the dimension of the tensor that several parameters share
    start: int = 0  # where this one begins in it
    step: int = 1  # from one of its indices to the next: 1 if the parameters are side by side, else they take turns

    @property
    def stacked(self) -> int:
        """How many leading dimensions of the parameter are spread over tensors."""
        return ("{layer}" in self.theirs) + ("{expert}" in self.theirs)

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
    def leading_axis(self) -> int:
        """The parameter's dimension, without the stacked ones, that the tensor's first dimension begins with."""
        if not self.pattern:
            return 0
        groups, ours = self._axes
        return ours.index(groups[0][0])

    def without_starts(self, wanted: Slices) -> Slices:
        """`wanted` for `to_ours`, the same for all blocks of one shape."""
        groups, ours = self._axes if self.pattern else ([], [])
        inner = {axis for group in groups for axis in group[1:]}
        return tuple(
            s if i < len(ours) and ours[i] in inner else slice(0, s.stop - s.start) for i, s in enumerate(wanted)
        )

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this part of a tensor, for the parameter's `shape` without its stacked dimensions."""
        if not self.pattern:
            return tuple(shape)
        groups, ours = self._axes
        sizes = dict(zip(ours, shape, strict=True))
        return tuple(math.prod(sizes[axis] for axis in group) for group in groups)

    def their_slices(self, shape: Sequence[int], wanted: Slices) -> Slices:
        """The smallest block of the tensor that holds the slices `wanted` of the parameter."""
        if not self.pattern:
            slices = list(wanted)
        else:
            groups, ours = self._axes
            sizes, want = dict(zip(ours, shape, strict=True)), dict(zip(ours, wanted, strict=True))
            slices = []
            for group in groups:
                first, inner = group[0], math.prod(sizes[axis] for axis in group[1:])
                slices.append(slice(want[first].start * inner, want[first].stop * inner))
        if self.fused is not None:
            slices[self.fused] = self.in_fused(slices[self.fused])
        return tuple(slices)

    def in_fused(self, own: slice) -> slice:
        """A slice of this part in the dimension that it shares with others."""
        first = self.start + own.start * self.step
        return slice(first, first + (own.stop - own.start - 1) * self.step + 1, self.step)

    def to_ours(self, block: Any, shape: Sequence[int], wanted: Slices) -> Any:
        """A block of the tensor (NumPy or jax), as `their_slices` names it → the slices `wanted` of the parameter."""
        if not self.pattern:
            return block
        groups, ours = self._axes
        sizes, want = dict(zip(ours, shape, strict=True)), dict(zip(ours, wanted, strict=True))
        whole = {axis for group in groups for axis in group[1:]}  # read whole: only the first of a group is cut
        lengths = {axis: sizes[axis] if axis in whole else want[axis].stop - want[axis].start for axis in ours}
        flat = [axis for group in groups for axis in group]
        block = block.reshape([lengths[axis] for axis in flat]).transpose([flat.index(axis) for axis in ours])
        return block[tuple(want[axis] if axis in whole else slice(None) for axis in ours)]

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """The parameter, or one layer's and expert's part → its part of the tensor."""
        if not self.pattern:
            return array
        groups, ours = self._axes
        flat = [axis for group in groups for axis in group]
        return array.transpose([ours.index(axis) for axis in flat]).reshape(self.their_shape(array.shape))


def tensor_names(tensor: Tensor, model: ModelConfig) -> dict[tuple[int, ...], str]:
    """The tensors of a parameter, by the indices (row, expert) of the dimensions that are spread over tensors."""
    if "{layer}" not in tensor.theirs:
        return {(): tensor.theirs}
    layers = block_layers(model)[tensor.ours.split(".")[1]]
    if "{expert}" not in tensor.theirs:
        return {(row,): tensor.theirs.format(layer=layer) for row, layer in enumerate(layers)}
    return {
        (row, expert): tensor.theirs.format(layer=layer, expert=expert)
        for row, layer in enumerate(layers)
        for expert in range(model.num_experts or 0)
    }


def fused(parts: Sequence[Tensor], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The tensor of these parts, which are all of it."""
    dimension = parts[0].fused
    if dimension is None:
        return arrays[0]
    shape = list(arrays[0].shape)
    shape[dimension] = sum(array.shape[dimension] for array in arrays)
    out = np.empty(shape, arrays[0].dtype)
    for part, array in zip(parts, arrays, strict=True):
        out[(slice(None),) * dimension + (part.in_fused(slice(0, array.shape[dimension])),)] = array
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
