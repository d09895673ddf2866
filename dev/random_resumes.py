"""Random runs that are killed and started again: `python dev/random_resumes.py [--seed 1] [--seconds 600] [--gpu]`.

Draws a config until the time is up: model and mesh of virtual devices by random_meshes.py, or with `--gpu` a model of
random_kernels.py for one GPU, and data of files, forms of the optimizer's state, precision, schedules and savings of
their own. What start-up refuses is counted. Each other one is trained whole, and once more with a kill and a second
start: all that both log but times, and the state at the end, must be equal bit for bit. Prints the config of each that
differs or crashes; exit status 1 if there is one. Its path has tests/references.
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
from lab import write_text
from random_settings import Choices, Settings, draw_section, parser_of, search
from trainers import Killed, KilledTrainer

from megajax.config import AXES, Config
from megajax.config.checks import check, check_mesh
from megajax.tools.verify.runs import canonical_state
from megajax.training.loop import Trainer

STEPS = 7
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
    """All sections of a config and `killed_at`, a step."""
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
    return settings | {"killed_at": draw.randrange(1, STEPS)}


def numbers_of(run_dir: Path) -> dict[tuple[int, str], list[Any]]:
    """What was logged of each step but MEASURED, by name; of all lines with the name."""
    found: dict[tuple[int, str], list[Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if not any(part in name for part in MEASURED):
                found.setdefault((values["step"], name), []).append(value)
    return {key: value for key, value in found.items() if key[1] != "step"}


def trained(config: Config, killed_at: int | None = None) -> Trainer:
    """A Trainer at the end of its run, which was started twice if it was killed."""
    devices = jax.devices()[: math.prod(getattr(config.mesh, axis) for axis in AXES)]
    if killed_at is not None:
        first = KilledTrainer(config, devices)
        first.killed_at = killed_at
        with contextlib.suppress(Killed):
            first.run()
        first.checkpoints.close()  # the thread of a last save; a killed process has none
    trainer = Trainer(config, devices)
    if status := trainer.run():
        raise RuntimeError(f"exit status {status}")
    return trainer


def differences(case: Settings) -> str:
    """What differs, in words."""
    settings = {key: value for key, value in case.items() if key != "killed_at"}
    runs = [Path("whole"), Path("killed")]
    for path in (*runs, Path("local")):  # of which each run has a folder
        shutil.rmtree(path, ignore_errors=True)
    first, second = (Config.model_validate(settings | {"run": settings["run"] | {"dir": str(path)}}) for path in runs)
    check(first)
    check_mesh(first, math.prod(getattr(first.mesh, axis) for axis in AXES))
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            whole, killed = trained(first), trained(second, case["killed_at"])
    except RuntimeError as error:
        return f"{shown.getvalue()}{error}"
    expected, found = map(numbers_of, runs)
    keys = [key for key in expected | found if found.get(key) != expected.get(key)]
    words = [f"{key}: {found.get(key)} is not {expected.get(key)}" for key in keys]
    states = [canonical_state(trainer.program, trainer.state) for trainer in (whole, killed)]
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
