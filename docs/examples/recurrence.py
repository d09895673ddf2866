"""A sublayer with a state: a linear recurrence in place of attention, in every second layer.

    megajax train my.yaml run.extensions=[docs/examples/recurrence.py] model.block_pattern=[dense,recurrent]

A channel of a token is h_t = a · h_{t-1} + v_t, with a decay a and v = norm(x) · value; the term is h · output.
"""

import jax
import jax.numpy as jnp

from megajax.model import Sublayer, declare, register_block
from megajax.model.mlp import MLP
from megajax.model.sublayer import declare_norm, normalise


class Recurrence(Sublayer):
    """h_t = a · h_{t-1} + v_t over the tokens of a document: `[T, D]` → `[T, D]`."""

    NAME = "recurrence"
    LINEAR = ("value", "output")
    IN_ORDER = True  # with mesh.context a device takes consecutive tokens
    SUPPORTS = frozenset({"tensor", "context", "documents", "empty_slots", "fp8", "lora", "decoding"})

    def __init__(self, config):
        D, F = config.hidden_size, config.ffn_hidden_size
        self.config = config
        self.norm, self.norm_bias = declare_norm(config)
        self.value = declare((D, F), ("embed", "mlp"))
        self.decay = declare((F,), ("mlp",), "bias")
        self.output = declare((F, D), ("mlp", "embed"))

    def apply(self, w, x, ctx):
        comm, where = ctx.comm, ctx.inputs.token_positions
        B, S = where.index.shape
        x = normalise(self.config, x, w["norm"], w.get("norm_bias"))
        values = comm.column_linear(x, w["value"]).reshape(B, S, -1).astype(jnp.float32)  # [B, S, F / tensor]
        values, first, is_real = comm.in_order((values, where.index_in_document == 0, where.is_real))
        decay = jnp.where(first[..., None], 0, jax.nn.sigmoid(w["decay"].astype(jnp.float32)))
        if is_real is not None:  # padding does not change the state
            decay = jnp.where(is_real[..., None], decay, 1)
            values = jnp.where(is_real[..., None], values, 0)
        # This device's tokens, as if no others were before them
        kept, h = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, values), axis=1)
        before, earlier = jnp.zeros_like(h[:, -1]), comm.earlier()
        if earlier is not None:
            before = earlier
        ends = comm.gather((kept[None, :, -1], h[None, :, -1]), "context")  # [devices, B, F / tensor]
        for device, (all_kept, end) in enumerate(zip(*ends, strict=True)):
            before = jnp.where(device < comm.index("context"), all_kept * before + end, before)
        h = h + kept * before[:, None]
        comm.keep(h[:, -1])
        y = comm.in_order(h, back=True).astype(x.dtype)
        return comm.row_linear(y.reshape(B * S, -1), w["output"]), {}


register_block("recurrent", Recurrence, MLP)
