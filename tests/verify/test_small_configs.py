"""Every named config and model can be made small: no size of it stays large."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from megajax.config import AXES, load_config
from megajax.tools.verify.shrink import Precision, shrink

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
MOST = 64
OTHERS = {"vocab_size": 250, "vocab_multiple": 128, "relative_max_distance": 128, "image_token": 249}
OTHERS |= {"patches_per_row": 1024, "original_max_positions": 2**14}  # is scaled with the sequence
RECURRENT = {"linear_attention", "kda", "mamba2"}  # heads have the widths of kernels


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """All integers of nested values, with the key of each."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from numbers(each, key)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from numbers(each, name)
    elif type(value) is int:
        yield name, value


def test_no_size_of_a_named_config_stays_large():
    schedules = set()
    for path, precision in zip(CONFIGS, itertools.cycle(get_args(Precision)), strict=False):
        needed = ["batch.global_size=8", "batch.sequence_length=512", "data.kind=synthetic"]
        if path.name.startswith("modernbert"):
            needed += ["objective.kind=masked_tokens", "objective.masking.mask_token=1"]
        config = load_config(path, needed if path.parent.name == "models" else [])
        small, _ = shrink(config, [dict.fromkeys(AXES, 1)], 2, precision)
        large = {
            (key, size)
            for key, size in numbers(small.model.model_dump(exclude=RECURRENT))
            if size > OTHERS.get(key, MOST)
        }
        assert not large, path.name
        patterns = (config.model.block_pattern, config.model.layer_pattern, config.model.rope_pattern)
        assert small.model.num_layers <= max(12, *(len(pattern or ()) for pattern in patterns)), path.name
        assert (small.model.encoder.num_layers or 0) <= 2, path.name
        assert small.model.vision is None or (small.model.vision.num_layers, small.model.vision.patch_size) <= (2, 2)
        assert precision != "fp8" or small.precision.fp8.amax_history_length <= 4, path.name
        schedules.add(repr(small.schedule))
    assert len(schedules) == 1 and len(CONFIGS) > 60


def test_factors_of_rotary_frequencies_are_as_many_as_the_small_pairs():
    factors = str([1.0] * 64).replace(" ", "")
    scaling = (
        f"{{kind: longrope, factor: 4, original_max_positions: 256, short_factors: {factors}, long_factors: {factors}}}"
    )
    config = load_config(CONFIGS[0].parent / "llama3_8b.yaml", [f"model.rope_scaling={scaling}"])
    small, _ = shrink(config, [dict.fromkeys(AXES, 1)], 2)
    assert small.model.rope_scaling is not None and small.model.head_dim is not None
    for found in (small.model.rope_scaling.short_factors, small.model.rope_scaling.long_factors):
        assert found is not None and len(found) == small.model.head_dim // 2
