"""Random runs that are killed and started again: `python dev/random_resumes.py [--seed 1] [--seconds 600] [--gpu]`.

Draws a config until the time is up: model and mesh of virtual devices by random_meshes.py, or with `--gpu` a model of
random_kernels.py for one GPU, and data of files, forms of the optimizer's state, precision, schedules and savings of
their own. What start-up refuses is counted. Each other one is trained whole, and once more with a kill and a second
start: all that both log but times, and the state at the end, must be equal bit for bit; if the second start is on
another mesh, the losses up to rounding. Prints the config of each that differs or crashes; exit status 1 if there is
one. Its path has tests/references.
"""

import contextlib
import io
import json
import math
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

if "--gpu" in sys.argv:  # each sets jax's environment, so it comes before jax
    from random_kernels import draw_settings as draw_model_and_mesh
else:
    from random_meshes import draw_settings as draw_model_and_mesh

import jax
import numpy as np
from lab import write_text
from random_settings import Choices, Settings, draw_mesh, draw_section, parser_of, search
from trainers import Killed, KilledTrainer

from megajax.config import AXES, Config
from megajax.config.checks import check, check_mesh
from megajax.tools.verify.runs import canonical_state
from megajax.training.loop import Trainer

STEPS = 7
MOVED, ROUNDED = 2e-4, 2e-2  # relative differences of losses on another mesh, in FP32 and else
VOCABULARY = 300  # of random_meshes.py's models: it has a token for each byte
# Parts of the names of what may differ: times, memory, and figures of a save, which are logged once it has ended.
MEASURED = ("time", "second", "memory", "mfu", "checkpoint")
OPTIMIZER: Choices = (
    (0.4, "state", ("bfloat16", "int8")),
    (0.25, "offload", (0.4, 1.0)),
    (0.25, "ema_decay", (0.9,)),
)
SCHEDULE: Choices = (
    (1.0, "kind", ("cosine", "constant", "linear", "wsd", "inverse_sqrt")),
    (0.5, "warmup_steps", (3,)),
    (0.3, "delay_steps", (1,)),
)
TOKENS: Choices = (
    (0.6, "order", ("sequential", "megatron")),
    (0.5, "split", ("8,2,0",)),
    (0.3, "mask_end_of_document_loss", (True,)),
    (0.4, "reset_attention", (True,)),
    (0.3, "reset_positions", (True,)),
)
CHATS: Choices = (
    (1.0, "packing", ("none", "first_fit", "balanced")),
    (0.3, "order", ("sequential",)),
)
RUN: Choices = (
    (0.4, "checkpoint_interval", (1,)),
    (0.3, "eval_interval", (2,)),
    (0.2, "spike_factor", (1.001,)),
    (0.2, "max_rollbacks", (1,)),
)
LOGGING: Choices = ((0.2, "norms_interval", (2,)),)


def draw_data(draw: random.Random) -> Settings:
    kind = draw.choice(("synthetic", "indexed", "indexed", "indexed", "text", "chat"))
    if kind == "chat":
        return {"kind": kind, "train": "chats.jsonl", "tokenizer": "byte"} | draw_section(draw, CHATS)
    data: Settings = {"kind": kind} | draw_section(draw, TOKENS)
    if kind == "text":
        return data | {"train": "text.jsonl", "tokenizer": "byte"}
    if kind == "indexed":
        blend = [{"prefix": "first", "weight": 0.3}, {"prefix": "second", "weight": 0.7}]
        data["train"] = draw.choice(("first", blend))
        if draw.random() < 0.2:
            data["stages"] = [{"from_step": draw.choice((2, 4)), "train": "second"}]
    return data


def draw_case(draw: random.Random) -> Settings:
    """All sections of a config; `killed_at`, a step, and perhaps `second_mesh`."""
    settings = draw_model_and_mesh(draw)
    settings.pop("lora", None)  # there are no weights from which it could start
    settings.pop("checkpoint", None)
    if settings["model"]["vocab_size"] < VOCABULARY:
        settings["model"]["vocab_size"] = VOCABULARY
    settings["data"] = draw_data(draw)
    settings["optimizer"] |= draw_section(draw, OPTIMIZER)
    settings["schedule"] = draw_section(draw, SCHEDULE)
    settings["run"] = {"steps": STEPS, "checkpoint_interval": 2, "log_interval": 1} | draw_section(draw, RUN)
    settings["run"] |= {"eval_steps": draw.choice((0, 1)), "deterministic": True, "compilation_cache": "none"}
    settings["logging"] = {"tensorboard": False} | draw_section(draw, LOGGING)
    if "precision" not in settings:
        compute = draw.choice(("float32", "bfloat16", "float16"))
        precision: Settings = {"compute": compute, "accumulation": draw.choice(("float32", "bfloat16"))}
        settings["precision"] = precision
        if draw.random() < 0.3:
            precision["fp8"] = {"recipe": draw.choice(("current", "delayed", "blockwise"))}
    if settings["precision"].get("compute", "bfloat16") == "bfloat16" and draw.random() < 0.4:
        settings["optimizer"]["master"] = "split"
    if draw.random() < 0.2:
        size, length = (settings["batch"][key] for key in ("global_size", "sequence_length"))
        settings["batch"]["schedule"] = f"0: {size // 2}, {2 * size * length}: {size}"
    if draw.random() < 0.3:
        settings["checkpoint"] = {"local_dir": "local", "local_interval": 1}
        settings["run"]["checkpoint_interval"] = 4
    case = settings | {"killed_at": draw.randrange(1, STEPS)}
    if "mesh" in settings and draw.random() < 0.4:
        case["second_mesh"] = draw_mesh(draw, draw.choice((1, 2, 4, 8)), "num_experts" in settings["model"])
    return case


def numbers_of(run_dir: Path) -> dict[tuple[int, str], list[Any]]:
    """What was logged of each step but MEASURED, by name; of all lines with the name."""
    found: dict[tuple[int, str], list[Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if not any(part in name for part in MEASURED):
                found.setdefault((values["step"], name), []).append(value)
    return {key: value for key, value in found.items() if key[1] != "step"}


def devices_of(config: Config) -> list[Any]:
    return jax.devices()[: math.prod(getattr(config.mesh, axis) for axis in AXES)]


def trained(config: Config) -> Trainer:
    """A Trainer at the end of its run, which may go on from another one."""
    trainer = Trainer(config, devices_of(config))
    if status := trainer.run():
        raise RuntimeError(f"exit status {status}")
    return trainer


def kill(config: Config, step: int) -> None:
    """Train until a process is killed after `step`."""
    trainer = KilledTrainer(config, devices_of(config))
    trainer.killed_at = step
    with contextlib.suppress(Killed):
        trainer.run()
    trainer.checkpoints.close()  # the thread of a last save; a killed process has none


def differences(case: Settings) -> str:
    """What differs, in words."""
    settings = {key: value for key, value in case.items() if key not in ("killed_at", "second_mesh")}
    runs, second_mesh = [Path("whole"), Path("killed")], case.get("second_mesh", settings.get("mesh", {}))
    for path in (*runs, Path("local")):  # of which each run has a folder
        shutil.rmtree(path, ignore_errors=True)
    whole, first = (Config.model_validate(settings | {"run": settings["run"] | {"dir": str(path)}}) for path in runs)
    second = Config.model_validate(settings | {"mesh": second_mesh, "run": settings["run"] | {"dir": str(runs[1])}})
    for config in (first, second):
        check(config)
        check_mesh(config, len(devices_of(config)))
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            expected = trained(whole)
            kill(first, case["killed_at"])
            found = trained(second)
    except RuntimeError as error:
        return f"{shown.getvalue()}{error}"
    wanted, numbers = map(numbers_of, runs)
    if "second_mesh" in case:
        tolerance = MOVED if first.precision.compute == "float32" and not first.precision.fp8.chosen.is_on else ROUNDED
        losses = {key: values for key, values in wanted.items() if key[1] in ("loss", "eval_loss")}
        bad = [k for k, values in losses.items() if not np.allclose(numbers.get(k, [0.0]), values, rtol=tolerance)]
        return "\n".join(f"{key}: {numbers.get(key)} is not {wanted[key]}" for key in bad)
    keys = [key for key in wanted | numbers if numbers.get(key) != wanted.get(key)]
    words = [f"{key}: {numbers.get(key)} is not {wanted.get(key)}" for key in keys]
    states = [canonical_state(trainer.program, trainer.state) for trainer in (expected, found)]
    names = [name for name, array in states[0].items() if array.tobytes() != states[1][name].tobytes()]
    return "\n".join([*words, *(f"{name} differs" for name in names)])


def write_data() -> None:
    write_text("first")
    write_text("second", 23)
    draw = random.Random(1)
    words = ("one", "two", "three", "four", "five")
    sentences = [" ".join(draw.choices(words, k=draw.randrange(3, 12))) for _ in range(200)]
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in sentences)]
    lines += ["".join(json.dumps({"prompt": text, "completion": text[::-1]}) + "\n" for text in sentences)]
    for name, text in zip(("text", "chats"), lines, strict=True):
        Path(f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--gpu", action="store_true", help="on the first GPU, with its kernels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_data()
        return search(options, draw_case, differences)


if __name__ == "__main__":
    sys.exit(main())
