"""Shardings of the parameters of some named configs on some meshes, as text: a diff shows the effect of a change.

`golden_specs.txt` holds them; run this file to rewrite it.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.model import Transformer, parameters
from megajax.sharding import place_all, stored_rows

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden_specs.txt")
CASES = [
    # Eight KV heads on 16 devices: replicated in pairs.
    ("llama3_8b", {"data": 2, "fsdp": 4, "tensor": 16}),
    # 4096 is no multiple of 96: stored with padding.
    ("llama3_8b", {"data": 96}),
    ("gpt3_125m", {"data": 2, "fsdp": 2, "tensor": 4}),
    # 12 layers on 8 stages: two slots each, four of them empty.
    ("gpt3_125m", {"pipeline": 8, "data": 2, "fsdp": 2, "tensor": 2}),
    # A dense layer and 26 with experts on four stages: a slot of the one kind each and seven of the other.
    ("deepseek_v2_lite", {"pipeline": 4, "expert": 2, "tensor": 2}),
]


def describe(name: str, mesh: dict[str, int]) -> Iterator[str]:
    """One line per parameter: name, shape, mesh axes of each dimension (without axes of size 1), and remarks."""
    overrides = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    batch = ["batch.global_size=192", "batch.num_microbatches=8"] if "pipeline" in mesh else ["batch.global_size=192"]
    batch += ["batch.sequence_length=2048", "data.kind=synthetic"]
    config = load_config(ROOT / f"configs/models/{name}.yaml", [*batch, *overrides])
    sizes = check_mesh(config, math.prod(mesh.values()))
    yield f"{name} on {', '.join(f'{axis} {size}' for axis, size in mesh.items())}"
    rows = stored_rows(config, sizes["pipeline"])
    for parameter, placement in place_all(parameters(Transformer(config.model)), sizes, rows).items():
        entries = [(entry,) if isinstance(entry, str) else entry or () for entry in placement.spec]
        used = ["+".join(axis for axis in entry if sizes[axis] > 1) or "-" for entry in entries]
        notes = []
        if placement.stored_shape != placement.shape:
            notes.append(f"stored as {list(placement.stored_shape)}")
        if placement.kv_groups > 1:
            notes.append(f"a KV head for {placement.kv_groups} devices each")
        line = f"  {parameter:<36} {str(list(placement.shape)):<24} {' '.join(used):<24} {', '.join(notes)}"
        yield line.rstrip()
    yield ""


def golden() -> str:
    return "\n".join(line for name, mesh in CASES for line in describe(name, mesh))


def test_named_configs_lie_on_the_mesh_as_written_down():
    assert golden() == GOLDEN.read_text(), f"run {Path(__file__).name} to rewrite {GOLDEN.name}, and look at its diff"


if __name__ == "__main__":
    GOLDEN.write_text(golden())
