"""The pipeline's stages: which layers they have, and everything that they must fit; all numbers worked out by hand."""

import itertools
import re
import warnings
from collections.abc import Sequence

import pytest
from config_errors import first_place

from megajax.config import Config, load_config
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.layout.kinds import layer_kinds
from megajax.layout.segments import layer_seconds
from megajax.layout.stages import (
    count_layer_slots,
    gathered_slots,
    in_step,
    layer_slots,
    layout_in_step,
    virtual_stages,
)

pytestmark = pytest.mark.usefixtures("base_config")

BASE = """\
model:
  num_layers: 12
  hidden_size: 64
  num_heads: 8
  vocab_size: 1000
  sliding_window: 8
batch: {global_size: 24, num_microbatches: 12, sequence_length: 32}
data: {kind: synthetic}
"""
PATTERN = "model.layer_pattern=[local,global]"


def load(overrides: str) -> Config:
    return load_config("x.yaml", settings(overrides))


def settings(overrides: str) -> list[str]:
    return re.split(r" (?=\w+\.[\w.]+=)", overrides) if overrides else []


def many(stages: int, rounds: int, layers: int, layout: str = "null", pattern: Sequence[str] = ("local",)) -> Config:
    """That number of layers and stages, with microbatches to suit."""
    sizes = f"model.layer_pattern=[{','.join(pattern)}] "
    sizes += (
        f"mesh.pipeline={stages} pipeline.virtual_stages={rounds} model.num_layers={layers} pipeline.layout={layout}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(f"{sizes} batch.global_size={stages} batch.num_microbatches={stages}")


# Which layers

LAYOUTS = [
    # stages, rounds, layers, layers of each virtual stage, the slot of the first layer of the first
    (1, 1, 5, [5], 0),
    (1, 3, 5, [5], 0),
    (4, 1, 12, [3, 3, 3, 3], 0),
    (2, 2, 12, [3, 3, 3, 3], 0),
    (12, 1, 12, [1] * 12, 0),
    # 2 of 128 slots empty
    (16, 1, 126, [7, *[8] * 14, 7], 1),
    (4, 4, 126, [7, *[8] * 14, 7], 1),
    # one or two virtual stages too many: the last is empty, then the first, as in Llama 3 405B
    (16, 8, 126, [0, *[1] * 126, 0], 1),
    (2, 2, 3, [1, 1, 1, 0], 0),
    # 7 of 16 slots empty: last, first, 6, 1, 5, 2, 4
    (8, 1, 9, [1, 1, 1, 2, 1, 1, 1, 1], 1),
    (8, 1, 12, [1, 1, 2, 2, 2, 2, 1, 1], 1),
    (8, 1, 11, [1, 1, 2, 2, 2, 1, 1, 1], 1),
    # 1 of 12 empty: the last
    (4, 1, 11, [3, 3, 3, 2], 0),
    # 4 of 25 empty: last, first, last, first; at 19 of 20: last
    (5, 1, 21, [3, 5, 5, 5, 3], 2),
    (5, 1, 19, [4, 4, 4, 4, 3], 0),
    # of three the middle one keeps its own longest
    (3, 1, 4, [1, 2, 1], 1),
    (3, 1, 7, [2, 3, 2], 1),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("stages", "rounds", "layers", "layout", "first"), LAYOUTS)
def test_layers_are_even_with_the_fewest_at_both_ends(stages, rounds, layers, layout, first):
    config = many(stages, rounds, layers)
    ranges = virtual_stages(config, stages)
    assert [len(one) for one in ranges] == layout
    assert [layer for one in ranges for layer in one] == list(range(layers))
    assert count_layer_slots(config, stages) == max(layout)
    starts = (first, *[0] * (len(layout) - 1))
    slots = [[*range(start, start + count)] for start, count in zip(starts, layout, strict=True)]
    assert [list(own) for own in layer_slots(config, stages)] == slots


def test_a_given_layout_is_in_the_models_order():
    config = many(2, 2, 12, "[2, 5, 4, 1]")
    assert virtual_stages(config, 2) == (range(0, 2), range(2, 7), range(7, 11), range(11, 12))
    assert count_layer_slots(config, 2) == 5
    assert [slots[0] for slots in layer_slots(config, 2)] == [3, 0, 0, 0]
    assert virtual_stages(config, 1) == (range(12),)


IN_STEP = [
    # layout, period, whether every slot has the same place in the pattern
    ((3, 3, 3, 3), 1, True),
    ((3, 3, 3, 3), 2, False),
    ((4, 4, 4), 2, True),
    ((4, 4, 4), 4, True),
    ((2, 4, 4, 2), 2, True),
    # layers 0 .. 6 in slots 1 .. 7: a pattern of 4 goes on with layer 7 in slot 0
    ((7, 8, 8, 1), 4, True),
    ((7, 8, 8, 1), 2, True),
    ((7, 4, 8, 1), 4, True),
    ((7, 6, 8, 1), 4, False),
    ((6, 6, 3), 3, True),
    ((6, 6, 3), 4, False),
    ((5, 7), 2, False),
    ((7, 5), 2, False),
    ((8, 5), 2, True),
    ((5, 8), 2, True),
]


@pytest.mark.parametrize(("layout", "period", "expected"), IN_STEP)
def test_a_layout_is_in_step_where_each_slot_has_one_place_in_the_pattern(layout, period, expected):
    assert in_step(layout, period) == expected
    config = many(len(layout), 1, sum(layout), str(list(layout)))
    places = [set() for _ in range(count_layer_slots(config, len(layout)))]
    for layers, slots in zip(virtual_stages(config, len(layout)), layer_slots(config, len(layout)), strict=True):
        for layer, slot in zip(layers, slots, strict=True):
            places[slot].add(layer % period)
    assert all(len(found) == 1 for found in places) == expected


@pytest.mark.parametrize(
    ("layers", "count", "period", "layout"),
    [
        (12, 4, 2, (2, 4, 4, 2)),
        (126, 16, 2, (7, *[8] * 14, 7)),
        (9, 2, 2, (6, 3)),
        (10, 4, 4, (1, 4, 4, 1)),
        (16, 4, 4, (4, 4, 4, 4)),
        (9, 4, 4, None),
        (3, 3, 2, None),
        (3, 4, 2, None),
    ],
)
def test_a_layout_in_step_is_found(layers, count, period, layout):
    assert layout_in_step(layers, count, period) == layout


# Errors

REFUSED = {
    # more stages than layers
    "mesh.pipeline=8 pipeline.virtual_stages=2": (
        "mesh.pipeline=8 x pipeline.virtual_stages=2 makes 16 virtual stages, but model.num_layers=12 allows at"
        " most 14, two of them empty (@): set pipeline.virtual_stages to 1."
    ),
    "mesh.pipeline=4 pipeline.virtual_stages=4": (
        "mesh.pipeline=4 x pipeline.virtual_stages=4 makes 16 virtual stages, but model.num_layers=12 allows at"
        " most 14, two of them empty (@): set pipeline.virtual_stages to 3 or less."
    ),
    "mesh.pipeline=16 pipeline.virtual_stages=2": (
        "mesh.pipeline=16 x pipeline.virtual_stages=2 makes 32 virtual stages, but model.num_layers=12 allows at"
        " most 14, two of them empty (@): set mesh.pipeline to 7 or less."
    ),
    "mesh.pipeline=16": "mesh.pipeline=16 is more than model.num_layers=12 (@): use 12 or less.",
    # the layout
    "pipeline.layout=[6,6] mesh.pipeline=4": (
        "pipeline.layout=[6, 6] has 2 numbers, but mesh.pipeline=4 needs 4 (@): write 4 numbers that add"
        " up to model.num_layers=12, or set it to null for [3, 3, 3, 3]."
    ),
    "pipeline.layout=[3,3,3,3] mesh.pipeline=2 pipeline.virtual_stages=4": (
        "pipeline.layout=[3, 3, 3, 3] has 4 numbers, but mesh.pipeline=2 x pipeline.virtual_stages=4 needs 8"
        " (@): write 8 numbers that add up to model.num_layers=12, or set it to null for [1, 1, 2, 2, 2,"
        " 2, 1, 1]."
    ),
    "pipeline.layout=[6,0,6] mesh.pipeline=3": (
        "pipeline.layout=[6, 0, 6] leaves an inner virtual stage without layers (@): give it one or"
        " more, or set it to null for [4, 4, 4]."
    ),
    "pipeline.layout=[4,4,5] mesh.pipeline=3": (
        "pipeline.layout=[4, 4, 5] adds up to 13, not to model.num_layers=12 (@): make it 12, or set it"
        " to null for [4, 4, 4]."
    ),
    # microbatches: 3 of 2 + 3 ticks, 3 of 3 * 2 + 3
    "batch.num_microbatches=2 mesh.pipeline=4": (
        "batch.num_microbatches=2 is less than mesh.pipeline=4, so stages would be idle for up to 60% of"
        " a step (@): use 4, 6, 8, 12 or 24."
    ),
    "batch.num_microbatches=3 mesh.pipeline=4 pipeline.virtual_stages=2": (
        "batch.num_microbatches=3 is less than mesh.pipeline=4, so stages would be idle for up to 33% of"
        " a step (@): use 4, 8, 12 or 24."
    ),
    "batch.num_microbatches=2 mesh.pipeline=4 mesh.data=2 mesh.fsdp=2": (
        "batch.num_microbatches=2 is less than mesh.pipeline=4, so stages would be idle for up to 60% of"
        " a step (@): use 6."
    ),
    "batch.num_microbatches=2 mesh.pipeline=4 mesh.data=12": (
        "batch.num_microbatches=2 is less than mesh.pipeline=4, so stages would be idle for up to 60% of"
        " a step (@): use 4, and make batch.global_size a multiple of 48."
    ),
    "batch.num_microbatches=6 mesh.pipeline=4 pipeline.virtual_stages=2": (
        "batch.num_microbatches=6 is not a multiple of mesh.pipeline=4, which pipeline.virtual_stages=2 needs"
        " (@): use 4, 8, 12 or 24."
    ),
    # the pattern of layers
    f"mesh.pipeline=4 {PATTERN}": (
        "mesh.pipeline=4 makes virtual stages of [3, 3, 3, 3] layers, and with"
        " model.layer_pattern=[local, global] they have different kinds of layers (@): set"
        " pipeline.layout=[2, 4, 4, 2]."
    ),
    "mesh.pipeline=4 model.rope_pattern=[rope,none]": (
        "mesh.pipeline=4 makes virtual stages of [3, 3, 3, 3] layers, and with"
        " model.rope_pattern=[rope, none] they have different kinds of layers (@): set"
        " pipeline.layout=[2, 4, 4, 2]."
    ),
    f"mesh.pipeline=4 pipeline.virtual_stages=3 {PATTERN}": (
        "mesh.pipeline=4 x pipeline.virtual_stages=3 makes virtual stages of [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,"
        " 1] layers, and with model.layer_pattern=[local, global] they have different kinds of layers"
        " (@): set pipeline.virtual_stages=1 and pipeline.layout=[2, 4, 4, 2]."
    ),
    f"pipeline.layout=[5,7] mesh.pipeline=2 {PATTERN}": (
        "pipeline.layout=[5, 7] and model.layer_pattern=[local, global] give virtual stages with"
        " different kinds of layers (@): set pipeline.layout=[6, 6]."
    ),
    f"mesh.pipeline=12 {PATTERN}": (
        "mesh.pipeline=12 makes virtual stages of [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1] layers, and with"
        " model.layer_pattern=[local, global] they have different kinds of layers (@): use fewer stages,"
        " so that each has a multiple of 2 layers."
    ),
    # precision
    "remat.policy=offload mesh.pipeline=2": (
        "remat.policy=offload cannot be combined with mesh.pipeline=2, because a pipeline keeps its"
        " saved activations on the GPU (@): use full, selective or save_matmuls."
    ),
    "precision.fp8.first_bf16_layers=1 precision.fp8.recipe=current mesh.pipeline=2": (
        "precision.fp8.first_bf16_layers=1 cannot be combined with mesh.pipeline=2, because all stages"
        " run the same program (@): set precision.fp8.first_bf16_layers=0, or mesh.pipeline=1."
    ),
    "precision.fp8.first_bf16_layers=1 precision.fp8.last_bf16_layers=2 precision.fp8.recipe=delayed mesh.pipeline=2": (
        "precision.fp8.first_bf16_layers=1 and precision.fp8.last_bf16_layers=2 cannot be combined with"
        " mesh.pipeline=2, because all stages run the same program (@): set"
        " precision.fp8.first_bf16_layers=0 and precision.fp8.last_bf16_layers=0, or mesh.pipeline=1."
    ),
    # the loop over slots
    "kernels.scan_unroll=4 mesh.pipeline=4": (
        "kernels.scan_unroll=4 does not divide the 3 layers of the largest virtual stage of mesh.pipeline=4 (@):"
        " use 1 or 3."
    ),
    "remat.layers=4 remat.policy=full mesh.pipeline=2 pipeline.virtual_stages=2": (
        "remat.layers=4 is more than the 3 layers of the largest virtual stage of mesh.pipeline=2 x"
        " pipeline.virtual_stages=2 (@): use 3 or less, or null for all."
    ),
    "remat.group=4 remat.policy=full mesh.pipeline=2": (
        "remat.group=4 does not divide the 6 recomputed layers in the largest virtual stage of"
        " mesh.pipeline=2 (@): use 1, 2, 3 or 6."
    ),
    "remat.group=2 remat.policy=full remat.layers=3 mesh.pipeline=2": (
        "remat.group=2 does not divide the 3 recomputed layers in the largest virtual stage of"
        " mesh.pipeline=2 (@): use 1 or 3."
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", REFUSED)
def test_what_does_not_fit_the_stages_is_refused_on_loading(overrides: str):
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    first = settings(overrides)[0]
    assert first_place(str(caught.value)) == REFUSED[overrides].replace("@", f"the command line: {first}")


REFUSED_WHEN_FILLED_UP = [
    # overrides, devices, sentence; the place is that of the first override
    (
        "mesh.pipeline=-1",
        16,
        "mesh.pipeline=16 (from -1) is more than model.num_layers=12 (@): use 12 or less.",
    ),
    (
        "batch.num_microbatches=4 mesh.pipeline=-1",
        8,
        (
            "batch.num_microbatches=4 is less than mesh.pipeline=8 (from -1), so stages would be idle for up"
            " to 64% of a step (@): use 8, 12 or 24."
        ),
    ),
    (
        "pipeline.layout=[6,6] mesh.pipeline=-1 mesh.data=2",
        8,
        (
            "pipeline.layout=[6, 6] has 2 numbers, but mesh.pipeline=4 (from -1) needs 4 (@): write 4"
            " numbers that add up to model.num_layers=12, or set it to null for [3, 3, 3, 3]."
        ),
    ),
    (
        # what divides 12 layers but not the 4 of a stage
        "kernels.scan_unroll=6 mesh.pipeline=-1",
        3,
        (
            "kernels.scan_unroll=6 does not divide the 4 layers of the largest virtual stage of"
            " mesh.pipeline=3 (from -1) (@): use 1, 2 or 4."
        ),
    ),
    (
        # filled up to a single stage
        "kernels.scan_unroll=5 mesh.pipeline=-1",
        1,
        "kernels.scan_unroll=5 does not divide model.num_layers=12 (@): use 1, 2, 3, 4, 6 or 12.",
    ),
    (
        "remat.layers=13 remat.policy=full mesh.pipeline=-1",
        1,
        "remat.layers=13 is more than model.num_layers=12 (@): use 12 or less, or null for all.",
    ),
    (
        # the microbatches that are usable depend on the batch shards, which are known only now
        "batch.num_microbatches=2 mesh.pipeline=-1 mesh.data=4",
        12,
        (
            "batch.num_microbatches=2 is less than mesh.pipeline=3 (from -1), so stages would be idle for up"
            " to 50% of a step (@): use 3 or 6."
        ),
    ),
]


@pytest.mark.parametrize(("overrides", "devices", "sentence"), REFUSED_WHEN_FILLED_UP)
def test_what_does_not_fit_the_filled_up_stages_is_refused_with_the_mesh(overrides, devices, sentence):
    config = load(overrides)
    with pytest.raises(ConfigError) as caught:
        check_mesh(config, devices)
    assert first_place(str(caught.value)) == sentence.replace("@", f"the command line: {overrides.split()[0]}")


def test_a_config_that_was_not_loaded_is_refused_with_the_mesh():
    values = load("").model_dump() | {"mesh": {"pipeline": 16}}
    with pytest.raises(ConfigError, match=re.escape("mesh.pipeline=16 is more than model.num_layers=12 (default)")):
        check_mesh(Config.model_validate(values), 16)


def test_a_pattern_longer_than_its_period_is_the_same_network():
    """Every layer keeps the kind that the list gives it, and equal networks compare equal."""
    for layers, pattern in itertools.product(range(1, 9), itertools.product(("local", "global"), repeat=4)):
        written = pattern[: max(1, layers - 1)]  # shorter than the model, of all lengths up to 4
        config = many(1, 1, layers, pattern=written)
        kept = config.model.layer_pattern
        assert kept is not None
        assert [kept[i % len(kept)] for i in range(layers)] == [written[i % len(written)] for i in range(layers)]
        full = [written[i % len(written)] for i in range(layers)]
        assert many(1, 1, layers, pattern=full).model == config.model
        assert all([kept[i % n] for i in range(layers)] != full for n in range(1, len(kept)))


@pytest.mark.parametrize("pattern", ["[local,local]", "[local,local,local]", f"[{','.join(['local'] * 12)}]"])
def test_a_pattern_of_one_kind_fits_any_stages(pattern):
    assert check_mesh(load(f"mesh.pipeline=4 model.layer_pattern={pattern}"), 4)["pipeline"] == 4


def test_layers_of_a_full_list_are_in_step_where_those_of_its_period_are():
    full = ",".join(["local", "global"] * 6)
    assert load(f"mesh.pipeline=3 model.layer_pattern=[{full}]") == load(f"mesh.pipeline=3 {PATTERN}")


# What passes

ALLOWED = [
    # overrides, devices
    ("mesh.pipeline=4", 4),
    ("mesh.pipeline=8", 8),
    ("mesh.pipeline=12", 12),
    ("mesh.pipeline=4 pipeline.virtual_stages=3", 4),
    ("mesh.pipeline=4 pipeline.schedule=gpipe", 4),
    ("mesh.pipeline=4 pipeline.schedule=zero_bubble pipeline.virtual_stages=2", 4),
    ("mesh.pipeline=4 pipeline.layout=[1,5,5,1]", 4),
    ("mesh.pipeline=-1 pipeline.layout=[1,5,5,1]", 4),
    ("mesh.pipeline=-1 pipeline.virtual_stages=2", 6),
    ("mesh.pipeline=4 batch.num_microbatches=4", 4),
    ("mesh.pipeline=4 batch.num_microbatches=6", 4),
    ("mesh.pipeline=2 mesh.data=2 batch.num_microbatches=2", 4),
    ("mesh.pipeline=2 mesh.fsdp=2 mesh.tensor=2", 8),
    (f"mesh.pipeline=3 {PATTERN}", 3),
    (f"mesh.pipeline=4 pipeline.layout=[3,4,4,1] {PATTERN}", 4),
    (f"mesh.pipeline=6 {PATTERN}", 6),
    ("mesh.pipeline=4 kernels.scan_unroll=3", 4),
    ("mesh.pipeline=-1 kernels.scan_unroll=4 remat.policy=full remat.layers=4 remat.group=4", 3),
    ("mesh.pipeline=2 remat.policy=full remat.layers=4 remat.group=2", 2),
    ("mesh.pipeline=2 precision.fp8.recipe=delayed model.ffn_hidden_size=128 model.head_dim=16", 2),
]


@pytest.mark.parametrize(("overrides", "devices"), ALLOWED)
def test_what_fits_passes_without_a_warning(overrides, devices):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_mesh(load(overrides), devices)["pipeline"] > 1


@pytest.mark.parametrize(
    "override",
    ["pipeline.schedule=gpipe", "pipeline.virtual_stages=2", "pipeline.layout=[6, 6]"],
    ids=lambda text: text,
)
def test_pipeline_settings_without_stages_are_warned_about(override):
    with pytest.warns(UserWarning) as caught:
        check_mesh(load_config("x.yaml", [override]), 1)
    assert [str(item.message) for item in caught] == [
        f"{override} has no effect with mesh.pipeline=1 (the command line: {override}): remove it."
    ]


@pytest.mark.parametrize("override", ["pipeline.schedule=1f1b", "pipeline.virtual_stages=1", "pipeline.layout=null"])
def test_a_default_that_someone_wrote_is_not_warned_about(override):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(override)
        load(f"{override} mesh.pipeline=-1")


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([range(3)], ()),
        ([range(4)], (0, 3)),
        ([range(6), range(3, 6), range(3)], (0, 5)),  # the forward pass, and two parts of the backward pass
        ([range(9), range(4, 9), range(4)], (0, 3, 4, 8)),
    ],
)
def test_fsdp_gathers_the_first_and_last_slots_of_passes_through_four_or_more_once_a_step(passes, expected):
    assert gathered_slots(passes) == expected


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_pipeline_compiles_a_layer_twice_for_each_round(rounds):
    config = load(f"pipeline.virtual_stages={rounds} mesh.pipeline=2")
    [kind, *_] = layer_kinds(config.model)
    assert layer_seconds(config, kind, {"pipeline": 2}) == 2 * rounds * layer_seconds(config, kind)
