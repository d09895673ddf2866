"""The arrays of a checkpoint as its files declare them.

Without orbax, because it starts jax's backend, which reserves GPU memory.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import tensorstore

from megajax import cluster
from megajax.checkpoint.storage import Folder, key_value_store, sizes, store_errors
from megajax.errors import InputError

HEADER = "/.zarray"  # end of orbax's key of an array's header
COMPRESSOR = "zstd"  # orbax's; tensorstore takes what an array's chunk has, and no more. Not so blosc: 2 GiB of 90 kB
EXPANSION, SMALL = 1000, 2**30  # of the files' bytes; of arrays that are not compared with them


def open_arrays(item: Folder, prefix: str = "") -> dict[str, Any]:
    """Tensorstore's arrays in `RUN/checkpoints/STEP/state` whose names begin with `prefix`, by the rest; none is read.

    Raises ValueError for damage, as tensorstore does.
    """
    store = {"driver": "ocdbt", "base": key_value_store(item)}
    keys = tensorstore.KvStore.open(store).result().list().result()
    paths = [key.decode().removesuffix(HEADER) for key in keys if key.endswith(HEADER.encode())]
    opening = {
        path.removeprefix(prefix): tensorstore.open({"driver": "zarr", "kvstore": store | {"path": f"{path}/"}})
        for path in paths
        if path.startswith(prefix)
    }
    if not opening:
        raise ValueError("it has no parameters")
    arrays = {name: array.result() for name, array in opening.items()}
    for name, array in arrays.items():
        compressor = array.spec().to_json()["metadata"].get("compressor")
        if compressor and compressor["id"] != COMPRESSOR:
            raise ValueError(f"{name} has the compressor {compressor['id']} instead of {COMPRESSOR}")
        chunk = array.chunk_layout.read_chunk.shape or ()  # a scalar has none
        if any((part or 0) > max(1, whole) for part, whole in zip(chunk, array.shape, strict=True)):
            raise ValueError(f"{name} of shape {[*array.shape]} has chunks of {[*chunk]}")
    return arrays


def check_size(item: Folder, arrays: Mapping[str, Any]) -> None:
    """Raises ValueError if arrays, whose right shapes nobody knows, are far larger than the files that hold them."""
    declared = sum(math.prod(array.shape) * array.dtype.numpy_dtype.itemsize for array in arrays.values())
    stored = sum(sizes(item).values())
    if declared > max(SMALL, EXPANSION * stored):
        raise ValueError(f"its arrays declare {declared:,} bytes, but its files have {stored:,}")


def check_shapes(item: Folder, abstract: Any) -> None:
    """Raise ValueError if an array of the tree `abstract` is missing or has another shape in `item`.

    Orbax would allocate what the files say. Process 0 opens the arrays; all processes must call this.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
    if problem := cluster.current().first_decides(lambda: _misfit(item, shapes)):
        raise ValueError(problem)


def _misfit(item: Folder, shapes: Mapping[str, tuple[int, ...]]) -> str:
    try:
        with store_errors(item):
            arrays = open_arrays(item)
    except InputError:  # a ValueError: the store doesn't answer
        raise
    except ValueError as error:
        return str(error).splitlines()[0][:200]
    for name, shape in shapes.items():
        if name not in arrays:
            return f"it has no array {name}"
        if arrays[name].shape != shape:
            return f"{name} has shape {[*arrays[name].shape]} instead of {[*shape]}"
    return ""
