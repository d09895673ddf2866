"""Quantised tensors of a folder, dequantised to FP32 on the way in: only the blocks of the slices that are read.

A quantised tensor has the name, shape and dimensions that it has in the unquantised model, so the families' tables are
the same for both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from megajax.errors import InputError

Slices = tuple[slice, ...]
Block = tuple[int, int | None] | None  # that shares a scale: rows and columns; None: all
WITHOUT_SIZES: dict[str, Block] = {"tensor": None, "channel": (1, None)}  # compressed-tensors' strategies
METHODS = ("fp8", "mxfp4", "compressed-tensors")
FP8_SCALE, COMPRESSED_SCALE = "_scale_inv", "_scale"  # after the name of a weight
INPUT_SCALE = "input_scale"  # beside a weight; megajax has no use for it
GROUP = 32  # numbers of MXFP4 that share a scale
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_BYTES = np.arange(256)
FIRST, SECOND = _E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]  # the two numbers of each byte
E4M3 = _BYTES.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E8M0 = np.append(np.ldexp(np.float32(1), _BYTES[:-1] - 127), np.float32(np.nan))


class StoredTensors(Protocol):
    """The tensors as the files have them."""

    folder: Path

    def stored_shape(self, name: str) -> tuple[int, ...]: ...

    def read_stored(self, name: str, slices: Slices) -> np.ndarray: ...


class Quantised(Protocol):
    """A tensor that several stored ones make up; the first has most of its bytes."""

    @property
    def parts(self) -> dict[str, tuple[str, ...]]: ...  # the stored tensors, and the dtypes that each may have

    def shape(self, stored: StoredTensors) -> tuple[int, ...]: ...

    def read(self, stored: StoredTensors, slices: Slices) -> np.ndarray: ...


@dataclass(frozen=True)
class Fp8:
    """`[out, in]` in FP8 times the scale of its block, or of the whole tensor (DeepSeek-V3, compressed-tensors)."""

    name: str
    blocks: tuple[Block, ...]  # by config.json; the shape of the scales says which of them it is
    suffix: str = FP8_SCALE  # of the scales' name
    beside: str | None = None  # the tensor with the scale of the layer's input, if there is one

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {self.name: ("F8_E4M3",), self.scales: ("F32", "BF16", "F8_E8M0")}
        return found | ({} if self.beside is None else {self.beside: ("F32", "BF16")})

    @property
    def scales(self) -> str:
        return self.name + self.suffix

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        """The shape of the weight; InputError if the scales do not fit it."""
        self._block(stored)
        return stored.stored_shape(self.name)

    def read(self, stored: StoredTensors, slices: Slices) -> np.ndarray:
        values = _numbers(E4M3, stored.read_stored(self.name, slices).view(np.uint8))
        block = self._block(stored)
        if block is None:
            values *= _scales(stored, self.scales, ())
            return values
        blocks = tuple(slice(s.start // b, -(-s.stop // b)) for s, b in zip(slices, block, strict=True))
        scales = _scales(stored, self.scales, blocks)
        block_of = [np.arange(s.start, s.stop) // b - s.start // b for s, b in zip(slices, block, strict=True)]
        values *= scales[np.ix_(*block_of)]
        return values

    def _block(self, stored: StoredTensors) -> tuple[int, ...] | None:
        """The sizes of a block, None: of all. InputError if the scales fit none of `blocks`."""
        shape, found = stored.stored_shape(self.name), stored.stored_shape(self.scales)
        expected: list[list[int]] = []
        for block in self.blocks:
            sizes = None if block is None else tuple(b or size for b, size in zip(block, shape, strict=False))
            expected.append([] if sizes is None else [-(-n // b) for n, b in zip(shape, sizes, strict=False)])
            if [*found] == expected[-1] or (sizes is None and found == (1,)):
                return sizes
        key = "weight_block_size" if self.suffix == FP8_SCALE else "config_groups"
        raise InputError(
            f"{stored.folder}: {self.scales} has the shape {list(found)}, but by quantization_config.{key} in "
            f"config.json it has {' or '.join(map(str, expected))}: copy the whole model."
        )


@dataclass(frozen=True)
class Mxfp4:
    """The matrices of experts `[E, in, out]` of GPT-OSS, stored as `[E, out, in]` in groups along `in`.

    `_blocks [E, out, in / 32, 16]` has two E2M1 numbers in a byte, the first in the low bits; `_scales` has each
    group's power of two (OCP Microscaling Formats, 2023).
    """

    name: str

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        return {self.blocks: ("U8",), self.scales: ("U8",)}

    @property
    def blocks(self) -> str:
        return f"{self.name}_blocks"

    @property
    def scales(self) -> str:
        return f"{self.name}_scales"

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        """The shape of the matrices; InputError if the scales do not fit the blocks."""
        blocks, scales = (stored.stored_shape(part) for part in self.parts)
        if len(blocks) != 4 or blocks[3] != GROUP // 2 or blocks[:3] != scales:
            raise InputError(
                f"{stored.folder}: {self.blocks} has the shape {list(blocks)} and {self.scales} {list(scales)}, but "
                f"MXFP4 has [E, out, in / {GROUP}, {GROUP // 2}] and [E, out, in / {GROUP}]: copy the whole model."
            )
        experts, out, groups, _ = blocks
        return experts, groups * GROUP, out

    def read(self, stored: StoredTensors, slices: Slices) -> np.ndarray:
        experts, inner, out = slices
        groups = slice(inner.start // GROUP, -(-inner.stop // GROUP))
        scales = _scales(stored, self.scales, (experts, out, groups))
        blocks = stored.read_stored(self.blocks, (experts, out, groups, slice(0, GROUP // 2)))
        blocks = np.ascontiguousarray(blocks.transpose(0, 2, 3, 1))  # bytes: a fourth of the numbers they stand for
        E, G, half, N = blocks.shape
        values = np.empty((E, G, half, 2, N), np.float32)
        values[:, :, :, 0], values[:, :, :, 1] = _numbers(FIRST, blocks), _numbers(SECOND, blocks)
        values *= scales.transpose(0, 2, 1)[:, :, None, None]
        start = groups.start * GROUP
        return values.reshape(E, G * GROUP, N)[:, inner.start - start : inner.stop - start]


def find(names: Mapping[str, Any], settings: Mapping[str, Any] | None, where: str) -> dict[str, Quantised]:
    """The quantised tensors among the stored `names`, by config.json's `quantization_config`.

    `where` is the path of config.json. Raises InputError for another method than METHODS.
    """
    if not settings:
        return {}
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if method not in METHODS:
        raise InputError(
            f"{where}: quantization_config.quant_method={method} is not known: megajax reads {', '.join(METHODS)}; "
            "save the model in bfloat16 with transformers and give that folder."
        )
    if method == "mxfp4":
        whole = [name.removesuffix("_blocks") for name in names if name.endswith("_blocks")]
        return {name: Mxfp4(name) for name in whole if f"{name}_scales" in names}
    if method == "compressed-tensors":
        return _compressed(names, settings, where)
    sizes = settings.get("weight_block_size")
    block = None if sizes is None else _sizes(sizes, "weight_block_size", where)
    return {name: Fp8(name, (block,)) for name in names if name + FP8_SCALE in names}


def _sizes(sizes: Any, key: str, where: str) -> tuple[int, int]:
    """The rows and columns of a block; InputError for another value."""
    if isinstance(sizes, list) and [type(n) for n in sizes] == [int, int] and min(sizes) > 0:
        return sizes[0], sizes[1]
    raise InputError(f"{where}: quantization_config.{key}={sizes} is not a list of two sizes: copy it again.")


def _compressed(names: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> dict[str, Quantised]:
    """The matrices of compressed-tensors' FP8: with one scale, or one for each row or block.

    Groups may differ in this, and their targets may be classes of transformers: a matrix has the strategy that the
    shape of its scales says. Two sizes of blocks can have scales of the same shape.
    """
    groups = settings.get("config_groups")
    found_groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    forms = [form for group in found_groups if isinstance(form := group.get("weights"), dict)]  # null: of inputs only
    strategies = {form.get("strategy") for form in forms}
    if settings.get("format") != "float-quantized" or not strategies or strategies - {*WITHOUT_SIZES, "block"}:
        found_strategies = f"strategies {', '.join(sorted(map(str, strategies)))}" if strategies else "no strategies"
        raise InputError(
            f"{where}: quantization_config has format={settings.get('format')} with {found_strategies} "
            "of weights: megajax reads float-quantized with channel, tensor or block; "
            "save the model in bfloat16 with transformers and give that folder."
        )
    key = "config_groups: block_structure"
    sizes = {_sizes(form.get("block_structure"), key, where) for form in forms if form["strategy"] == "block"}
    if len(sizes) > 1:
        different = " and ".join(str([*each]) for each in sorted(sizes))
        raise InputError(
            f"{where}: quantization_config.{key} is {different}: megajax reads one size; save the model in bfloat16 "
            "with transformers and give that folder."
        )
    blocks: list[Block] = [block for strategy, block in WITHOUT_SIZES.items() if strategy in strategies]
    found: dict[str, Quantised] = {}
    for name in names:
        if name + COMPRESSED_SCALE in names:
            beside = name.removesuffix("weight") + INPUT_SCALE
            found[name] = Fp8(name, (*blocks, *sizes), COMPRESSED_SCALE, beside if beside in names else None)
    return found


def _scales(stored: StoredTensors, name: str, slices: Slices) -> np.ndarray:
    """A block of scales in FP32, of bytes the powers of two; InputError if one is not finite."""
    found = stored.read_stored(name, slices)
    scales = E8M0[found] if found.dtype == np.uint8 else found.astype(np.float32)
    if not np.isfinite(scales).all():
        wrong = scales[~np.isfinite(scales)].flat[0]
        raise InputError(
            f"{stored.folder}: {name} has a scale that is {wrong}, and so are its weights: copy the whole model "
            "again, or quantise it again."
        )
    return scales


def _numbers(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """`table[codes]` for bytes, three times as fast and in several threads at once; ml_dtypes casts more slowly."""
    return np.take(table, codes.astype(np.intp), mode="clip")
