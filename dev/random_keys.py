"""Random keys of configs: `python dev/random_keys.py [--seed 1] [--seconds 600]`, or `--lines` for launch lines.

Draws a model, a mesh of virtual devices, and keys of the whole schema with values of their types and wrong ones. Those
that start-up refuses one by one are left out. Of the others it prints the summary, traces a step and an evaluation, and
makes the config small as `megajax verify` does: each must end in success or in a sentence. With `--lines` it draws
flags of Megatron-LM and translates the line. Prints what crashes; exit status 1 if something does.
"""

import os
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import yaml
from random_settings import Settings, draw_mesh, parser_of, search

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.config.megatron_flags import FLAGS, KEY, MANY, Flag
from megajax.errors import UserError
from megajax.mesh import build_mesh
from megajax.schema.config import Config
from megajax.tools.from_megatron.__main__ import read, translate
from megajax.tools.verify.shrink import shrink
from megajax.training.step import TrainProgram
from megajax.training.summary import summary

type Leaf = tuple[str, list[Settings]]  # a key, and the alternatives of its schema
SMALL: Settings = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 256}
ENCODER: Settings = {"kind": "layers", "num_layers": 2, "sequence_length": 32}
TOWER: Settings = {"image_token": 1, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 2, "grid": 4}
MODELS: tuple[Settings, ...] = (
    {},
    {"num_kv_heads": 2, "num_experts": 4, "experts_per_token": 2},
    {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    {"block_pattern": ["gated_deltanet", "dense"], "linear_attention": {"num_key_heads": 2, "num_value_heads": 4}},
    {"position": "relative", "encoder": ENCODER},
    {"vision": TOWER},
    {"mtp_layers": 1},
)
REST: Settings = {
    "batch": {"global_size": 16, "sequence_length": 64, "num_microbatches": 2},
    "data": {"kind": "synthetic"},
    "run": {"steps": 10},
}
NOT_DRAWN = ("logging.", "run.dir", "run.extensions")  # they write, or import
WRONG = ("null", "x", "[]", "{}", "[1]", "[a, b]", "{a: 1}", "true", "-1", "0", "nan", "''", "1.5", "10000000000")
WHOLE, NUMBERS = (0, 1, 1, 2, 2, 3, 4, 4, 8, 8, 16, 32, 64, 100, -1), (0, 0.1, 0.25, 0.5, 1.0, 2.0, 1e-3, 10)
TEXTS = ("x", "auto", "a.b", "1,2", "none", "byte", "ring", "adamw", "full")
OF_LINES = ("x", "1", "2", "[1]*2+[0]*2", "1,2", "(3,0)", "cosine", "none", "0:2 1K:4", "rope", "Et|t*2|tL", "aux_loss")
LINE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --train-iters 10 --lr 1e-3 --vocab-size 512 --mock-data"
)


def leaves(node: Settings, definitions: Settings, key: str = "") -> Iterator[Leaf]:
    """The keys that are no sections."""
    node = definitions[node["$ref"].split("/")[-1]] if "$ref" in node else node
    alternatives = node.get("anyOf") or node.get("oneOf") or [node]
    for one in alternatives:
        section = definitions[one["$ref"].split("/")[-1]] if "$ref" in one else one
        for name, inner in section.get("properties", {}).items():
            yield from leaves(inner, definitions, f"{key}.{name}" if key else name)
    if plain := [one for one in alternatives if "$ref" not in one and "properties" not in one]:
        yield key, plain


def draw_value(draw: random.Random, alternatives: Sequence[Settings]) -> str:
    """A value in YAML, mostly of the key's type."""
    if draw.random() < 0.08:
        return draw.choice(WRONG)
    one = draw.choice(alternatives)
    if one.get("enum"):
        return yaml.safe_dump(draw.choice(one["enum"])).split("\n")[0]
    match one.get("type"):
        case "boolean":
            return draw.choice(("true", "false"))
        case "integer":
            return str(draw.choice(WHOLE))
        case "number":
            return str(draw.choice(NUMBERS))
        case "null":
            return "null"
        case "array":
            items = [draw_value(draw, [one.get("items") or {}]) for _ in range(draw.choice((1, 2, 2, 3)))]
            return f"[{', '.join(items)}]"
        case "object":
            return draw.choice(("{}", "{a: 1}"))
    return draw.choice(TEXTS)


def draw_keys(draw: random.Random, keys: Sequence[Leaf], folder: Path) -> Settings:
    """A config's file, its overrides that start-up does not refuse by themselves, and a number of devices."""
    model, devices = SMALL | draw.choice(MODELS), draw.choice((1, 2, 4, 8))
    case: Settings = {"file": {"model": model} | REST, "devices": devices, "overrides": []}
    case["file"] |= {"mesh": draw_mesh(draw, devices, "num_experts" in model)}
    wanted = draw.choice((2, 3, 4, 6, 8))
    for key, alternatives in draw.sample(keys, 25):
        more = [*case["overrides"], f"{key}={draw_value(draw, alternatives)}"]
        try:
            check_mesh(loaded(case | {"overrides": more}, folder), devices)
        except UserError:
            continue
        case["overrides"] = more
        if len(more) == wanted:
            break
    return case


def loaded(case: Settings, folder: Path) -> Config:
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(case["file"]), encoding="utf-8")
    return load_config(path, case["overrides"])


def start(case: Settings, folder: Path) -> str:
    """What a run does before it compiles; never a difference."""
    config = loaded(case, folder)
    sizes = check_mesh(config, case["devices"])
    program = TrainProgram.build(config, build_mesh(sizes, jax.devices()[: case["devices"]]))
    summary(program, [])
    state, batch = program.abstract_state, program.abstract_batch
    jax.eval_shape(program.train_step, state, batch)
    jax.eval_shape(program.eval_step, state.weights, state.layer_state, batch)
    shrink(config, [sizes], 2)
    return ""


def draw_line(draw: random.Random) -> Settings:
    """A line that Megatron may know, and a number of devices."""
    words = LINE.split()
    known = [flag for flag in FLAGS.values() if flag.outcome == KEY]
    for size in ("--num-experts 4", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"):
        words += size.split() if draw.random() < 0.3 else []
    for flag in draw.sample(known, draw.choice((1, 2, 3, 4, 6, 8))):
        words += [f"--{flag.name}", *_words_of(draw, flag)]
    return {"line": words, "devices": draw.choice((1, 2, 4, 8))}


def _words_of(draw: random.Random, flag: Flag) -> list[str]:
    if not flag.takes_value:
        return []
    values: Any = {"int": WHOLE, "float": NUMBERS}.get(
        flag.kind, (*OF_LINES, *([flag.default] if flag.default else []))
    )
    return [str(draw.choice(values)) for _ in range(draw.choice((1, 2, 3)) if flag.kind == MANY else 1)]


def translate_line(case: Settings) -> str:
    """Never a difference."""
    translate(read(case["line"])[0], case["devices"])
    return ""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--lines", action="store_true", help="launch lines of Megatron-LM")
    options = parser.parse_args()
    if options.lines:
        return search(options, draw_line, translate_line)
    schema = Config.model_json_schema()
    keys = [leaf for leaf in leaves(schema, schema["$defs"]) if not leaf[0].startswith(NOT_DRAWN)]
    with TemporaryDirectory() as folder:
        of_folder = {"folder": Path(folder)}
        return search(options, partial(draw_keys, keys=keys, **of_folder), partial(start, **of_folder))


if __name__ == "__main__":
    sys.exit(main())
