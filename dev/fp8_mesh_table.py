"""FP8 and FP4 in blocks on meshes: `python dev/fp8_mesh_table.py [--recipe nvfp4] [--output FILE]`.

The first gradients of two layers in FP32 on virtual CPU devices, from three initial weights, beside those of one device
with the same microbatches. Prints a markdown table row by row; exit status 1 if a row disagrees. Where the last bit of
an FP32 sum differs, a number may round to another one, and then many, so a row has the least and the largest difference
of the three.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/references"))
import virtual_devices

os.environ.update(virtual_devices.ENVIRONMENT)

from first_gradients import EXPERTS, MODEL, difference, first_gradients, make

LARGEST = {"blockwise": 0.05, "mxfp8": 0.05, "nvfp4": 0.25}  # the formats' own errors
LOSS = 1e-4
WIDER = {"head_dim": 64, "hidden_size": 128, "ffn_hidden_size": 256}  # blocks of 128 on two devices of `tensor`
DENSE_MESHES = [
    ({"data": 2}, 1),
    ({"fsdp": 2}, 1),
    ({"tensor": 2}, 1),
    ({"context": 2}, 1),
    ({"pipeline": 2}, 2),
    ({"fsdp": 4}, 1),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 1),
    ({"fsdp": 2, "tensor": 2}, 1),
    ({"context": 2, "fsdp": 2}, 1),
    ({"context": 2, "tensor": 2}, 1),
    ({"pipeline": 2, "fsdp": 2}, 2),
    ({"pipeline": 2, "tensor": 2}, 2),
    ({"pipeline": 2, "context": 2}, 2),
]
EXPERT_MESHES = [
    ({"expert": 2}, 1),
    ({"expert": 4}, 1),
    ({"tensor": 2}, 1),
    ({"fsdp": 2}, 1),
    ({"expert": 2, "tensor": 2}, 1),
    ({"expert": 2, "fsdp": 2}, 1),
    ({"expert": 2, "pipeline": 2}, 2),
]


def rows(recipe: str):
    wider = WIDER if recipe == "blockwise" else {}
    for name, model, meshes in (("dense", MODEL, DENSE_MESHES), ("experts", EXPERTS, EXPERT_MESHES)):
        model = model | wider | ({"expert_ffn_hidden_size": 256} if wider and name == "experts" else {})
        references = {}
        for mesh, microbatches in meshes:
            if microbatches not in references:
                references[microbatches] = first_gradients(make(recipe, model, microbatches=microbatches))
            expected = references[microbatches]
            found = first_gradients(make(recipe, model, mesh, microbatches))
            pairs = [*zip(found, expected, strict=True)]
            loss = max(abs(own[0] / other[0] - 1) for own, other in pairs)
            apart = [difference(own[1], other[1]) for own, other in pairs]
            yield name, mesh, microbatches, loss, min(apart), max(apart)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=[*LARGEST], action="append", help="by default all")
    parser.add_argument("--output", type=Path, help="add the rows to this file too")
    args = parser.parse_args(arguments)
    agree, lines = (
        True,
        ["| recipe | model | mesh | M | loss | least | largest | |", "|---|---|---|---|---|---|---|---|"],
    )
    for recipe in args.recipe or LARGEST:
        for model, mesh, microbatches, loss, least, largest in rows(recipe):
            fits = loss < LOSS and largest < LARGEST[recipe]
            agree &= fits
            name = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
            numbers = f"{loss:.1e} | {least:.1e} | {largest:.1e}"
            lines.append(f"| {recipe} | {model} | {name} | {microbatches} | {numbers} | {'' if fits else 'differs'} |")
            text, lines = "\n".join(lines) + "\n", []
            print(text, end="", flush=True)
            if args.output:
                with args.output.open("a", encoding="utf-8") as file:
                    file.write(text)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
