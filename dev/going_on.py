"""Does megajax go on with a training of Megatron-Core as Megatron-Core does?

    python dev/going_on.py --megatron PYTHON [--out FOLDER] [CASE ...]

megatron-core trains tiny models in FP32 on the CPU for 10 steps, saves a checkpoint with the state of its distributed
optimizer, and trains for 5 steps more. megajax goes on with the checkpoint on three meshes of 8 devices. Prints the
largest difference of the 5 losses; the status is 1 if one is above 1e-5. For PYTHON see dev/compare_megatron.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = ("llama", "gpt", "mixtral", "v3_mla")
TOLERANCE = 1e-5
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path += [str(ROOT / "dev"), str(ROOT / "tests/references")]

import jax  # noqa: E402
from megatron_parity.batches import batch  # noqa: E402
from megatron_parity.case import Case  # noqa: E402
from megatron_parity.cases import CASES  # noqa: E402
from megatron_parity.megajax_side import config_of  # noqa: E402

from megajax.config import Config  # noqa: E402
from megajax.config.checks import check_mesh  # noqa: E402
from megajax.mesh import build_mesh  # noqa: E402
from megajax.training.batches import to_global  # noqa: E402
from megajax.training.resuming import ResumePoint  # noqa: E402
from megajax.training.saving import StateSaver  # noqa: E402
from megajax.training.step import TrainProgram  # noqa: E402


def meshes(case: Case) -> list[dict[str, int]]:
    """Three meshes of 8 devices, on which a microbatch of two sequences fits."""
    own = "expert" if "num_experts" in case.model else "fsdp"
    pairs = (("pipeline", own), ("context", "data"), ("context", own))
    return [dict.fromkeys((*pair, "tensor"), 2) for pair in pairs]


def losses(case: Case, mesh: dict[str, int], run: Path, own: Path, count: int) -> list[float]:
    """megajax's, of the steps after the checkpoint in `run`."""
    plain = config_of(case).model_dump(exclude_unset=True)
    sections = {
        "mesh": mesh,
        "checkpoint": {"init_from": str(run), "init_state": "all"},
        "schedule": plain["schedule"] | {"delay_steps": 1},
        "run": plain["run"] | {"dir": str(own)},
    }
    config = Config.model_validate(plain | sections)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 8), jax.devices()))
    start = ResumePoint(StateSaver(program), lambda: None)  # pyright: ignore[reportArgumentType]  there are no checkpoints
    state, found = start.state(), []
    for step in range(start.step, start.step + count):
        fields = batch(case, step)
        del fields["documents"]
        state, metrics = program.train_step(state, to_global(program, fields))
        found.append(float(metrics["loss"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=MODELS, help=f"by default {' '.join(MODELS)}")
    parser.add_argument("--megatron", metavar="PYTHON", help="trains; without it the runs in --out are read")
    parser.add_argument("--out", type=Path, help="the folder of Megatron's runs; by default a temporary one")
    options = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        if options.megatron:
            command = [options.megatron, "-m", "megatron_parity.megatron_checkpoint", str(out), *options.cases]
            paths = [str(ROOT / "dev"), *filter(None, [os.environ.get("PYTHONPATH")])]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        for name in options.cases:
            expected = json.loads((out / name / "going_on.json").read_text(encoding="utf-8"))
            for mesh in meshes(CASES[name]):
                found = losses(CASES[name], mesh, out / name, Path(temporary) / "run", len(expected))
                difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
                worst = max(worst, difference)
                axes = ", ".join(f"{axis} {size}" for axis, size in mesh.items())
                print(f"{name}, {axes}: {difference:.1e}", flush=True)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
