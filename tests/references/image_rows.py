"""Rows of patches of several images, and the places of their embeddings among tokens, in megajax's order."""

from typing import Any

import numpy as np

Image = tuple[int, int]  # rows and columns of patches


def places(image: Image, window: int | None, merge: int) -> np.ndarray:
    """Row and column of each patch of an image, `[patches, 2]`: by window, in it by block of merge x merge."""
    grid, window = np.indices(image).reshape(2, -1).T, window or max(image) * merge
    keys = [grid % merge, grid // merge, grid // window]
    return grid[np.lexsort([part[:, axis] for part in keys for axis in (1, 0)])]


def row_of(images: list[tuple[np.ndarray, np.ndarray]], vision: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row from the (patches, places) of its images, and `indices`: each image's embeddings.

    The embeddings are in the order of an image's tokens, row by row.
    """
    block, first, length = vision.get("merge", 1) ** 2, int(vision.get("class_token", False)), vision["patches_per_row"]
    row: dict[str, Any] = {"patches": np.zeros((length, patch_dim(vision)))}
    row |= {"patch_segments": np.full(length, -1), "patch_positions": np.zeros((length, 2), int), "indices": []}
    start = 0
    for number, (values, where) in enumerate(images):
        corners, end = where[::block], start + first + len(where)
        row["indices"].append(start // block + first + np.lexsort((corners[:, 1], corners[:, 0])))
        row["patch_segments"][start:end] = number
        row["patch_positions"][start : start + first] = -1
        row["patches"][start + first : end], row["patch_positions"][start + first : end] = values, where
        start = end
    return row


def patch_dim(vision: dict[str, Any]) -> int:
    return 3 * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2


def random_rows(images: list[list[Image]], vision: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    """`row_of` images of random numbers."""
    merge, window = vision.get("merge", 1), vision.get("window")

    def image(size: Image) -> tuple[np.ndarray, np.ndarray]:
        return rng.normal(size=(size[0] * size[1], patch_dim(vision))), places(size, window, merge)

    return [row_of([image(size) for size in row], vision) for row in images]


def with_images(tokens: np.ndarray, rows: list[dict[str, Any]], image_token: int, between: int = 2) -> np.ndarray:
    """Put image tokens into `tokens [rows, S]`, `between` tokens before each image → the field `image_index`."""
    index = np.full(tokens.shape, -1)
    for at, row in enumerate(rows):
        start = between
        for own in row.pop("indices"):
            tokens[at, start : start + len(own)] = image_token
            index[at, start : start + len(own)] = own
            start += len(own) + between
    return index
