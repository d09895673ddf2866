"""Cross-attention: a sublayer that reads an encoder's stream (encoder.py), after attention in every second layer.

model: {block_pattern: [dense, reads_source], encoder: {kind: source, settings: {length: 64}}}
run: {extensions: [docs/examples/encoder.py, docs/examples/cross_attention.py]}
"""

from encoder import attention

from megajax.model import Sublayer, declare, register_block
from megajax.model.attention import Attention
from megajax.model.mlp import MLP
from megajax.model.sublayer import declare_norm, normalise


class CrossAttention(Sublayer):
    """Queries of the tokens, keys and values of the source: `[T, D]` → `[T, D]`."""

    NAME = "cross"
    LINEAR = ("query", "key", "value", "output")
    STREAMS = ("source",)
    SUPPORTS = frozenset({"tensor", "context", "empty_slots", "fp8"})

    def __init__(self, config):
        D, heads = config.hidden_size, config.num_heads * config.head_dim
        self.config = config
        self.norm, self.norm_bias = declare_norm(config)
        self.query, self.key, self.value = (declare((D, heads), ("embed", "heads")) for _ in range(3))
        self.output = declare((heads, D), ("heads", "embed"))

    def apply(self, w, x, ctx):
        comm, (B, S) = ctx.comm, ctx.inputs.positions.shape
        source, mask = ctx.inputs.streams["source"], ctx.inputs.fields["source_mask"]
        x = normalise(self.config, x, w["norm"], w.get("norm_bias"))
        q = comm.column_linear(x, w["query"]).reshape(B, S, -1, self.config.head_dim)
        k, v = (comm.column_linear(source, w[n]).reshape(B, mask.shape[1], -1, q.shape[-1]) for n in ("key", "value"))
        k, v, mask = comm.gather((k, v, mask), "context", dim=1)
        return comm.row_linear(attention(q, k, v, mask).reshape(B * S, -1), w["output"]), {}


register_block("reads_source", Attention, CrossAttention, MLP)
