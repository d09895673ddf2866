"""The counts of operations that a test compares: `python dev/hlo_counts.py [--write]`.

Compiles CASES (`megajax compile`), for H200s and the last for a B200, and writes them to
tests/data/h200_hlo_counts.txt; without --write they are printed.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from compile_row import ROOT, run_apart

from megajax.console import user_errors
from megajax.tools.plan.compile import require_plugin

GOLDEN = ROOT / "tests/data/h200_hlo_counts.txt"
# The benchmark shapes at their full widths; two layers represent all layers. Two cases have loops over layers: of one
# layer, and four loops of two, whose gradients are joined.
CASES = (
    "configs/llama3_8b_l8.yaml mesh.fsdp=2 mesh.tensor=2 model.num_layers=2 precision.fp8.recipe=delayed --gpus 4",
    "configs/llama3_8b_l16_pipeline.yaml mesh.pipeline=2 model.num_layers=2 pipeline.schedule=zero_bubble --gpus 2",
    "configs/llama3_8b_l8_context.yaml mesh.context=2 model.num_layers=1 communication.context=ring --gpus 2",
    "configs/mixtral_l2.yaml mesh.data=1 mesh.expert=2 mesh.fsdp=2 remat.policy=full kernels.scan_unroll=1 --gpus 4",
    "configs/llama3_8b_l8.yaml mesh.fsdp=1 batch.global_size=2 kernels.scan_unroll=1",
    "configs/llama3_8b_l8.yaml mesh.fsdp=1 model.num_layers=1 precision.fp8.recipe=nvfp4 --device b200",
)


def golden(options: Sequence[str]) -> str:
    """The text of every case, each compiled in its own process, two at a time."""
    require_plugin()
    with ThreadPoolExecutor(max_workers=2) as pool:
        return "\n".join(pool.map(lambda case: run_apart([*case.split(), *options]), CASES))


def main(arguments: list[str]) -> int:
    """Compile and write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="directory of compiled steps, which are not compiled again")
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.relative_to(ROOT)}")
    args = parser.parse_args(arguments)
    with user_errors():
        text = golden([] if args.store is None else ["--store", args.store])
        if args.write:
            GOLDEN.write_text(text, encoding="utf-8")
            print(f"wrote {GOLDEN.relative_to(ROOT)}: look at its diff")
        else:
            print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
