"""Random models on random meshes that generate: `python dev/random_generation.py [--seed 1] [--seconds 600]`.

Each token that a model continues four prompts with, from its caches and states, in FP32, with and without drafts of its
prediction modules, must be the likeliest by a forward pass of the whole sequence on one device. Prints each model for
which one is not; exit status 1 if there is one. Its path has tests/references.
"""

import math
import random
import sys

from random_meshes import draw_model  # isort: skip  # before jax: it sets the number of devices
import numpy as np
from models_in_use import build
from random_settings import Settings, draw_mesh, parser_of, search

from megajax.config import Config
from megajax.config.checks import check
from megajax.inference.generation import Generator
from megajax.inference.sampling import Sampling

PROMPTS, TOKENS = [[1, 2, 3, 4, 5], [7] * 9, [11, 12, 13], [*range(20, 37)]], 10
CLOSE = 1e-3  # of the logits' standard deviation: numbers that rounding may swap


def draw_case(draw: random.Random) -> Settings:
    """`context` has no part in generation; capacities would depend on how many tokens there are at once."""
    model: Settings = {**draw_model(draw), "init_std": 0.2, "dropout": 0.0}
    model["num_layers"] = min(model["num_layers"], 4)
    if "max_positions" in model:
        model["max_positions"] = 256
    for key in ("capacity_factor", "drop_policy", "jitter", "force_balance"):
        model.get("router", {}).pop(key, None)
    sizes = draw_mesh(draw, draw.choice((2, 4, 4, 8, 8, 8)), "num_experts" in model)
    sizes.pop("experts_over", None)
    for key in ("vision", "encoder", "causal", "prefix_lm"):  # a prompt is tokens, which it continues
        model.pop(key, None)
    sizes |= {"context": 1, "pipeline": math.gcd(sizes["pipeline"], model["num_layers"])}
    return {"model": model, "mesh": sizes, "drafts": draw.choice((0, 2)) if model.get("mtp_layers") else 0}


def differences(case: Settings) -> str:
    batch = {"global_size": 1, "sequence_length": 256}
    check(Config.model_validate({"model": case["model"], "data": {"kind": "synthetic"}, "batch": batch}))
    model, rows = build(case["model"], case["mesh"], speculate=case["drafts"]), []
    prompts = PROMPTS * max(1, math.prod(case["mesh"][axis] for axis in ("data", "fsdp", "expert")) // len(PROMPTS))
    *_, continued = Generator(model, Sampling(temperature=0)).tokens(prompts, TOKENS)
    length = max(map(len, prompts)) + TOKENS
    whole = [[*prompt, *map(int, tokens)] for prompt, tokens in zip(prompts, continued, strict=True)]
    logits = np.asarray(build(case["model"], {})(np.array([row + [0] * (length - len(row)) for row in whole])))
    for prompt, row, own in zip(prompts, whole, logits, strict=True):
        places = np.arange(len(prompt), len(row))
        below = own[places - 1].max(axis=1) - own[places - 1, np.array(row)[places]]
        rows.append(float((below / own[places - 1].std(axis=1)).max()))
    return f"below the largest logit: {rows}" if not max(rows) < CLOSE else ""


def main() -> int:
    return search(parser_of(__doc__).parse_args(), draw_case, differences)


if __name__ == "__main__":
    sys.exit(main())
