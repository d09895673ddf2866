"""Documents packed into sequences have the losses and gradients that each has when it runs alone."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from single_device import first_state, weights_of

from megajax.config import Config
from megajax.data.samples import Packing, Samples, make_batch
from megajax.mesh import AXES, build_mesh
from megajax.model import Transformer, bind
from megajax.step.gradients import gradient_function
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

TOLERANCE = 1e-5
SMALL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 60, "init_std": 0.2}
MODELS = {
    "llama": {**SMALL, "num_kv_heads": 2, "layer_pattern": ["local", "global"], "sliding_window": 3},
    "gpt2": {**SMALL, "norm": "layernorm", "activation": "gelu", "position": "learned", "tie_embeddings": True},
}
LENGTHS = [[5, 1, 7], [1, 4, 8], [12, 1], [13]]  # of S + 1 = 13 tokens
ROWS, S = 4, 12


class Documents(Samples):
    """Samples of random tokens with the documents of LENGTHS."""

    def __init__(self):
        self.tokens = np.random.default_rng(4).integers(0, 60, (ROWS, S + 1), dtype=np.int32)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[index]

    def document_lengths(self, index: int) -> np.ndarray:
        return np.array(LENGTHS[index])


def losses_alone(transformer: Transformer, samples: Documents, weights) -> jax.Array:
    """The loss of each token `[ROWS, S]`, every document in a sequence of its own; 0 where the next is another's."""
    alone, has_next = [], np.zeros((ROWS, S), bool)
    predicted = np.zeros((3, ROWS, S), int)  # of each token: its document, the place there, the next token
    for row in range(ROWS):
        for first, end in pairwise(np.cumsum([0, *LENGTHS[row]])):
            part = samples[row][first:end]
            for token in range(part.size - 1):
                predicted[:, row, first + token] = len(alone), token, part[token + 1]
            has_next[row, first : end - 1] = True
            alone.append([*part, *[0] * (S + 1 - part.size)])  # the rest is not checked
    log_probabilities = jax.nn.log_softmax(bind(transformer, weights)(jnp.asarray(alone)[:, :-1]))
    return jnp.where(has_next, -log_probabilities[tuple(predicted)], 0)


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_packed_documents_have_the_losses_and_gradients_of_each_alone(model):
    settings = {
        "model": MODELS[model],
        "batch": {"global_size": ROWS, "sequence_length": S},
        "precision": {"compute": "float32"},
        "kernels": {"attention": "reference"},
        "data": {"kind": "synthetic", "synthetic_documents": 3, "reset_attention": True},
    }
    config = Config.model_validate(settings)
    program = TrainProgram.build(config, build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))
    params, samples = first_state(program, weights_of(config)).params, Documents()
    fields = make_batch(samples, range(ROWS), Packing(True, True, True))

    def global_batch(**changed):
        return to_global(program, fields | changed)

    @partial(jax.value_and_grad, has_aux=True)
    def alone(weights):
        losses = losses_alone(program.model, samples, weights)
        return losses.sum() / (losses != 0).sum(), losses

    (expected_loss, expected), expected_gradients = jax.device_get(jax.jit(alone)(params))
    counted = fields["loss_mask"] > 0
    np.testing.assert_array_equal(counted, expected != 0)
    for row, token in np.argwhere(counted):  # the loss of one token: that of a batch in which nothing else counts
        only = np.zeros((ROWS, S), np.float32)
        only[row, token] = 1
        sums, _ = program.eval_step(params, {}, global_batch(loss_mask=only))
        assert float(sums["loss"]) == pytest.approx(float(expected[row, token]), rel=TOLERANCE), (row, token)

    sums, gradients, *_ = jax.jit(gradient_function(program.graph, program.mesh))(
        params, {}, global_batch(), np.int32(0), np.float32(1)
    )
    assert float(sums["loss"]) == pytest.approx(float(expected_loss), rel=TOLERANCE)
    for name, gradient in jax.device_get(gradients).items():
        difference = np.linalg.norm(gradient - expected_gradients[name])
        assert difference < 10 * TOLERANCE * np.linalg.norm(expected_gradients[name]), name
