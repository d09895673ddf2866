"""The mesh table of Muon: `python dev/muon_table.py [--steps 20] [--output FILE]`.

On every mesh the optimizer takes steps with the same given gradients, in FP32 on 8 virtual CPU devices; the weights are
compared with plain NumPy's in float64 (tests/references/muon.py). Prints a markdown table; exit status 1 if a row is
outside the tolerance.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/references"))
import virtual_devices

os.environ.update(virtual_devices.ENVIRONMENT)

from muon import muon_cases

TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    args, start = parser.parse_args(), time.perf_counter()
    lines = [
        f"Muon on meshes of virtual CPU devices, FP32, {args.steps} steps on given gradients. Difference: the largest",
        f"of any weight from plain NumPy, over the root mean square of its array; tolerance {TOLERANCE:.0e}. Rounds:",
        "`one` if a device computes all its matrices of a shape at once, else `each`, one by one.",
        "",
        "| model | mesh | settings | pipeline | rounds | difference |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    print("\n".join(lines), flush=True)
    wrong = 0
    for case in muon_cases():
        difference = case.difference(args.steps)
        wrong += not difference <= TOLERANCE
        mesh = " × ".join(f"{axis} {size}" for axis, size in case.mesh.items() if size != 1) or "one device"
        settings = ", ".join(f"{name}: {value}" for name, value in case.muon.items()) or "defaults"
        layout = ", ".join(f"{name} {value}" for name, value in case.sections.get("pipeline", {}).items())
        rounds = "each" if case.chunk else "one"
        lines.append(f"| {case.model} | {mesh} | {settings} | {layout} | {rounds} | {difference:.1e} |")
        print(lines[-1], flush=True)
    count = len(muon_cases())
    lines += ["", f"**All {count} rows agree.**" if not wrong else f"**{wrong} of {count} rows differ.**"]
    print("\n".join(lines[-2:]))
    print(f"{time.perf_counter() - start:.0f} seconds", file=sys.stderr)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
