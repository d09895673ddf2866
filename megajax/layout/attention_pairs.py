"""The attention of documents, counted exactly: the same number on every machine, so that an order may depend on it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megajax.layout.kinds import ATTENTION, BUILT_IN_BLOCKS, MLP, MOE, is_gated, layer_kinds
from megajax.schema.model import ModelConfig


@dataclass(frozen=True)
class AttentionPairs:
    """The pairs of a query and a key of a document in all layers. `layers`: (window, number of layers with it)."""

    layers: tuple[tuple[int | None, int], ...] = ((None, 1),)
    causal: bool = True

    @classmethod
    def of_model(cls, model: ModelConfig) -> "AttentionPairs":
        """Those of a model; a layer of a recurrence has none, a kind that is not built in counts as attention."""
        kinds = [kind for kind in layer_kinds(model) if ATTENTION in BUILT_IN_BLOCKS.get(kind.block, (ATTENTION,))]
        return cls(tuple(Counter(kind.window for kind in kinds).items()), model.causal)

    def of(self, lengths: np.ndarray | Sequence[int]) -> np.ndarray:
        """The pairs of documents of these lengths, int64 of their shape."""
        lengths = np.asarray(lengths, np.int64)
        return sum((count * pairs(lengths, window, self.causal) for window, count in self.layers), 0 * lengths)


def pairs(lengths: np.ndarray, window: int | None, causal: bool) -> np.ndarray:
    """The pairs of one layer, int64: a token attends to itself and `window` - 1 tokens before it, or on both sides."""
    width = lengths if window is None else np.minimum(lengths, window)
    before = width * (width + 1) // 2 + (lengths - width) * width
    return before if causal else 2 * before - lengths


def token_pairs(model: ModelConfig) -> int:
    """The pairs of a query and a key that have as many multiplications as the linear layers for a token.

    Low ranks of latent attention count as whole projections, and a recurrence as attention without pairs.
    """
    D, heads = model.hidden_size, model.num_heads * (model.head_dim + model.value_dim)
    keys = model.num_kv_heads * (model.head_dim + model.value_dim)
    of_mlp, experts = (2 + is_gated(model)) * D, model.experts_per_token if model.num_experts else 0
    routed = experts * (model.expert_ffn_hidden_size or 0) + (model.shared_expert_ffn_hidden_size or 0)
    widths = {MLP: of_mlp * (model.ffn_hidden_size or 0), MOE: of_mlp * routed}
    total = D * model.padded_vocab_size
    for kind in layer_kinds(model):
        total += sum(widths.get(name, D * (heads + keys)) for name in BUILT_IN_BLOCKS.get(kind.block, (ATTENTION, MLP)))
    return total // heads
