"""Train steps compiled for GPUs that are not here: `python dev/gpu_table.py [--only TEXT] [--write]`.

Compiles each of CASES for each of GPUS in its own process, two at a time, and prints, or with --write records in
docs/records/gpu_table.md, the kernels that the step launches and its memory beside the GPU's. Needs jax's CUDA plugin,
like hlo_counts.py.
"""

import argparse
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from compile_row import ROOT, run_apart

from megajax.console import user_errors
from megajax.errors import InputError
from megajax.tools.compile import LIBRARY_CALLS
from megajax.tools.plan.compile import require_plugin
from megajax.tools.plan.targets import usable_bytes
from megajax.tools.profile import hlo, operations

RECORD, START = ROOT / "docs/records/gpu_table.md", "<!-- written by dev/gpu_table.py -->\n"
GPUS = ("a100", "l40s", "h100", "b200")
SMALL = "data.kind=synthetic batch.global_size=1 batch.num_microbatches=1 mesh.data=1 mesh.fsdp=1"
# One layer of a kind stands for all: the kernels are the same.
CASES = (
    "llama3_8b_l8 mesh.fsdp=1 model.num_layers=1 batch.global_size=1",
    "llama3_8b_l8 mesh.fsdp=1 model.num_layers=1 batch.global_size=1 data.reset_attention=true",
    "llama3_8b_l8 mesh.fsdp=1 model.num_layers=1 batch.global_size=1 model.head_dim=256 model.attention_softcap=50",
    "llama3_8b_l8 mesh.fsdp=1 model.num_layers=1 batch.global_size=1 precision.fp8.recipe=current",
    "mixtral_l2 mesh.data=1 model.num_layers=1 batch.global_size=1",
    "mixtral_l2 mesh.data=1 mesh.expert=2 model.num_layers=1 batch.global_size=2 --gpus 2",
    "mixtral_l2 mesh.data=1 model.num_layers=1 batch.global_size=1 precision.fp8.recipe=current",
    "mixtral_l2 mesh.data=1 model.num_layers=1 batch.global_size=1 precision.fp8.recipe=nvfp4",
    "qwen3_30b_l6 mesh.data=1 model.num_layers=1 batch.global_size=1",
    "qwen3_30b_l6 mesh.data=1 mesh.expert=2 model.num_layers=1 batch.global_size=2 precision.fp8.recipe=mxfp8 --gpus 2",
    f"models/gpt_oss_20b {SMALL} batch.sequence_length=4096 model.num_layers=2",
    f"dsv2lite_l6 {SMALL} model.num_layers=2",
    f"mamba2_2b {SMALL} model.num_layers=1",
    f"gated_deltanet_2b {SMALL} model.num_layers=1",
    f"kda_2b {SMALL} model.num_layers=1",
    f"qwen3_next_l4 {SMALL}",
    f"nemotron3_nano_l7 {SMALL}",
    f"models/kimi_linear_48b_a3b {SMALL} batch.sequence_length=4096 model.num_layers=4",
    f"models/flan_t5_large {SMALL} batch.sequence_length=512 model.num_layers=2",
    f"models/qwen3_vl_8b {SMALL} batch.sequence_length=4096 model.num_layers=3",
    f"models/modernbert_base {SMALL} batch.sequence_length=4096 model.num_layers=3 objective.kind=masked_tokens",
)
HEADER = ("config", "GPU", "kernels", "GiB", "GiB of the GPU")


def row(case: str, gpu: str) -> str:
    """A row of the table; of a config that is refused, the sentence."""
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "step.hlo"
        try:
            printed = run_apart([*case.split(), "--device", gpu, "--text", str(text)])
        except InputError as error:
            sentence = str(error).partition("megajax: error: ")[2] or str(error)
            return f"| `{case}` | {gpu.upper()} | refused: {sentence.splitlines()[0]} | | |"
        counts = Counter(name for op in hlo.parse(text.read_text(encoding="utf-8")) if (name := kernel(op)))
    [memory] = (line.split()[-2] for line in printed.splitlines() if line.strip().startswith("whole memory"))
    kernels = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"| `{case}` | {gpu.upper()} | {kernels} | {memory} | {usable_bytes(gpu) / 2**30:.1f} |"


def kernel(op: hlo.Op) -> str | None:
    """The name of the kernel of attention or of a matmul that an operation is."""
    own = "Hopper" if op.target.startswith("mosaic_gpu") else "Triton"
    if operations.ranged_attention(op):
        return f"attention ({own})"
    if operations.is_own_matmul(op, operations.EXPERTS_MATMULS):
        return f"experts' matmul ({own})"
    name = LIBRARY_CALLS.get(op.target)
    if name is None and op.kind == "custom-call" and op.target.startswith("__cudnn$fmha"):
        name = "cuDNN attention"
    return None if name is None else name.partition(",")[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this text in their config or GPU")
    parser.add_argument("--write", action="store_true", help=f"record all rows in {RECORD.relative_to(ROOT)}")
    args = parser.parse_args(arguments)
    with user_errors():
        require_plugin()
        wanted = [pair for pair in product(CASES, GPUS) if args.only in " ".join(pair)]
        with ThreadPoolExecutor(max_workers=2) as pool:
            rows = list(pool.map(lambda pair: row(*pair), wanted))
        table = "\n".join([f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}", *rows])
        if args.write:
            before = RECORD.read_text(encoding="utf-8").partition(START)[0]
            RECORD.write_text(f"{before}{START}\n{table}\n", encoding="utf-8")
        print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
