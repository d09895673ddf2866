"""Looped and unrolled layers give the same numbers bit for bit, with recomputation; a script, for flags of its own.

Only with recomputation: without it XLA's CPU compiler fuses unrolled layers' residuals into other operations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import single_device
from mesh_models import MODELS

from megajax.config.checks import check_mesh
from megajax.layout.segments import plan_segments
from megajax.mesh import build_mesh
from megajax.step.gradients import gradient_function
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

LAYERS = 2
MESH, MICROBATCHES, REMAT = {"fsdp": 2}, 2, {"policy": "selective"}


def run(unroll):
    """(sums, gradients by name)."""
    config = single_device.make_config(
        MODELS["llama"] | {"num_layers": LAYERS},
        MESH,
        microbatches=MICROBATCHES,
        optimizer="sgd",
        remat=REMAT,
        kernels={"scan_unroll": unroll},
    )
    assert [s.iterations for s in plan_segments(config, "cpu")] == [LAYERS // unroll]
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 2), jax.devices()[:2]))
    state = single_device.first_state(program, single_device.weights_of(config))
    batch = to_global(program, next(single_device.make_batches(config)))
    gradients = jax.jit(gradient_function(program.graph, program.mesh))
    return gradients(state.params, state.layer_state, batch, jnp.int32(0), jnp.float32(1))[:2]


if __name__ == "__main__":
    looped, unrolled = run(1), run(LAYERS)
    assert unrolled[0]["loss"] > 0 and len(unrolled[1]) == 12
    jax.tree.map(np.testing.assert_array_equal, looped, unrolled)
    print("equal")
