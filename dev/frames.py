"""How deep the step is: the package's frames on the stack where the matmuls of an MLP are traced.

    python -m dev.frames [--list]

For each of CONFIGURATIONS: the frames of megajax/, from `train_step` to the column matmul of an MLP where it is first
traced, and to its row matmul; the number of their files; the frames of the deepest such matmul, backward pass included.
With --list the frames themselves, from the outside in.
"""

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from dev.programs.cases import Case
from dev.programs.lowering import modules, prepare

# Name: (width of the MLP on a device, which nothing else has; overrides). Layers of 3072 columns overlap with their
# transfers around the ring of `tensor`.
CONFIGURATIONS = {
    "BF16, fsdp 2 x tensor 2": (208, "mesh.fsdp=2"),
    "BF16 in a ring, fsdp 2 x tensor 2": (3120, "mesh.fsdp=2"),
    "FP8, fsdp 2 x tensor 2": (208, "mesh.fsdp=2 precision.fp8.recipe=delayed"),
    "FP8 in a ring, fsdp 2 x tensor 2": (3120, "mesh.fsdp=2 precision.fp8.recipe=delayed"),
    "BF16, pipeline 2 x tensor 2": (208, "mesh.pipeline=2 batch.num_microbatches=4"),
}
Frame = tuple[str, str, int]  # file, function, line


def main(arguments: list[str]) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the frames themselves")
    options = parser.parse_args(arguments)
    prepare()
    print(f"{'configuration':<36}{'matmul':<8}{'frames':>8}{'files':>8}{'deepest':>9}")
    for name, (width, overrides) in CONFIGURATIONS.items():
        case = Case("llama", f"mesh.tensor=2 model.ffn_hidden_size={2 * width} {overrides}", on_gpus=False)
        for kind, found in stacks(case, width).items():
            first, deepest = found[0], max(map(len, found))
            print(f"{name:<36}{kind:<8}{len(first):>8}{len({file for file, _, _ in first}):>8}{deepest:>9}")
            if options.list:
                print("\n".join(f"    {file}:{line} {function}" for file, function, line in first))
    return 0


def stacks(case: Case, width: int) -> dict[str, list[list[Frame]]]:
    """The package's frames, outermost first, at each traced matmul of an MLP; the first is of a forward pass."""
    from jax.lax import dot_general_p

    import megajax

    package, found, bind = Path(str(megajax.__file__)).parent, dict[str, list[list[Frame]]](), dot_general_p.bind

    def recorded(*operands: Any, **parameters: Any) -> Any:
        result = bind(*operands, **parameters)
        if 2 * width in result.shape:  # gate and up together
            found.setdefault("column", []).append(_frames(package))
        elif width in operands[0].shape and found:
            found.setdefault("row", []).append(_frames(package))
        return result

    with mock.patch.object(dot_general_p, "bind", recorded):
        modules(case)
    return found


def _frames(package: Path) -> list[Frame]:
    frame, frames = sys._getframe(2), list[Frame]()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(package):
            frames.append((str(path.relative_to(package.parent)), frame.f_code.co_qualname, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
