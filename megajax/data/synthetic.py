"""Random tokens and pictures, for benchmarks and tests without files."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megajax.data.images import Images, PlacedPicture, SizedPicture
from megajax.data.pictures import Picture
from megajax.data.samples import Samples

if TYPE_CHECKING:
    from megajax.schema.vision import VisionConfig

A_ROW = 4  # pictures, where their size is free


class SyntheticSamples(Samples):
    """Sample i: int32[S+1] uniform over the vocabulary, a function of (i, seed, stream).

    It is cut into `documents` of one token or more, at positions that are a function of the same numbers. With `vision`
    each sample has as many pictures as its tokens and patches have room for, at equal distances.
    """

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        seed: int,
        stream: int = 0,
        documents: int = 1,
        vision: "VisionConfig | None" = None,
    ):
        self.vocab_size, self.sequence_length, self.key = vocab_size, sequence_length, (seed, stream)
        self.documents, self.vision, self._firsts, self._side, tokens = documents, vision, [], 0, 0
        if vision is not None:
            free = max(1, math.isqrt(vision.patches_per_row // A_ROW) // vision.merge) * vision.merge
            side = vision.fixed_grid or free
            tokens = side**2 // vision.merge**2
            room = min(vision.patches_per_row // (side**2 + vision.class_token), sequence_length // (tokens + 1))
            self._side, self._firsts = side, [i * (sequence_length // room) for i in range(room)]
        self._is_image = np.zeros(sequence_length + 1, bool)
        self._may_begin = np.ones(sequence_length + 1, bool)  # a document
        for first in self._firsts:
            self._is_image[first : first + tokens] = True
            self._may_begin[first + 1 : first + tokens] = False

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64((*self.key, index)))
        tokens = generator.integers(0, self.vocab_size, self.sequence_length + 1, dtype=np.int32)
        if self.vision is None:
            return tokens
        other = 1 if self.vision.image_token == 0 else self.vision.image_token - 1
        tokens[tokens == self.vision.image_token] = other
        return np.where(self._is_image, np.int32(self.vision.image_token), tokens)

    def counted(self, index: int) -> np.ndarray | None:
        return None if self.vision is None else ~self._is_image

    def pictures(self, index: int) -> list[PlacedPicture]:
        names = (f"{self.key} {index} {first}" for first in self._firsts)
        sized = (SizedPicture(Picture(name, "", ""), self._side, self._side) for name in names)
        return [PlacedPicture(each, first) for each, first in zip(sized, self._firsts, strict=True)]

    def document_lengths(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64((*self.key, index, 1)))  # another stream than the tokens'
        starts = 1 + np.flatnonzero(self._may_begin[1:])
        borders = starts[generator.choice(len(starts), self.documents - 1, replace=False)]
        return np.diff(np.sort([0, *borders, self.sequence_length + 1]))


@dataclass(frozen=True)
class SyntheticImages(Images):
    """Random pixels, a function of a picture's name."""

    def entries_of(self, sized: SizedPicture) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.Generator(np.random.PCG64(list(sized.picture.name.encode())))
        side = self.vision.patch_size
        return self.arranged(generator.standard_normal((3, sized.rows * side, sized.columns * side), np.float32))
