"""Attention sinks in the model: a logit for each query head, one more score of every softmax, without a value."""

import jax
import numpy as np

from megajax.config import ModelConfig
from megajax.model import Transformer, bind, parameters

S = 9
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=24,
    vocab_size=20,
    vocab_multiple=1,
    position="none",
    activation="relu2",
    attention_sinks=True,
    sliding_window=3,
    layer_pattern=("local", "global"),
)


def logits_by_hand(w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """One sequence `[S]` → `[S, V]`, in float64."""

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + MODEL.norm_epsilon) * scale

    x, at = w["embedding.tokens"][tokens], np.arange(S)
    for layer, window in enumerate((3, S)):
        b = {name.removeprefix("blocks.dense."): a[layer] for name, a in w.items() if name.startswith("blocks")}
        h = norm(x, b["attention.norm"])
        q, k, v = (np.einsum("sd,dnh->nsh", h, b[f"attention.{name}"]) for name in ("query", "key", "value"))
        k, v = (np.repeat(a, 2, axis=0) for a in (k, v))
        scores = np.einsum("nqh,nkh->nqk", q, k) / np.sqrt(MODEL.head_dim)
        behind = at[:, None] - at
        scores = np.where((behind >= 0) & (behind < window), scores, -np.inf)
        sinks = np.broadcast_to(b["attention.sinks"][:, None, None], (4, S, 1))
        weights = np.exp(np.concatenate([scores, sinks], axis=-1))
        weights = (weights / weights.sum(-1, keepdims=True))[..., :-1]
        x = x + np.einsum("nqk,nkh,nhd->qd", weights, v, b["attention.output"])
        h = norm(x, b["mlp.norm"])
        x = x + np.maximum(h @ b["mlp.up"], 0) ** 2 @ b["mlp.down"]
    return norm(x, w["final_norm"]) @ w["head"]


def test_logits_are_those_of_a_softmax_with_a_column_more():
    rng, model = np.random.default_rng(3), Transformer(MODEL)
    weights = {name: rng.normal(0, 0.4, p.shape) for name, p in parameters(model).items()}
    sinks = parameters(model)["blocks.dense.attention.sinks"]
    assert sinks.shape == (2, 4) and sinks.role == "bias", "they start at zero and do not decay"
    weights["blocks.dense.attention.sinks"] = rng.normal(0, 2, (2, 4))
    tokens = rng.integers(0, 20, S)
    arrays = {name: np.asarray(w, np.float32) for name, w in weights.items()}
    found = jax.jit(lambda model, tokens: model(tokens))(bind(model, arrays), tokens[None])[0]
    np.testing.assert_allclose(found, logits_by_hand(weights, tokens), rtol=1e-4, atol=1e-4)
