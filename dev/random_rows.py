"""Random legal rows for the table of memory (dev/memory_table.py): models, meshes, recomputation, precision."""

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.errors import UserError
from megajax.layout.segments import layer_seconds
from megajax.layout.stages import slot_kinds

Case = tuple[str, tuple[str, ...], int]  # config, overrides, GPUs
ROOT = Path(__file__).parents[1]
AXES = ("fsdp", "fsdp", "data", "tensor", "pipeline", "context", "expert")  # fsdp is twice as likely
SECONDS = 10  # limit of the estimated compile time of the layers


def draw_rows(number: int, seed: int, legal: Callable[[str, tuple[str, ...], int], bool]) -> Iterator[Case]:
    """`number` different (config, overrides, GPUs) that start-up accepts, and that `legal` accepts."""
    draw, found = random.Random(seed), 0
    models = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs/models").glob("*.yaml"))
    while found < number:
        row = draw_row(draw, draw.choice(models))
        if _is_small(*row) and legal(*row):
            found += 1
            yield row


def draw_row(draw: random.Random, config: str) -> Case:
    """One row for a model on 1 to 1,024 GPUs; it may be illegal."""
    sizes = dict.fromkeys(AXES, 1)
    for _ in range(draw.randrange(11)):
        sizes[draw.choice(AXES)] *= 2
    gpus, stages = 1, sizes["pipeline"]
    for size in sizes.values():
        gpus *= size
    virtual_stages = draw.choice((1, 1, 2)) if stages > 1 else 1
    microbatches = stages * draw.choice((2, 4)) if stages > 1 else draw.choice((1, 1, 4))
    shards = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    settings: dict[str, object] = {f"mesh.{axis}": size for axis, size in sizes.items() if size > 1}
    settings |= {
        "model.num_layers": stages * virtual_stages * draw.choice((2, 4, 8)),
        "batch.sequence_length": draw.choice((2048, 4096, 8192)) * sizes["context"],
        "batch.num_microbatches": microbatches,
        "batch.global_size": microbatches * shards * draw.choice((1, 1, 2)),
        "remat.policy": draw.choice(("none", "none", "full", "selective", "save_matmuls")),
        "data.kind": "synthetic",
    }
    if stages > 1:
        settings |= {"pipeline.schedule": draw.choice(("1f1b", "1f1b", "zero_bubble", "gpipe"))}
        settings |= {"pipeline.virtual_stages": virtual_stages} if virtual_stages > 1 else {}
    settings |= {"precision.fp8.recipe": draw.choice(("current", "delayed"))} if draw.random() < 0.2 else {}
    settings |= {"communication.experts": draw.choice(("all_gather", "all_to_all"))} if sizes["expert"] > 1 else {}
    settings |= {"kernels.scan_unroll": 1} if draw.random() < 0.2 else {}
    return config, tuple(f"{key}={value}" for key, value in settings.items()), gpus


def _is_small(config: str, overrides: tuple[str, ...], gpus: int) -> bool:
    """Whether start-up accepts the row without a warning and XLA compiles its layers in about SECONDS."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = load_config(ROOT / config, overrides)
            sizes = check_mesh(loaded, gpus)
    except (UserError, UserWarning):
        return False
    looped = loaded.kernels.scan_unroll is not None
    return looped or sum(layer_seconds(loaded, k, sizes) for k in slot_kinds(loaded, sizes["pipeline"])) <= SECONDS
