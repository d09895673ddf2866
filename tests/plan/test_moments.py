"""The planner's bytes of an optimizer's state are those of the train state, for every kind and form of it."""

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import pytest
from mesh_models import MIXTRAL

from megajax import Config
from megajax.config.checks import check_mesh
from megajax.estimate.optimizer_memory import state_bytes
from megajax.mesh import build_mesh
from megajax.optim.muon import Muon
from megajax.optim.offload import largest_share
from megajax.optim.slots import OptimizerSlots
from megajax.optim.soap import Soap
from megajax.options.optimizers import FORMS, OPTIMIZERS
from megajax.tools.plan.candidates import Candidate
from megajax.training.step import TrainProgram

CASES = [
    {"kind": kind, "state": state, "master": master, "ema_decay": ema, "offload": offload}
    for kind, state, master in itertools.product(OPTIMIZERS, FORMS, ("float32", "split"))
    for ema, offload in ((None, 0.0), (0.99, 0.6))
]
CASES += [{"kind": "sgd", "beta1": 0.0}]


@pytest.mark.parametrize("settings", CASES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_the_planner_counts_the_bytes_of_the_state(settings):
    config = Config.model_validate(
        {
            "model": MIXTRAL | {"hidden_size": 48, "norm": "layernorm"},  # no multiple of int8's blocks
            "mesh": {"fsdp": 2, "tensor": 2},
            "batch": {"global_size": 4, "sequence_length": 16},
            "optimizer": settings,
            "data": {"kind": "synthetic"},
        }
    )
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    state, counted = program.abstract_state, {"device": 0, "pinned_host": 0}
    rest = replace(state, params={}, frozen={}, layer_state={})
    for leaf in jax.tree.leaves(rest):
        if leaf.shape:  # not the numbers of steps
            kept = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            counted["pinned_host" if leaf.sharding.memory_kind == "pinned_host" else "device"] += kept
    slots = OptimizerSlots.of(program.plan, program.plan.trained, program.placements)
    found = state_bytes(program.plan, slots)
    assert (found.optimizer, found.on_host) == (counted["device"], counted["pinned_host"])
    weights = [leaf for leaf in jax.tree.leaves((state.params, state.frozen))]
    assert found.weights == sum(math.prod(w.sharding.shard_shape(w.shape)) * w.dtype.itemsize for w in weights)


def planned(model: dict, mesh: dict, optimizer: dict, compute: str = "bfloat16") -> Candidate:
    batch, devices = {"global_size": 8, "sequence_length": 16}, math.prod(mesh.values())
    sections = {"model": model, "mesh": mesh, "batch": batch, "optimizer": optimizer, "data": {"kind": "synthetic"}}
    config = Config.model_validate(sections | {"precision": {"compute": compute}})
    return Candidate.of(config, check_mesh(config, devices))


def products(jaxpr: Any) -> float:
    """Floating-point operations of the products in a traced function, without those of `cond`'s branches."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive is jax.lax.dot_general_p:
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
            total += 2 * depth * equation.outvars[0].aval.size
        elif equation.primitive.name != "cond":
            inside = (getattr(value, "jaxpr", None) for value in equation.params.values())
            total += sum(products(getattr(each, "jaxpr", each)) for each in inside if each is not None)
    return total


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (48, 24), (24, 49), (100, 8)])
def test_the_planner_counts_the_products_of_soap(rows, columns):
    """And of each refresh of a basis a product and a QR decomposition."""
    model = {"num_layers": 1, "hidden_size": 48, "num_heads": 4, "vocab_size": 64}
    settings = {"kind": "soap", "soap": {"max_dimension": 48, "precondition_frequency": 10}}
    soap = Soap(planned(model, {}, settings).plan)
    slots = {s.name: jax.ShapeDtypeStruct((1, *s.shape), "float32") for s in soap.slots_of_matrices(rows, columns)}
    matrices = jax.ShapeDtypeStruct((1, rows, columns), "float32")
    traced = jax.make_jaxpr(soap.of_matrices)(matrices, slots | {"count": jax.ShapeDtypeStruct((), "int32")})
    refresh = sum((2 + 8 / 3) * size**3 for size in (rows, columns) if size <= 48)
    expected = products(traced.jaxpr) + refresh / 10
    assert products(traced.jaxpr) > 0 and soap.operations(rows, columns) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("compute", "kernel", "halved"),
    [("bfloat16", "pallas", True), ("bfloat16", "reference", False), ("float32", "pallas", False)],
)
def test_muon_halves_the_symmetric_products_where_it_has_the_kernel(compute, kernel, halved):
    """Of each of five steps X Xᵀ and G²; the other products are whole ones in the program."""
    model = {"num_layers": 1, "hidden_size": 48, "num_heads": 4, "vocab_size": 64}
    plan = planned(model, {}, {"kind": "muon"}, compute).plan
    muon = Muon(replace(plan, kernels=replace(plan.kernels, symmetric_matmul=kernel)))
    traced = jax.make_jaxpr(muon.of_matrices)(jax.ShapeDtypeStruct((1, 1024, 1024), muon.dtype), {})
    symmetric, whole = 5 * 2 * 2 * 1024**3, 5 * 2 * 1024**3
    assert products(traced.jaxpr) == whole + (0 if halved else symmetric)
    assert muon.operations(1024, 1024) == whole + (symmetric / 2 if halved else symmetric)


@pytest.mark.parametrize(("mesh", "wide", "square"), [({"fsdp": 1}, 18, 24), ({"fsdp": 8}, 3, 3), ({"data": 4}, 5, 6)])
def test_the_planner_counts_every_matrix_once(mesh, wide, square):
    """Of six layers with three matrices of an MLP, each a round of its own, and four of attention.

    Of 18 an eighth is 3 with empty places, and a fourth is 5.
    """
    model = {"num_layers": 6, "hidden_size": 4096, "num_heads": 32, "ffn_hidden_size": 16384, "vocab_size": 64}
    candidate = planned(model, mesh, {"kind": "muon"})
    muon = Muon(candidate.plan)
    expected = wide * muon.operations(4096, 16384) + square * muon.operations(4096, 4096)
    assert candidate.storage.state.matrices == {(4096, "bfloat16"): pytest.approx(expected)}


def test_each_prediction_module_has_the_time_of_a_head():
    seconds = []
    for modules in range(3):
        model = {"num_layers": 1, "hidden_size": 64, "num_heads": 4, "vocab_size": 4096, "mtp_layers": modules}
        config = Config.model_validate({"model": model, "batch": {"global_size": 4, "sequence_length": 16}})
        seconds.append(Candidate.of(config, check_mesh(config, 1)).time.head)
    assert seconds == pytest.approx([seconds[0] * heads for heads in (1, 2, 3)])


@pytest.mark.parametrize(
    ("folder", "seconds_a_byte"), [(None, 0.674 / 22.1e9), ("/disk", 1 / 2.0e9 + 1 / 2.6e9)], ids=["host", "disk"]
)
def test_moments_on_the_host_take_the_time_of_the_link_and_those_in_files_that_of_the_disk(folder, seconds_a_byte):
    """22.1 GB took 674 ms on an H200; a disk reads 2.0 GB/s and then writes 2.6."""
    seconds, moved = [], 0.0
    for share in (0.0, 1.0):
        model = {"num_layers": 1, "hidden_size": 64, "num_heads": 4, "vocab_size": 4096}
        optimizer = {"offload": share, "offload_dir": folder if share else None}
        sections = {"batch": {"global_size": 4, "sequence_length": 16}, "optimizer": optimizer}
        config = Config.model_validate({"model": model, **sections})
        candidate = Candidate.of(config, check_mesh(config, 1))
        seconds.append(candidate.time.optimizer)
        moved = candidate.storage.state.on_host
    assert moved > 8 * 2 * 64 * 4096  # with embedding and head
    assert seconds[1] - seconds[0] == pytest.approx(moved * seconds_a_byte, rel=0.03)


def test_the_largest_arrays_that_fit_into_the_share_are_moved():
    sizes = {"a": 3.0, "b": 5.0, "c": 2.0}
    for share, expected in ((0.1, ""), (0.2, "c"), (0.3, "a"), (0.5, "b"), (0.7, "bc"), (0.8, "ab"), (1.0, "abc")):
        assert largest_share(sizes, share) == {*expected}, share
