"""FLOPs and time of linear recurrences in the planner; tests/data/time_rows.txt has measured steps."""

import pytest
import time_table

from megajax.config import load_config
from megajax.estimate.costs import flops_per_token
from megajax.tools.plan import work
from megajax.tools.plan.rates import rates_of

MODELS = {
    # Projections of queries, keys, values, gates, strengths and decays, the output; four products of a head's state
    "gated_deltanet_2b": 24 * (2048 * (4 * 2048 + 2 * 16) + 2048 * 2048 + 4 * 16 * 128 * 128 + 3 * 2048 * 5632),
    # Projections of queries, keys, values and strengths, those of rank 128 of decays and gates, the output; the same
    "kda_2b": 24 * (2048 * (4 * 2048 + 16) + 2 * 128 * (2048 + 2048) + 4 * 16 * 128 * 128 + 3 * 2048 * 5632),
    # Projections of gates, values, keys, queries and steps, the output; three and a half products
    "mamba2_2b": 48 * (2048 * (2 * 4096 + 2 * 128 + 64) + 4096 * 2048 + 7 * 64 * 64 * 128 // 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_the_matmuls_and_of_the_states(name):
    config = load_config(time_table.ROOT / f"configs/{name}.yaml")
    assert flops_per_token(config) == 6 * (MODELS[name] + 2048 * 128256)


def test_devices_of_tensor_share_a_recurrence_and_without_kernels_it_is_slow():
    def step(*overrides: str, gpus: int = 1):
        return time_table.estimate(time_table.Row(False, 1.0, "configs/gated_deltanet_2b.yaml", overrides, gpus))[1]

    whole, shared = (step("mesh.data=1", f"mesh.tensor={n}", gpus=n) for n in (1, 2))
    assert shared.attention == pytest.approx(whole.attention / 2) and whole.attention > 0
    sequence = step("mesh.data=1", "mesh.context=2", gpus=2)  # the map of the state over the tokens comes first
    assert sequence.attention == pytest.approx(1.67 * whole.attention / 2)
    in_chunks = step("kernels.linear_attention=reference")
    assert in_chunks.attention > 5 * whole.attention and in_chunks.matmuls == whole.matmuls


def test_time_of_a_recurrence_is_that_of_its_bytes():
    """16,384 tokens of 24 layers with 16 heads of 128, in BF16 with states in FP32, at the H100's rate of copies."""
    rate, passes = rates_of("h100").memory_bytes, (work.MIXED_PASSES, work.DECAY_PASSES, work.STATE_PASSES)
    mixed, states = 2 * 4 * 2048, 4 * 16 * 128 * 128 / 64
    for name, decays in {"gated_deltanet_2b": 16, "kda_2b": 2048}.items():
        row = time_table.Row(
            False, 1.0, f"configs/{name}.yaml", ("batch.global_size=4", "batch.num_microbatches=1"), 1, "h100"
        )
        moved = sum(n * p for n, p in zip((mixed, 4 * decays, states), passes, strict=True))
        assert time_table.estimate(row)[1].attention == pytest.approx(24 * 16384 * moved / rate)
