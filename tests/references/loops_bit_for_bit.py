"""Looped and unrolled layers give the same numbers bit for bit, with recomputation; a script, for flags of its own.

Only with recomputation: without it XLA's CPU compiler fuses unrolled layers' residuals into other operations.
"""

import numpy as np
import single_device
from mesh_models import MODELS

from megajax.config.segments import plan_segments

LAYERS = 2
MESH, MICROBATCHES, REMAT = {"data": 2, "fsdp": 2}, 2, {"policy": "selective"}


def run(unroll):
    config = single_device.make_config(
        MODELS["llama"] | {"num_layers": LAYERS},
        MESH,
        microbatches=MICROBATCHES,
        steps=1,
        optimizer="sgd",
        remat=REMAT,
        kernels={"scan_unroll": unroll},
    )
    assert [s.loops for s in plan_segments(config, "cpu")] == [LAYERS // unroll]
    return single_device.train(config, single_device.weights_of(config))


if __name__ == "__main__":
    looped, unrolled = run(1), run(LAYERS)
    np.testing.assert_array_equal(looped.losses, unrolled.losses)
    np.testing.assert_array_equal(looped.norms, unrolled.norms)
    for weight, gradient in unrolled.gradients.items():
        np.testing.assert_array_equal(looped.gradients[weight], gradient, err_msg=weight)
    print("equal")
