"""Do megajax and Megatron-Core train the same model, step by step?

    python dev/compare_megatron.py --megatron PYTHON [--out FOLDER] [CASE ...]

Trains tiny models in FP32 on the CPU with both programs, from the same weights on the same batches, and prints a table
of the differences; the status is 1 if one is not as expected. PYTHON is that of an environment with megatron-core
0.19.2 and torch (its CPU build will do): for example

    python -m venv megatron && megatron/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    megatron/bin/pip install --no-deps megatron-core==0.19.2
    megatron/bin/pip install numpy einops pydantic packaging sympy jinja2 fsspec networkx typing-extensions filelock

With --record the table becomes docs/records/megatron_parity.md, with a picture. All cases take 15 minutes on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_parity.cases import CASES, STORED
from megatron_parity.compare import Difference, compare, curves, table, verdict

ROOT = Path(__file__).parents[1]
PATHS = (ROOT / "dev", ROOT / "tests/references")
# Compiling takes longer than all steps.
FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_parallel_codegen_split_count=1"
OF_JAX = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": FLAGS}
CURVES = ROOT / "tests/data_files/megatron_curves.json"  # of the cases of STORED
PAGE, PICTURE = ROOT / "docs/records/megatron_parity.md", ROOT / "docs/images/data/megatron_parity.json"
DRAWN = "v3_mla"  # the case of the picture


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="by default all")
    parser.add_argument("--megatron", metavar="PYTHON", help="trains; without it the runs in --out are compared")
    parser.add_argument("--out", type=Path, help="the folder of the runs; by default a temporary one")
    parser.add_argument("--record", action="store_true", help="write the page and the picture of the documentation")
    options = parser.parse_args()
    names = options.cases or [*CASES]
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"{unknown[0]} is none of {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        if options.megatron:
            run(out, options.megatron, names)
        found = {name: compare(CASES[name], out / name) for name in names}
        (out / "curves.json").write_text(curves(out, names, ("megajax", "megatron"), ("loss",)), encoding="utf-8")
        print(table(CASES, found))
        for name, each in found.items():
            for fact in each.facts:
                print(f"{name}: {fact}")
        if options.record:
            record(out, found)
    return int(any(verdict(CASES[name], each).isupper() for name, each in found.items()))


def run(out: Path, megatron: str, names: list[str]) -> None:
    """Train the cases with both programs, first with megajax, whose weights Megatron-Core gets."""
    paths = [*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **OF_JAX}
    for python, side in ((sys.executable, "megajax_side"), (megatron, "megatron_side")):
        subprocess.run([python, "-m", f"megatron_parity.{side}", str(out), *names], check=True, env=own)


def record(out: Path, found: dict[str, Difference]) -> None:
    """Write the table into the page, after its heading, the data of the picture, and the curves of the tests."""
    before, marker, _ = PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")
    PAGE.write_text(f"{before}{marker}\n{table(CASES, found)}", encoding="utf-8")
    CURVES.write_text(curves(out, [*STORED], ("megatron",), ("loss", "grad_norm")), encoding="utf-8")
    runs = {}
    for name, program in (("Megatron-Core", "megatron"), ("megajax", "megajax")):
        curve = json.loads((out / DRAWN / f"{program}.json").read_text(encoding="utf-8"))["curve"]
        kept = ("loss", "learning_rate", "grad_norm")
        runs[name] = [json.dumps({"step": i, **{key: row[key] for key in kept}}) for i, row in enumerate(curve, 1)]
    body = ",\n".join(f"{json.dumps(run)}: [\n{',\n'.join(lines)}\n]" for run, lines in runs.items())
    PICTURE.write_text(f'{{"settings": {{}},\n"runs": {{\n{body}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
