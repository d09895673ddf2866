"""Settings drawn at random and tried until the time is up; the other files of random settings use it."""

import argparse
import collections
import json
import math
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
from pydantic import ValidationError

from megajax.config import AXES
from megajax.errors import UserError

Settings = dict[str, Any]
# (probability, key, values): each setting is drawn by itself, so many configs are refused.
Choices = Iterable[tuple[float, str, tuple[Any, ...]]]
PACKED: Choices = (
    (1.0, "synthetic_documents", (3,)),
    (1.0, "reset_attention", (True,)),
    (0.6, "reset_positions", (True,)),
)
RECURRENT = {"gated_deltanet": "linear_attention", "kda": "kda", "mamba2": "mamba2"}  # blocks and their sections


def draw_section(draw: random.Random, choices: Choices) -> Settings:
    return {key: draw.choice(values) for probability, key, values in choices if draw.random() < probability}


def draw_hybrid(draw: random.Random, kind: str, heads: Settings, with_experts: bool) -> Settings:
    """Layers of a `RECURRENT` kind with `heads`, and others with attention among them or none."""
    own, other = (f"{kind}_moe" if with_experts and kind != "mamba2" else kind), "moe" if with_experts else "dense"
    return {"block_pattern": draw.choice(([own], [own, other], [own, own, other])), RECURRENT[kind]: heads}


def draw_mesh(draw: random.Random, devices: int, with_experts: bool) -> Settings:
    """Axis sizes whose product is `devices`, a power of 2, and sometimes the axes that divide the experts."""
    axes: list[str] = [axis for axis in AXES if axis != "expert" or with_experts]
    sizes = dict.fromkeys(map(str, AXES), 1)
    while math.prod(sizes.values()) < devices:
        sizes[draw.choice(axes)] *= 2
    folded = with_experts and draw.random() < 0.35
    return sizes | ({"experts_over": draw.sample(AXES[1:], draw.choice((1, 2, 2, 3)))} if folded else {})


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", type=json.loads, metavar="JSON", help="a combination that was printed, alone")
    return parser


def search(
    options: argparse.Namespace,
    draw_settings: Callable[[random.Random], Settings],
    differences: Callable[[Settings], str],
) -> int:
    """Print the settings that crash, or for which `differences` returns a text; the exit status.

    `differences` raises UserError or ValidationError for settings that are refused.
    """
    warnings.simplefilter("ignore")
    draw, counts, end = random.Random(options.seed), collections.Counter(), time.monotonic() + options.seconds
    while time.monotonic() < end and not (options.only and counts):
        settings = options.only or draw_settings(draw)
        try:
            shown = differences(settings)
            word = "differs" if shown else "agrees"
        except (UserError, ValidationError):
            word, shown = "refused", ""
        except Exception:
            word, shown = "crashes", traceback.format_exc()
        finally:
            jax.clear_caches()
        counts[word] += 1
        if word in ("differs", "crashes"):
            print(f"{word}: {json.dumps(settings)}\n{shown}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    return 1 if counts["differs"] or counts["crashes"] else 0
