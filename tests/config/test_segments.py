"""How the layer loops are cut, against hand-worked cases."""

import pytest

from megajax.config import Config
from megajax.layout.kinds import layer_kinds
from megajax.layout.segments import choose_unrolling, plan_segments, repeated
from megajax.layout.stages import slot_kinds


def make_config(num_layers, pattern=None, experts=None, **sections):
    model = {"num_layers": num_layers, "hidden_size": 8, "num_heads": 1, "vocab_size": 8, "sliding_window": 4}
    model |= {"layer_pattern": pattern} if pattern else {}
    model |= {"num_experts": 2, **experts} if experts else {}
    batch = {"global_size": 1, "sequence_length": 8}
    return Config.model_validate({"model": model, "batch": batch, **sections})


def plan(num_layers, platform="gpu", pattern=None, experts=None, sizes=None, **sections):
    segments = plan_segments(make_config(num_layers, pattern, experts, **sections), platform, sizes=sizes)
    return [(s.start, s.iterations, s.layers_per_iteration, s.group_size, s.policy.name) for s in segments]


@pytest.mark.smoke
def test_gpus_unroll_what_compiles_soon_and_cpus_nothing():
    assert plan(126) == [(0, 1, 126, 1, "none")]
    assert plan(8, platform="cpu") == [(0, 8, 1, 1, "none")]
    assert plan(8, kernels={"scan_unroll": 2}) == [(0, 2, 2, 1, "none"), (4, 2, 2, 1, "none")]


@pytest.mark.smoke
def test_long_loops_are_cut_in_eight_on_gpus():
    """What a loop saves is kept until its backward pass ends; a stage's buffers are kept anyway."""
    deep = [(12 * i, 12, 1, 1, "full") for i in range(8)]
    assert plan(96, remat={"policy": "full"}, sizes={"tensor": 8}) == deep  # GPT-3 175B
    uneven = plan(94, experts={"moe_layer_interval": 1})  # Qwen3-235B
    assert [loops for _, loops, *_ in uneven] == [11, 12, 12, 12, 11, 12, 12, 12]
    assert plan(96, "cpu", sizes={"tensor": 8}) == [(0, 96, 1, 1, "none")]
    stage = {"kernels": {"scan_unroll": 1}, "sizes": {"pipeline": 2}}
    assert plan(8, **stage) == [(0, 8, 1, 1, "none")]


@pytest.mark.smoke
def test_the_reason_for_loops_says_what_unrolled_layers_would_cost():
    config = make_config(96, experts={"moe_layer_interval": 1})
    kinds = layer_kinds(config.model)
    assert choose_unrolling(config, "gpu", kinds) == (1, "looped: unrolled they would take about 3 min to compile")
    assert choose_unrolling(config, "gpu", kinds[:4]) == (4, "unrolled: about 7 s of compilation")
    assert choose_unrolling(config, "cpu", kinds) == (1, "CPU")
    in_fp8 = make_config(96, experts={"moe_layer_interval": 1}, precision={"fp8": {"recipe": "current"}})
    assert choose_unrolling(in_fp8, "gpu", kinds[:36]).most == 36  # GPT-OSS-120B
    assert choose_unrolling(in_fp8, "gpu", kinds[:48]).most == 1  # Qwen3-30B-A3B
    assert choose_unrolling(config, "gpu", kinds[:48]).most == 48
    # Every round of a pipeline has its program, twice.
    sizes = {"pipeline": 4}
    assert choose_unrolling(config, "gpu", kinds[:24], sizes).most == 24
    assert choose_unrolling(config, "gpu", kinds[:26], sizes).most == 1


@pytest.mark.smoke
def test_bodies_hold_whole_periods_and_remat_groups():
    local = ("local",) * 5 + ("global",)
    # Gemma 3's 26 layers: four periods of six, and two layers that begin a fifth.
    assert plan(26, "cpu", local) == [(0, 4, 6, 1, "none"), (24, 1, 2, 1, "none")]
    assert plan(12, "cpu", remat={"policy": "full", "group": 3}) == [(0, 4, 3, 3, "full")]
    pair = ("local", "global")
    assert plan(12, "cpu", pair, remat={"policy": "full", "group": 3}) == [(0, 2, 6, 3, "full")]
    # The largest body up to the target that leaves no layers over, if it has more than half of the target's.
    four = {"kernels": {"scan_unroll": 4}}
    assert plan(15, "cpu", **four) == [(0, 5, 3, 1, "none")]
    assert plan(10, "cpu", **four) == [(0, 3, 3, 1, "none"), (9, 1, 1, 1, "none")]


@pytest.mark.smoke
def test_the_first_layers_can_have_a_policy_of_their_own():
    remat = {"policy": "full", "layers": 3}
    assert plan(8, remat=remat) == [(0, 1, 3, 1, "full"), (3, 1, 5, 1, "none")]
    assert plan(8, "cpu", remat=remat) == [(0, 3, 1, 1, "full"), (3, 5, 1, 1, "none")]


@pytest.mark.smoke
def test_layers_of_two_kinds_are_cut_where_their_pattern_changes():
    first, second = {"first_dense_layers": 3}, {"moe_layer_interval": 2}
    assert plan(61, "cpu", experts=first) == [(0, 3, 1, 1, "none"), (3, 58, 1, 1, "none")]
    assert [(start, loops) for start, loops, *_ in plan(61, experts=first)][:3] == [(0, 3), (3, 7), (10, 7)]
    assert plan(8, experts=first) == [(0, 1, 8, 1, "none")]  # one body of a GPU holds them all
    assert plan(8, "cpu", experts=second) == [(0, 4, 2, 1, "none")]
    assert plan(24, experts=second) == [(0, 1, 24, 1, "none")]
    assert plan(9, "cpu", experts=second) == [(0, 1, 1, 1, "none"), (1, 4, 2, 1, "none")]
    # A period of three with one of two: six.
    pair = ("local", "global")
    assert plan(12, "cpu", pair, experts={"moe_layer_interval": 3}) == [(0, 2, 6, 1, "none")]
    # The first group of three has a dense layer among its own; the policy ends among the others.
    remat = {"policy": "full", "group": 3, "layers": 9}
    expected = [(0, 1, 3, 3, "full"), (3, 2, 3, 3, "full"), (9, 3, 1, 1, "none")]
    assert plan(12, "cpu", experts={"first_dense_layers": 1}, remat=remat) == expected


@pytest.mark.smoke
def test_patterns_are_as_short_and_as_few_as_they_can_be():
    assert repeated("aaaa") == ((4, 1),)
    assert repeated("abab") == ((4, 2),)
    assert repeated("aaabab") == ((2, 1), (4, 2))  # not three of a, and then the rest
    assert repeated("abababa") == ((1, 1), (6, 2))
    assert repeated("abcabc") == ((6, 3),)
    assert repeated("") == ()


def test_every_loop_has_layers_of_the_same_kinds_where_stages_merge_their_patterns():
    model = {"num_layers": 24, "hidden_size": 8, "num_heads": 1, "vocab_size": 8, "num_experts": 2}
    model |= {"first_dense_layers": 1, "layer_pattern": ("local",) * 3 + ("global",), "sliding_window": 5}
    settings = {"model": model, "batch": {"global_size": 8, "num_microbatches": 8, "sequence_length": 16}}
    settings |= {"pipeline": {"layout": (5, 7, 6, 6)}, "remat": {"policy": "full", "layers": 1}}
    config = Config.model_validate(settings)
    kinds = slot_kinds(config, 4)
    assert [kind.window for kind in kinds] == [5, 5, 5, None, 5, None, 5, 5, None]
    segments = plan_segments(config, "cpu", kinds)
    assert sum(segment.count for segment in segments) == len(kinds)
    for segment in segments:
        for loop in range(segment.iterations):
            start = segment.start + loop * segment.layers_per_iteration
            assert (
                kinds[start : start + segment.layers_per_iteration]
                == kinds[segment.start : segment.start + segment.layers_per_iteration]
            )
