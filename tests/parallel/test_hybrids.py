"""Gated DeltaNet, Kimi delta attention and Mamba-2 beside attention: on meshes as on one device, and what they refuse.

tests/model/test_transformers_references.py and tests/inference/test_generation.py compare them with transformers,
tests/ops/test_linear_recurrences.py with the definition; dev/mesh_table.py --table hybrid has more meshes.
"""

import math

import pytest
from mesh_models import HYBRID, KIMI, MAMBA

from megajax.config.checks import check_mesh
from megajax.errors import ConfigError

# All mixers in one model.
DENSE = {name: value for name, value in MAMBA.items() if name not in ("num_experts", "experts_per_token", "router")}
DENSE = {name: value for name, value in DENSE.items() if name != "expert_ffn_hidden_size"}
DENSE |= {"kda": KIMI["kda"], "linear_attention": HYBRID["linear_attention"]}
ALL = ("gated_deltanet", "kda", "attention_mamba2")
DOCUMENTS = {"synthetic_documents": 5, "reset_attention": True, "reset_positions": True}


def make(table, mesh, microbatches, model, **sections):
    return table.make_config(model, mesh, microbatches=microbatches, steps=2, optimizer="sgd", **sections)


@pytest.mark.parametrize("kinds", [ALL[:1], pytest.param(ALL, marks=pytest.mark.long)], ids=len)
def test_a_mesh_trains_as_one_device_does(table, difference, kinds):
    """Documents across devices, which hold consecutive tokens. Mamba-2: tests/parallel/test_context.py too.

    KDA: tests/ops/test_linear_recurrences.py passes its states between devices.
    """
    model = DENSE | {"num_layers": len(kinds), "block_pattern": [*kinds]}
    sections = {"data": DOCUMENTS}
    found = difference(make(table, {"tensor": 2, "context": 2}, 1, model, **sections))
    assert not found.problems(), found


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
        ({}, {"sliding_window": 8}, {}, "layer_pattern.*gated_deltanet.*remove it"),
        ({"pipeline": 2}, {"mtp_layers": 1, "block_pattern": ["moe", "gated_deltanet"]}, {}, "mtp_layers=0"),
    ],
)
def test_what_it_cannot_do_is_refused(table, mesh, model, sections, cure):
    devices = math.prod(mesh.values())
    with pytest.raises(ConfigError, match=cure):
        check_mesh(make(table, mesh, 2, HYBRID | model, **sections), devices)
