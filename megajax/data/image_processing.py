"""Pictures to patches, as the processors of CLIP, SigLIP, LLaVA, Gemma 3 and Qwen2-VL in transformers do it.

Pillow resizes, NumPy does the rest, with the same roundings: rescaling in float64, normalising in float32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import numpy as np
from pydantic import Field

from megajax.data.model_files import PROCESSOR_FILES, read_json
from megajax.data.pictures import PictureError
from megajax.errors import InputError, shown
from megajax.json_files import check

if TYPE_CHECKING:
    from PIL.Image import Image

    from megajax.schema.vision import VisionConfig

KINDS = ("CLIP", "Siglip", "Llava", "Gemma3", "Qwen2VL")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
USUAL = 224  # pixels of a side
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers
MOST_SIDE = 1 << 14
MOST_STRETCHED = 200  # Qwen2-VL's longest side by its shortest
CURE = "copy the processor's file again, or correct it"

Side = Annotated[int, Field(ge=1, le=MOST_SIDE)]
Pixels = Annotated[int, Field(ge=1, le=1 << 26)]
Three = Annotated[list[float], Field(min_length=3, max_length=3)]


class Size(TypedDict, total=False):
    """A size as the files have it: Qwen2-VL's edges are numbers of pixels."""

    height: Side | None
    width: Side | None
    shortest_edge: Pixels | None
    longest_edge: Pixels | None


class ProcessorFile(TypedDict, total=False):
    """The keys of a processor's file that are read."""

    image_processor_type: str | None
    feature_extractor_type: str | None
    do_resize: bool | None
    do_center_crop: bool | None
    do_rescale: bool | None
    do_normalize: bool | None
    do_pad: bool | None
    do_pan_and_scan: bool | None
    size: Side | Size | None
    crop_size: Side | Size | None
    resample: Annotated[int, Field(ge=0, le=5)] | None
    rescale_factor: float | None
    image_mean: Three | None
    image_std: Three | None
    patch_size: Side | None
    temporal_patch_size: Side | None
    merge_size: Side | None
    min_pixels: Pixels | None
    max_pixels: Pixels | None


@dataclass(frozen=True)
class ImageProcessor:
    """How a picture becomes pixels of the model.

    `exact` (height, width), `shortest` edge, or `pixels` (least, most), of which one is given, decide the size, then
    `crop` (height, width). With `pads` the picture is first made a square with borders of the mean colour.
    """

    exact: tuple[int, int] | None = None
    shortest: int | None = None
    pixels: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    pads: bool = False
    resample: int = BICUBIC
    scale: float | None = 1 / 255
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    normalises: bool = True

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """(height, width) of all pictures; None: they differ."""
        return self.crop or self.exact

    def size(self, height: int, width: int, factor: int) -> tuple[int, int]:
        """(height, width) of the pixels of a picture of this size; both multiples of `factor` if the size is free."""
        resized = self._resized(height, width, factor)
        return self.crop or resized

    def _resized(self, height: int, width: int, factor: int) -> tuple[int, int]:
        """(height, width) before the crop. Raises PictureError if the picture is too large there, or as a square."""
        given = f"of {width} x {height} pixels"
        if self.pads:
            height = width = max(height, width)
        found = self._scaled(height, width, factor)
        if (side := max(*found, height if self.pads else 0)) > MOST_SIDE:
            raise PictureError(f"{given} becomes {side:,} pixels long, more than {MOST_SIDE:,}")
        return found

    def _scaled(self, height: int, width: int, factor: int) -> tuple[int, int]:
        if self.pixels is not None:
            return smart_size(height, width, factor, *self.pixels)
        if self.exact is not None:
            return self.exact
        if self.shortest is None:
            return height, width
        long = int(self.shortest * max(height, width) / min(height, width))
        return (long, self.shortest) if width <= height else (self.shortest, long)

    def __call__(self, image: "Image", factor: int) -> np.ndarray:
        """The pixels of a picture, float32 [3, height, width]."""
        height, width = self._resized(image.height, image.width, factor)
        if self.pads:
            image = self._squared(image)
        pixels = np.asarray(image.resize((width, height), self.resample)).transpose(2, 0, 1)
        if self.crop is not None:
            pixels = _cropped(pixels, *self.crop)
        return np.stack([values[channel] for values, channel in zip(self._values(), pixels, strict=True)])

    def _values(self) -> np.ndarray:
        """What each of a channel's 256 values becomes, float32 [3, 256]."""
        values = (
            (np.arange(256) * (1.0 if self.scale is None else self.scale)).astype(np.float32)[None].repeat(3, axis=0)
        )
        mean, std = (np.asarray(each, np.float32)[:, None] for each in (self.mean, self.std))
        return (values - mean) / std if self.normalises else values

    def _squared(self, image: "Image") -> "Image":
        from PIL import Image

        side = max(image.size)
        square = Image.new("RGB", (side, side), tuple(int(each * 255) for each in self.mean))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square


def smart_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Qwen2-VL's size: multiples of `factor` near the picture's size, with `least` to `most` pixels.

    Raises PictureError for a picture that is too narrow.
    """
    if max(height, width) > MOST_STRETCHED * min(height, width):
        raise PictureError(f"of {width} x {height} pixels is more than {MOST_STRETCHED} times as long as wide")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def _cropped(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle of [3, H, W]; a side that is too short gets zeros, one more before it than behind it."""
    for axis, wanted in ((1, height), (2, width)):
        side = pixels.shape[axis]
        if side >= wanted:
            start = (side - wanted) // 2
            pixels = pixels.take(range(start, start + wanted), axis)
        else:
            before = -(-(wanted - side) // 2)
            padding = [(0, 0)] * 3
            padding[axis] = (before, wanted - side - before)
            pixels = np.pad(pixels, padding)
    return pixels


def patch_order(rows: int, columns: int, merge: int, window: int | None = None) -> np.ndarray:
    """Row-major indices of a picture's patches in the order of the model, int64 [rows · columns].

    By windows, in a window by merge × merge blocks, in a block row-major; windows and blocks are row-major too.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = window or max(rows, columns)
    return np.lexsort((column, row, column // merge, row // merge, column // window, row // window))


def cut_patches(pixels: np.ndarray, patch: int, times: int) -> np.ndarray:
    """Pixels [3, H, W] as patches, row-major: float32 [patches, dim], each (channel, time, row, column)."""
    rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
    cut = pixels[:, : rows * patch, : columns * patch].reshape(3, rows, patch, columns, patch)
    cut = cut.transpose(1, 3, 0, 2, 4)[:, :, :, None]
    return np.broadcast_to(cut, (rows, columns, 3, times, patch, patch)).reshape(rows * columns, -1)


def default_processor(vision: "VisionConfig") -> ImageProcessor:
    """SigLIP's processor for a fixed grid, else Qwen2-VL's or Qwen3-VL's, with as many patches at most as a row has."""
    if vision.fixed_grid is not None:
        side = vision.fixed_grid * vision.patch_size
        return ImageProcessor(exact=(side, side))
    block = (vision.patch_size * vision.merge) ** 2
    most = vision.patches_per_row * vision.patch_size**2
    mean, std = (HALF, HALF) if vision.interpolate else (CLIP_MEAN, CLIP_STD)
    return ImageProcessor(pixels=(min(4 * block, most), most), mean=mean, std=std)


def default_file(vision: "VisionConfig") -> dict[str, Any]:
    """`default_processor` as the content of the first of PROCESSOR_FILES, for transformers."""
    processor = default_processor(vision)
    values: dict[str, Any] = {"image_mean": list(processor.mean), "image_std": list(processor.std)}
    if processor.pixels is not None:
        least, most = processor.pixels
        values |= {"patch_size": vision.patch_size, "merge_size": vision.merge, "min_pixels": least, "max_pixels": most}
        values["temporal_patch_size"] = vision.temporal_patch_size
        return values | {"image_processor_type": "Qwen2VLImageProcessor"}
    assert processor.exact is not None
    height, width = processor.exact
    return values | {"image_processor_type": "SiglipImageProcessor", "size": {"height": height, "width": width}}


def find_processor(folder: Path | None, vision: "VisionConfig") -> ImageProcessor:
    """The processor of a model's folder, or `default_processor`. Raises InputError if it does not fit the model."""
    if folder is not None:
        own, shared = (folder / name for name in PROCESSOR_FILES)
        for path, values in ((own, read_json(own)), (shared, read_json(shared).get("image_processor"))):
            if values and isinstance(values, dict):
                return read_processor(values, str(path), vision)
    return default_processor(vision)


def read_processor(values: Mapping[str, Any], location: str, vision: "VisionConfig") -> ImageProcessor:
    """The processor that a file's `values` describe. Raises InputError, with `location`, for one that is not here."""
    given = check(
        {key: values[key] for key in ProcessorFile.__annotations__.keys() & values}, location, ProcessorFile, CURE
    )
    name = given.get("image_processor_type") or given.get("feature_extractor_type") or ""
    kind = name.removesuffix("Fast").removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    if kind not in KINDS:
        raise InputError(
            f"{location} has the processor {shown(name) or 'without a name'}: megajax has those of {', '.join(KINDS)}."
        )
    if given.get("do_pan_and_scan"):
        raise InputError(
            f"{location} has do_pan_and_scan, crops of a picture beside it, which megajax lacks: remove it."
        )
    processor = _sized(kind, given)
    half = kind in ("Siglip", "Gemma3")
    mean, std = (HALF, HALF) if half else (CLIP_MEAN, CLIP_STD)
    resample, factor = given.get("resample"), given.get("rescale_factor")
    processor = replace(
        processor,
        pads=kind == "Llava" and bool(given.get("do_pad")),
        resample=resample if resample is not None else BILINEAR if kind == "Gemma3" else BICUBIC,
        scale=None if given.get("do_rescale") is False else 1 / 255 if factor is None else factor,
        mean=tuple(given.get("image_mean") or mean),
        std=tuple(given.get("image_std") or std),
        normalises=given.get("do_normalize") is not False,
    )
    _check_fits(processor, kind, given, location, vision)
    return processor


def _sized(kind: str, given: ProcessorFile) -> ImageProcessor:
    """The sizes of a processor."""
    size = given.get("size")
    sides: Size = {"shortest_edge": size} if isinstance(size, int) else size or {}
    shortest, height, width = sides.get("shortest_edge"), sides.get("height"), sides.get("width")
    if kind == "Qwen2VL":
        least = given.get("min_pixels") or shortest or 56 * 56
        return ImageProcessor(pixels=(least, given.get("max_pixels") or sides.get("longest_edge") or 28 * 28 * 1280))
    crop = None
    if kind in ("CLIP", "Llava") and given.get("do_center_crop") is not False:
        size = given.get("crop_size") or USUAL
        crop = (size, size) if isinstance(size, int) else (size.get("height") or USUAL, size.get("width") or USUAL)
    if given.get("do_resize") is False:
        return ImageProcessor(crop=crop)
    if shortest or not (height and width or crop is None):
        return ImageProcessor(shortest=shortest or USUAL, crop=crop)
    return ImageProcessor(exact=(height or USUAL, width or USUAL), crop=crop)


def _check_fits(
    processor: ImageProcessor, kind: str, given: ProcessorFile, location: str, vision: "VisionConfig"
) -> None:
    """Raise InputError if the model's tower does not take what the processor makes."""
    if kind == "Qwen2VL":
        ours = {
            "patch_size": (14, vision.patch_size),
            "temporal_patch_size": (2, vision.temporal_patch_size),
            "merge_size": (2, vision.merge),
        }
        for key, (usual, wanted) in ours.items():
            if (found := given.get(key) or usual) != wanted:
                name = {"merge_size": "merge"}.get(key, key)
                raise InputError(f"{location} has {key}={found}, but model.vision.{name}={wanted}: make them equal.")
    grid, found = vision.fixed_grid, processor.fixed_size
    if grid is not None and found != (grid * vision.patch_size,) * 2:
        side = grid * vision.patch_size
        made = "pictures of unlike sizes" if found is None else f"pictures of {found[1]} x {found[0]} pixels"
        raise InputError(
            f"{location} makes {made}, but model.vision.grid={grid} with patches of {vision.patch_size} needs "
            f"{side} x {side}: correct the one or the other."
        )
    if grid is None and processor.pixels is None and found is None:
        raise InputError(f"{location} makes pictures of any number of pixels: give it a crop_size, or a fixed size.")
