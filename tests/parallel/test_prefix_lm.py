"""Prefix-LM on a mesh, with documents, against megajax/reference.py, and in use."""

import jax
import numpy as np

from megajax.config.checks import check_mesh
from megajax.inference.generation import Generator
from megajax.inference.language_model import LanguageModel
from megajax.inference.sampling import Sampling
from megajax.mesh import build_mesh
from megajax.model import Transformer, bind
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 50, "init_std": 0.3, "prefix_lm": True}
MODEL |= {"block_pattern": ["attention"]}
DOCUMENTS = {"synthetic_documents": 3, "reset_attention": True, "reset_positions": True}
LENGTH = 16


def make(table, mesh, **sections):
    sections |= {"batch": {"global_size": 4, "sequence_length": LENGTH}}
    return table.make_config(MODEL, mesh, steps=1, optimizer="sgd", **sections)


def test_loss_and_gradients_are_those_of_the_reference(table):
    config = make(table, {}, data=DOCUMENTS)
    fields = next(iter(table.make_batches(config)))
    assert fields["is_prefix"].any() and fields["segment_ids"].max() > 0
    losses, gradients = table.expected_gradients(config, table.weights_of(config), fields)
    mesh = {"context": 2, "tensor": 2}
    config = make(table, mesh, data=DOCUMENTS)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    state, batch = table.first_state(program, table.weights_of(config)), to_global(program, fields)
    table.check_first_step(program, state, batch, float(losses["loss"]), gradients)


def test_generated_tokens_are_the_likeliest_ones_after_a_prefix_seen_whole(table):
    config = make(table, {})
    weights, network = jax.device_put(table.weights_of(config)), Transformer(config.model)
    model = LanguageModel(config, dict(weights), {}, build_mesh({}, jax.devices()[:1]))
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    [found] = Generator(model, Sampling(temperature=0), 8).tokens(prompts, 6)
    logits = jax.jit(lambda tokens, flags: bind(network, weights)(tokens, fields={"is_prefix": flags}))
    tokens, ends = np.zeros((2, LENGTH), np.int32), [len(prompt) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        tokens[row, : ends[row]] = prompt
    flags = np.arange(LENGTH) < np.array(ends)[:, None]
    for _ in range(6):
        likeliest = np.asarray(logits(tokens, flags)).argmax(-1)
        for row in range(2):
            tokens[row, ends[row]] = likeliest[row, ends[row] - 1]
            ends[row] += 1
    assert found == [tokens[row, end - 6 : end].tolist() for row, end in enumerate(ends)]
    causal = np.asarray(logits(tokens, np.zeros_like(flags)))[0, 3]
    assert abs(causal - np.asarray(logits(tokens, flags))[0, 3]).max() > 1e-2
