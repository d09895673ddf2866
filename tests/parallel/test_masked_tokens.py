"""ModernBERT's layers and the objective of masked tokens on meshes, with documents, against megajax/reference.py.

tests/model/test_transformers_references.py holds several layers to transformers, and test_context.py attention to both
sides without windows.
"""

import math

import jax
import numpy as np
import pytest

from megajax.config.checks import check_mesh
from megajax.data.masking import open_masking
from megajax.mesh import build_mesh
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

MODEL = {
    **{"hidden_size": 16, "num_heads": 2, "vocab_size": 50, "init_std": 0.1, "ffn_hidden_size": 24},
    **{"norm": "layernorm", "activation": "geglu_exact", "causal": False, "tie_embeddings": True},
    **{"sliding_window": 4, "rope_local_theta": 20.0},
    **{"embedding_norm": True, "prediction_head": True, "head_bias": True},
}
DOCUMENTS = {"synthetic_documents": 3, "reset_attention": True, "reset_positions": True}
OBJECTIVE = {"kind": "masked_tokens", "label_smoothing": 0.1, "masking": {"rate": 0.3}}


def make(table, mesh, layers: list[str]):
    model = MODEL | {"num_layers": len(layers), "layer_pattern": layers}
    sections = {"objective": OBJECTIVE, "data": DOCUMENTS, "batch": {"global_size": 8, "sequence_length": 16}}
    return table.make_config(model, mesh, microbatches=2, steps=1, optimizer="sgd", **sections)


def expected(table, layers):
    """(fields, loss, gradients) by megajax/reference.py."""
    config = make(table, {}, layers)
    fields = next(iter(table.make_batches(config)))
    masking, rows = open_masking(config), enumerate(fields["tokens"])
    assert masking is not None
    hidden, chosen = map(np.stack, zip(*(masking(row, row >= 0, i) for i, row in rows), strict=True))
    fields |= {"tokens": hidden, "targets": fields["tokens"], "loss_mask": chosen.astype(np.float32)}
    losses, gradients = table.expected_gradients(config, table.weights_of(config), fields)
    return fields, float(losses["loss"]), gradients


@pytest.mark.parametrize(
    ("mesh", "layers"),
    [
        ({"context": 2, "tensor": 2}, ["local"]),
        pytest.param({"pipeline": 2}, ["global", "local"], marks=pytest.mark.long),
    ],
)
def test_loss_and_gradients_are_those_of_the_reference(table, mesh, layers):
    fields, loss, gradients = expected(table, layers)
    assert 0 < fields["loss_mask"].sum() < fields["loss_mask"].size / 2 and fields["segment_ids"].max() > 0
    config, count = make(table, mesh, layers), math.prod(mesh.values())
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    state, batch = table.first_state(program, table.weights_of(config)), to_global(program, fields)
    assert {"embedding.norm_bias", "head_dense", "head_norm", "head_bias"} <= gradients.keys()
    table.check_first_step(program, state, batch, loss, gradients)
