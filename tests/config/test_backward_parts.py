"""The parts of a stage's backward pass, and the reasons for lockstep."""

import pytest

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.layout.backward_parts import backward_parts

EXPERTS = "model.num_experts=8 model.experts_per_token=2 kernels.grouped_matmul=reference"
CASES: list[tuple[str, list[range] | str]] = [  # of Llama 3 8B's 16 layers on two stages
    ("", [range(4, 8), range(4)]),
    ("remat.policy=selective", [range(4, 8), range(4)]),
    ("pipeline.layout=[7,9]", "9 layer slots have no equal halves"),
    ("pipeline.layout=[6,10]", [range(5, 10), range(5)]),
    ("model.num_layers=2", "a stage has one layer slot"),
    ("remat.policy=full", "remat.policy=full keeps little of each microbatch"),
    # Seven layers of 2 and one of 3 are 17 in forward passes: 9 and 8, so three ticks of 9 for 25, which is 8 % more.
    ("remat.policy=full remat.layers=1", "8 layer slots have no equal halves"),
    ("remat.policy=full remat.layers=7 remat.group=7", "8 layer slots have no equal halves"),
    # Two of 19 layers are one group, 3 each: 6 + 7 * 2 and 10 * 2. The layers after a group are cut anywhere.
    ("remat.policy=full remat.layers=2 remat.group=2 model.num_layers=38", [range(9, 19), range(9)]),
    ("pipeline.virtual_stages=2", "pipeline.virtual_stages=2"),
    ("pipeline.schedule=zero_bubble", "pipeline.schedule=zero_bubble"),
    ("mesh.fsdp=2 mesh.context=2", [range(4, 8), range(4)]),
    (f"{EXPERTS} mesh.expert=2 mesh.tensor=2", [range(4, 8), range(4)]),
]


@pytest.mark.parametrize(("overrides", "expected"), CASES)
def test_halves_are_as_long_as_a_forward_pass_or_stages_run_in_lockstep(overrides, expected):
    config = load_config(
        "llama3_8b_l16_pipeline", ["mesh.pipeline=2", "mesh.data=-1", "batch.global_size=128", *overrides.split()]
    )
    found = backward_parts(config, check_mesh(config, 8))
    if isinstance(expected, str):
        assert (found.slots, found.lockstep_because) == ((), expected)
    else:
        assert list(found.slots) == expected
        assert found.edges == (len(expected[1]),)  # a segment of layers ends where the parts meet


@pytest.mark.parametrize(
    ("overrides", "axis"),
    [
        ("mesh.context=2 communication.context=ring", "context"),
        ("mesh.context=2 communication.context=all_gather", ""),
        ("mesh.tensor=2", "tensor"),
        ("mesh.tensor=2 model.hidden_size=1024 model.ffn_hidden_size=2000", ""),
    ],
)
def test_on_cpus_a_stage_permutes_only_with_all_other_stages(overrides, axis):
    config = load_config(
        "llama3_8b_l16_pipeline", ["mesh.pipeline=2", "mesh.data=-1", "batch.global_size=128", *overrides.split()]
    )
    found = backward_parts(config, check_mesh(config, 8), "cpu").lockstep_because
    assert found == (f"on CPUs the layers' permutations over mesh.{axis} need all stages at once" if axis else "")
