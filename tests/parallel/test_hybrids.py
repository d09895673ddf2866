"""Gated DeltaNet, Kimi delta attention and Mamba-2 beside attention: on meshes as on one device, and what they refuse.

tests/model/test_transformers_references.py and tests/inference/test_generation.py compare them with transformers,
tests/ops/test_linear_recurrences.py with the definition; dev/mesh_table.py --table hybrid has more meshes.
"""

import math

import pytest
from mesh_models import HYBRID, KIMI, MAMBA

from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.kernel_choice import Hardware
from megajax.step_plan import StepPlan

# All mixers in one model.
DENSE = {name: value for name, value in MAMBA.items() if name not in ("num_experts", "experts_per_token", "router")}
DENSE = {name: value for name, value in DENSE.items() if name != "expert_ffn_hidden_size"}
DENSE |= {"kda": KIMI["kda"], "linear_attention": HYBRID["linear_attention"]}
ALL = ("gated_deltanet", "kda", "attention_mamba2")
WITH_MLP, WITH_EXPERTS = ("gated_deltanet", "kda", "mamba2_mlp"), ("gated_deltanet_moe", "kda_moe", "mamba2_moe")
DOCUMENTS = {"synthetic_documents": 5, "reset_attention": True, "reset_positions": True}


def make(table, mesh, microbatches, model, **sections):
    return table.make_config(model, mesh, microbatches=microbatches, steps=2, optimizer="sgd", **sections)


@pytest.mark.long
def test_a_mesh_trains_as_one_device_does(table, difference):
    """Documents across devices, which hold consecutive tokens.

    tests/parallel/test_context.py has Mamba-2 beside attention, then gated DeltaNet, over `context` and `tensor`.
    KDA: tests/ops/test_linear_recurrences.py passes its states between devices.
    """
    model = DENSE | {"num_layers": len(ALL), "block_pattern": [*ALL]}
    sections = {"data": DOCUMENTS}
    found = difference(make(table, {"tensor": 2, "context": 2}, 1, model, **sections))
    assert not found.problems(), found


@pytest.mark.parametrize(
    ("kinds", "strategy", "expected"),
    [
        (["gated_deltanet", "dense"], "all_to_all", True),  # devices share the heads
        (["gated_deltanet", "dense"], "dynamic", True),  # most groups are small
        (["gated_deltanet", "dense"], "ring", False),  # causal attention has more work on later devices
        (["gated_deltanet"], "ring", True),
        (["dense"], "all_to_all", False),  # nothing needs them
    ],
)
def test_devices_of_context_have_consecutive_tokens_where_a_recurrence_reads_them(table, kinds, strategy, expected):
    sections = {"communication": {"context": strategy}, "data": DOCUMENTS if strategy == "dynamic" else {}}
    config = make(table, {"context": 2}, 1, DENSE | {"num_layers": 2, "block_pattern": kinds}, **sections)
    assert StepPlan.make(config, check_mesh(config, 2), Hardware("cpu")).has_consecutive_tokens == expected


@pytest.mark.parametrize("kind", [None, "attention_mamba2", "mamba2", *WITH_MLP, *WITH_EXPERTS])
@pytest.mark.parametrize("position", ["rope", "relative"])
def test_tokens_are_distributed_by_work_only_where_layers_may_have_them_in_any_order(table, kind, position):
    """A bias of the scores is made for one order, and a recurrence takes consecutive tokens."""
    model = DENSE | {"num_layers": 2, "block_pattern": kind and [kind, "dense"], "position": position}
    model |= {"num_experts": 4} if kind in WITH_EXPERTS else {}
    config = make(table, {"context": 2}, 1, model, communication={"context": "all_gather"}, data=DOCUMENTS)
    plan = StepPlan.make(config, check_mesh(config, 2), Hardware("cpu"))
    assert plan.balances_context == (kind is None and position == "rope")


@pytest.mark.parametrize(
    ("mesh", "model", "sections", "cure"),
    [
        ({"tensor": 4}, {}, {}, "num_key_heads=2.*mesh.tensor to 1 or 2"),
        ({}, {"linear_attention": {"num_key_heads": 3, "num_value_heads": 4}}, {}, "use 1, 2 or 4"),
        (
            {"tensor": 4},
            {"block_pattern": ["kda", "moe"], "kda": {"num_heads": 6}},
            {},
            "kda.num_heads=6.*mesh.tensor to 1 or 2",
        ),
        ({"context": 8}, {}, {"batch": {"sequence_length": 16}}, "conv_kernel=4.*sequence_length 24 or more"),
        ({}, {"block_pattern": ["mamba2", "moe"], "mamba2": {"num_heads": 6, "num_groups": 4}}, {}, "use 1, 2, 3 or 6"),
        ({}, {"sliding_window": 8}, {}, "gated_deltanet.*global in model.layer_pattern, or remove it"),
        ({}, {"rope_pattern": ["none", "rope"]}, {}, "gated_deltanet.*rope for its layers there, or remove it"),
        ({"pipeline": 2}, {"mtp_layers": 1, "block_pattern": ["moe", "gated_deltanet"]}, {}, "mtp_layers=0"),
    ],
)
def test_what_it_cannot_do_is_refused(table, mesh, model, sections, cure):
    devices = math.prod(mesh.values())
    with pytest.raises(ConfigError, match=cure):
        check_mesh(make(table, mesh, 2, HYBRID | model, **sections), devices)


def test_patterns_that_leave_its_layers_out_are_possible(table):
    patterns = {"sliding_window": 8, "layer_pattern": ["global", "local"], "rope_pattern": ["rope", "none"]}
    check_mesh(make(table, {}, 2, HYBRID | {"block_pattern": ["gated_deltanet", "moe"]} | patterns), 1)
