"""Sums of gradients over microbatches in BF16 (`precision.accumulation`)."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mesh_models import COMMON, HYBRID, MIXTRAL
from single_device import first_state, make_batches, make_config, weights_of

from megajax.mesh import AXES, build_mesh
from megajax.step.gradients import gradient_function
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

SMALL = {**COMMON, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 48}
BATCH = {"global_size": 16, "sequence_length": 16, "num_microbatches": 4}
BF16 = {"compute": "float32", "accumulation": "bfloat16"}


def gradient_fn(config):
    """(first state, batch → gradients by name) on one device."""
    program = TrainProgram.build(config, build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))
    state = first_state(program, weights_of(config))
    run = jax.jit(gradient_function(program.graph, program.mesh))

    def gradients(fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        batch = to_global(program, fields)
        found = run(state.weights, state.layer_state, batch, jnp.int32(0), jnp.float32(1))[1]
        return {name: np.asarray(g) for name, g in found.items()}

    return gradients


def test_each_microbatch_is_added_in_fp32_and_rounded_once():
    """Bit for bit NumPy's sums, but for numbers at the limit between two: with 4 chunks in the head and all tokens.

    The sums of norms, and of any weight that is computed with in FP32, stay FP32.
    """
    kernels, model = {"loss_chunk_tokens": 8}, SMALL | {"block_pattern": ["mlp"]}
    config = make_config(model, precision=BF16, batch=BATCH, kernels=kernels)
    one = make_config(model, precision=BF16, batch=BATCH | {"global_size": 4, "num_microbatches": 1}, kernels=kernels)
    fields = next(make_batches(config))
    fields["loss_mask"] = np.ones_like(fields["loss_mask"])
    summed, of_one = gradient_fn(config)(fields), gradient_fn(one)
    parts = [of_one({name: f[k : k + 4] for name, f in fields.items()}) for k in range(0, 16, 4)]
    for name, found in summed.items():
        own = [part[name] / 4 for part in parts]
        if name.endswith("norm"):
            np.testing.assert_allclose(found, np.sum(own, axis=0, dtype=np.float64), rtol=1e-4, atol=1e-6)
            continue
        total = np.zeros_like(own[0])
        for g in own:
            total = (total + g).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.mean(found == total) > 0.98, name
        # A BF16 number has 8 bits: each of 4 roundings is at most 2^-8 of a sum, which is at most that of magnitudes.
        limit = 4 * 2**-8 * np.sum(np.abs(own), axis=0)
        assert (np.abs(found - np.sum(own, axis=0, dtype=np.float64)) <= limit + 1e-7).all(), name


@pytest.mark.parametrize("accumulation", ["float32", "bfloat16"])
def test_sums_have_the_dtype_of_the_setting_whatever_the_step_computes_in(accumulation):
    """Those of weights that it computes with in FP32 are FP32."""
    precision = {"compute": "bfloat16", "accumulation": accumulation}
    config = make_config(HYBRID | {"attention_sinks": True}, precision=precision, batch=BATCH)
    program = TrainProgram.build(config, build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))
    table, layers = program.graph.table, program.graph.layers.weights
    zeros = jax.eval_shape(lambda p: table.zero_gradients(table.gather(p)), program.abstract_state.params)
    sums = {name: zero.dtype for name, zero in zeros.items()}
    sums |= {weight.name: weight.sum_dtype for own in layers.weights.values() for weight in own.values()}
    kept = ("norm", ".router", ".sinks", ".decay_rate", ".decay_bias")
    assert all(any(name.endswith(ending) for name in sums) for ending in (*kept, "embedding.tokens", "head", ".qkv"))
    assert sums == {name: "float32" if name.endswith(kept) else accumulation for name in sums}


def test_gradients_of_a_microbatch_never_exist_for_all_layers_at_once():
    """XLA's temporary memory, beside the sums, which are the result, is less than one more set of them."""
    model = {**COMMON, "num_layers": 16, "hidden_size": 128, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 512}
    config = make_config(model, batch={"global_size": 2, "sequence_length": 8, "num_microbatches": 2})
    program = TrainProgram.build(config, build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))
    state, scalars = program.abstract_state, (jnp.int32(0), jnp.float32(1))
    run = jax.jit(gradient_function(program.graph, program.mesh))
    memory = run.lower(state.weights, state.layer_state, program.abstract_batch, *scalars).compile().memory_analysis()
    layers = 4 * 16 * (3 * 128 * 128 + 3 * 128 * 512)  # bytes
    assert memory.output_size_in_bytes > layers > 1.2 * memory.temp_size_in_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (SMALL, {"data": 2, "pipeline": 2, "tensor": 2}),
        (MIXTRAL | {"mtp_layers": 1}, {"fsdp": 2, "expert": 2}),
    ],
    ids=["stages", "experts"],
)
def test_meshes_differ_from_fp32_sums_by_the_roundings(table, difference, model, mesh):
    """Devices of `data` and `expert` each round their own sums: four roundings of at most 2^-8 make 2^-6."""
    config = table.make_config(model, mesh, steps=1, optimizer="sgd", precision=BF16, batch=BATCH)
    found = difference(config)
    assert not found.problems(scalar=1e-3, gradient=2**-6), found
    assert found.worst[1] > 2**-11  # the sums are not FP32
