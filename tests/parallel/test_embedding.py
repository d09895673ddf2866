"""The embedding against NumPy, with a gathered table or looked up in its shards, and the choice between the two."""

import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxpr_equations import equations

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.kernel_choice import HOPPER
from megajax.mesh import build_mesh
from megajax.ops.numerics import add_rows
from megajax.schema.fields import BATCH_AXES
from megajax.step.embedding import TOKENS
from megajax.step.nodes import HIDDEN, StepArrays
from megajax.step_plan import StepPlan
from megajax.training.step import TrainProgram

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = {"num_layers": 2, "hidden_size": 20, "num_heads": 2, "ffn_hidden_size": 32, "vocab_size": 250}
OF_TOKENS = P((*BATCH_AXES, "tensor"))  # [B·S, D], the mesh without context


@pytest.mark.parametrize("in_order", [False, True])
def test_updates_of_equal_rows_are_summed(in_order):
    """From one row in all updates to many rows in none; against NumPy in float64."""
    rng, numbers = np.random.default_rng(3), jax.jit(partial(add_rows, in_order=in_order))
    for most in (1, 2, 7, 40, 300):
        table, rows = rng.standard_normal((40, 5)), rng.integers(0, min(most, 40), 33)
        updates = rng.standard_normal((33, 5))
        expected = table.copy()
        np.add.at(expected, rows, updates)
        found = numbers(table.astype(np.float32), rows, updates.astype(np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_step_adds_to_no_row_twice(table, deterministic):
    """On a GPU such additions have no order; those of tables of tokens and positions, and of prediction modules."""
    model = MODEL | {"position": "learned", "max_positions": 8, "mtp_layers": 1, "tie_embeddings": True}
    model |= {"block_pattern": ["mlp"]}
    sections = {"batch": {"global_size": 2, "sequence_length": 8}, "run": {"deterministic": deterministic}}
    sections["optimizer"] = "sgd"
    program = TrainProgram.build(table.make_config(model, {}, **sections), build_mesh({}, jax.devices()[:1]))
    step = program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr
    found = [each.params["unique_indices"] for each in equations(step.jaxpr) if each.primitive.name == "scatter-add"]
    assert found == [deterministic] * 3


@pytest.mark.parametrize("sequence_length", [4, 64], ids=["rows", "table"])
@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 4, "data": 2}, {"data": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=str,
)
def test_rows_and_the_gradient_of_the_table(table, mesh, sequence_length):
    """A width of 20 is padded where eight devices share it; embeddings are scaled on the meshes with `tensor`.

    On those without it, `run.deterministic`.
    """
    scaled = "tensor" in mesh
    factor = np.float32(math.sqrt(20) if scaled else 1)
    config = table.make_config(
        {**MODEL, "scale_embeddings": scaled},
        mesh,
        batch={"global_size": 64, "sequence_length": sequence_length},
        run={"deterministic": not scaled},
    )
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 8), jax.devices()[:8]))
    graph = program.graph
    assert bool(graph.plan.embedding_axes) == (sequence_length == 4)

    def step(params, batch, dx):
        fields = {name: field[0] for name, field in batch.items()}
        at, arrays, embedding = (
            graph.microbatch(fields, 0),
            StepArrays(graph.table.gather(params), {}),
            graph.inner[0],
        )
        given, saved = embedding.forward(arrays, {}, at, save=True)
        zeros = {name: jnp.zeros(w.shape) for name, w in arrays.table.items()}
        _, gradients, _ = embedding.backward(arrays, saved, {HIDDEN: dx}, at, zeros)
        return given[HIDDEN], graph.table.complete_gradients(gradients)[TOKENS]

    specs = {name: placement.spec for name, placement in program.placements.items()}
    run = jax.shard_map(
        step,
        mesh=program.mesh,
        in_specs=(specs, program.batch_sharding.spec, OF_TOKENS),
        out_specs=(OF_TOKENS, specs[TOKENS]),
        check_vma=False,
    )
    rng = np.random.default_rng(0)
    params = {n: rng.standard_normal(w.shape).astype(w.dtype) for n, w in program.abstract_state.params.items()}
    tokens = rng.integers(0, 250, program.plan.batch_shape)
    dx = rng.standard_normal((tokens.size, 20))
    found, gradient = jax.jit(run)(params, dict.fromkeys(program.abstract_batch, tokens), dx)
    weights = np.asarray(params[TOKENS])[:, :20]
    np.testing.assert_array_equal(found, factor * weights[tokens.reshape(-1)])
    expected = np.zeros_like(weights, dtype=np.float64)
    np.add.at(expected, tokens.reshape(-1), factor * dx)
    np.testing.assert_allclose(np.asarray(gradient)[:, :20], expected, atol=1e-5)
    assert not np.asarray(gradient)[:, 20:].any()


@pytest.mark.parametrize(
    ("overrides", "axes"),
    [
        # 32,768 tokens a device: 2 · 2 bytes each way and number, against 2 + 4 of each of 128,256 rows.
        (["mesh={fsdp: 4}", "batch.global_size=16"], ("fsdp",)),
        (["mesh={data: 2, fsdp: 2}", "batch.global_size=16"], ("fsdp", "data")),
        (["mesh={data: 2, tensor: 4}", "batch.global_size=8"], ("data",)),
        (["mesh={fsdp: 4}", "batch.global_size=96", "batch.num_microbatches=6"], ()),  # 196,608 tokens
        (["mesh={data: 4, fsdp: 8}", "batch.global_size=128"], ()),  # over data an eighth of the table: 16,032 rows
        (["mesh={fsdp: 4}", "batch.global_size=80", "batch.num_microbatches=5"], ("fsdp",)),  # 163,840 tokens
        # Reduced in BF16, the table is 4 bytes each.
        (
            ["mesh={fsdp: 4}", "batch.global_size=80", "batch.num_microbatches=5", "precision.gradients=bfloat16"],
            (),
        ),
        (["mesh={fsdp: 4}", "batch.global_size=16", "model.tie_embeddings=true"], ()),
        (["mesh={fsdp: 4, pipeline: 2}", "batch.global_size=16", "batch.num_microbatches=2"], ()),
        (["mesh={fsdp: 1}", "batch.global_size=4"], ()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_choice_is_the_transfer_with_fewer_bytes(overrides, axes):
    config = load_config(CONFIGS / "llama3_8b_l8.yaml", ["mesh.fsdp=1", *overrides])
    sizes = check_mesh(config, math.prod(size for size in config.mesh.model_dump().values() if isinstance(size, int)))
    assert StepPlan.make(config, sizes, HOPPER).embedding_axes == axes
