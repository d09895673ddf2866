"""With BF16 compute, everything of the residual stream's size stays BF16; weights of norms and sinks stay FP32."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jaxpr_equations import equations
from mesh_models import COMMON, LATENT_MODELS

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.mesh import AXES, build_mesh
from megajax.step.nodes import HIDDEN, StepArrays
from megajax.training.step import TrainProgram

GPT = {
    "norm": "layernorm",
    "position": "learned",
    "activation": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "attention_sinks": True,
    "dropout": 0.1,
}


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{}, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_the_residual_stream_keeps_the_compute_dtype(options, compute):
    model = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 40} | options
    config = Config.model_validate(
        {
            "model": model,
            "batch": {"global_size": 2, "sequence_length": 8},
            "precision": {"compute": compute},
            "kernels": {"scan_unroll": 2},
        }
    )
    program = TrainProgram.build(config, build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))
    graph = program.graph

    def forward(params, batch):
        passed = []
        layers = graph.layers.weights.gather_per_step(params, {}, {})
        arrays = StepArrays(graph.table.gather(params), {graph.layers.NAME: layers}, jax.random.key(0))
        fields = {name: field[0] for name, field in batch.items()}
        batch, streams = graph.microbatch(fields, 0, arrays if options else None), {}
        for node in graph.inner:
            streams, _ = node.forward(arrays, streams, batch, save=True)
            passed.append(streams[HIDDEN])
        return *passed, {name: w.dtype for name, w in (arrays.table | layers[0][0][0]).items()}

    dtypes = {}

    def traced(params, batch):
        x, y, dtypes["weights"] = forward(params, batch)
        return x, y

    # On the mesh, because the model asks which of its sequences a device holds.
    everywhere = jax.shard_map(traced, mesh=program.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    x, y = jax.eval_shape(everywhere, program.abstract_state.params, program.abstract_batch)
    assert x.dtype == y.dtype == jnp.dtype(compute)
    in_fp32 = {name for name, dtype in dtypes["weights"].items() if dtype == jnp.float32}
    expected = {"attention.norm", "mlp.norm", "final_norm"}
    if options:
        expected |= {f"{name}_bias" for name in expected} | {"attention.query_norm", "attention.key_norm"}
        expected |= {"attention.sinks"}
    assert in_fp32 == expected


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize(
    ("model", "numbers"), [(COMMON, None), (LATENT_MODELS["dense"], 12 + 4)], ids=["keys", "latents"]
)
def test_gradients_of_keys_are_added_over_context_in_fp32(table, model, numbers, strategy):
    """In a ring keys and values travel alone in BF16, their gradients alone in FP32, or both."""
    sections = {"communication": {"context": strategy}, "precision": {"compute": "bfloat16"}}
    config = table.make_config(model | {"num_layers": 1}, {"context": 4}, optimizer="sgd", **sections)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    step = jax.make_jaxpr(program.train_step)(program.abstract_state, program.abstract_batch)
    sent = [(e.primitive.name, e.invars[0].aval) for e in equations(step.jaxpr) if e.invars]
    messages = {a.size for name, a in sent if name == "ppermute"} - {0}
    numbers = numbers or 2 * config.model.num_kv_heads * config.model.head_dim
    words = numbers * config.batch.global_size * config.batch.sequence_length // 4
    assert messages == ({words, 2 * words, 3 * words} if strategy == "ring" else set())
    assert {a.dtype.name for name, a in sent if name == "reduce_scatter"} == {"float32"}
