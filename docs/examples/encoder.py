"""An encoder: one layer of attention in both directions over a source text, whose stream the layers read.

Its batch fields are `source`, the source's token ids, and `source_mask`, False for padding.
"""

import jax
import jax.numpy as jnp
from pydantic import PositiveInt

from megajax.model import Encoder, declare, register_encoder
from megajax.model.sublayer import declare_norm_weight, normalise
from megajax.schema.fields import Section


def attention(q, k, v, mask):
    """Attention of `q [B, S, N, H]` to all of `k` and `v [B, S', N, H]` where `mask [B, S']` is True."""
    scores = jnp.einsum("bsnh,btnh->bnst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores, -1e30)
    return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores).astype(v.dtype), v)


@register_encoder
class SourceEncoder(Encoder):
    """Source tokens `[B, S']` → their stream `[T' / tensor, D]`."""

    NAME = "source"

    class Settings(Section):
        length: PositiveInt

    def __init__(self, config, settings):
        super().__init__(config, settings)
        D, N, H = config.hidden_size, config.num_heads, config.head_dim
        self.tokens = declare((config.vocab_size, D), ("positions", "embed"), "embedding")
        self.norm = declare_norm_weight(config, D)
        self.query, self.key, self.value = (declare((D, N * H), ("embed", "heads")) for _ in range(3))
        self.output = declare((N * H, D), ("heads", "embed"))

    def fields(self):
        return {"source": (jnp.int32, self.settings.length), "source_mask": (jnp.bool_, self.settings.length)}

    def apply(self, w, fields, comm):
        B, S = fields["source"].shape
        x = w["tokens"][comm.local_tokens(fields["source"].reshape(-1))]
        h = normalise(self.config, x, w["norm"], None)
        q, k, v = (
            comm.column_linear(h, w[name]).reshape(B, S, -1, self.config.head_dim) for name in ("query", "key", "value")
        )
        k, v, mask = comm.gather((k, v, fields["source_mask"]), "context", dim=1)
        y = attention(q, k, v, mask)
        return x + comm.row_linear(y.reshape(B * S, -1), w["output"])
