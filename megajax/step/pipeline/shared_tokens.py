"""The tokens that leave the last virtual stage, shared by all stages: each computes head and loss of 1/P of them.

With prediction modules each stage has 1/P of every sequence, so to the modules the stages are like devices of
`context`. During attention the stages share the heads instead (DeepSpeed Ulysses), so the work is balanced.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.model.comm import Comm, LatentKeys, TokenPositions
from megajax.ops import AttentionSettings
from megajax.parallel import collectives
from megajax.parallel.context.heads import among_heads
from megajax.parallel.mesh_comm import TOKEN_AXES, MeshComm
from megajax.step_plan import StepPlan


class TokenShares:
    """Division of the tokens of a device's residual stream: `pieces` of equal length, each divided over the stages.

    The tokens of a stage are in the order of the whole; the last part of a piece may be padding.
    """

    def __init__(self, plan: StepPlan):
        self.stages, self.tokens = plan.sizes["pipeline"], plan.tokens // plan.sizes["tensor"]
        self.pieces = self.tokens // plan.shared_tokens
        self.length = -(-plan.shared_tokens // self.stages)  # of a piece on one stage

    def scatter(self, x: jax.Array) -> jax.Array:
        """`[T / tensor, D]`, summed over the stages → this stage's tokens."""
        x = self._divided(x).swapaxes(0, 1)
        return collectives.psum_scatter(x.reshape(-1, x.shape[-1]), "pipeline", scatter_dimension=0, tiled=True)

    def gather(self, x: jax.Array) -> jax.Array:
        """This stage's tokens → those of all stages `[T / tensor, D]`."""
        x = collectives.all_gather(x, "pipeline", axis=0, tiled=True)
        x = x.reshape(self.stages, self.pieces, self.length, -1).swapaxes(0, 1)
        return x.reshape(self.pieces, -1, x.shape[-1])[:, : self.tokens // self.pieces].reshape(self.tokens, -1)

    def of_stage(self, field: jax.Array) -> jax.Array:
        """`[T, ...]` or `[T / tensor, ...]`, the same on all stages → those of this stage's tokens."""
        divided = self._divided(field)
        of_this_stage = lax.dynamic_index_in_dim(divided, lax.axis_index("pipeline"), axis=1, keepdims=False)
        return of_this_stage.reshape(-1, *field.shape[1:])

    def _divided(self, x: jax.Array) -> jax.Array:
        """`[T, ...]` → `[pieces, P, length, ...]`, padded with zeros."""
        piece, more = self.tokens // self.pieces, x.shape[1:]
        x = x.reshape(-1, piece, *more)
        x = jnp.pad(x, ((0, 0), (0, self.stages * self.length - piece), *((0, 0) for _ in more)))
        return x.reshape(-1, self.stages, self.length, *more)


class SharedTokensComm(MeshComm):
    """The communication points of blocks whose tokens all stages share: `[B, S / P]` of a device's `[B, S]`.

    Weights are whole on every stage. `TokenPositions` are those of the device's `[B, S]` tokens.
    """

    token_axes = (*TOKEN_AXES, "pipeline")

    def __init__(self, whole: MeshComm, plan: StepPlan):
        """`whole` has the communication points for all tokens of a device."""
        super().__init__(plan.sizes, plan.kernels, plan.collectives, plan.deterministic)
        self.whole, self.stages = whole, plan.sizes["pipeline"]
        self.length = plan.shared_tokens // self.stages  # of consecutive tokens on a stage

    @property
    def attention_is_fused(self) -> bool:
        return self.whole.attention_is_fused

    def attend(self, q, k, v, positions: TokenPositions, settings: AttentionSettings):
        heads, P, sinks = q.shape[2], self.stages, settings.sinks
        shares = P * self.collectives.context.head_shards(self.whole.context_size)
        if missing := -heads % shares:  # each query head with its own key, and empty heads
            k, v = (jnp.repeat(a, heads // a.shape[2], axis=2) for a in (k, v))
            q, k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, missing), (0, 0))) for a in (q, k, v))
            sinks = sinks if sinks is None else jnp.pad(sinks, (0, missing))
        elif k.shape[2] % shares:  # some stages, or devices of a stage, have the same key
            copies = shares // math.gcd(shares, k.shape[2])
            k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))
        q, k, v = map(self._to_heads, (q, k, v))
        first = lax.axis_index("pipeline") * q.shape[2]  # of this stage's heads
        if sinks is not None:
            sinks = lax.dynamic_slice_in_dim(sinks, first, q.shape[2])
        out, largest = self.whole.attend(q, k, v, positions, replace(settings, sinks=sinks))
        largest = among_heads(largest, first, heads + missing)
        return self._to_tokens(out)[:, :, :heads], largest if largest is None else largest[:heads]

    def attend_latent(self, q, keys: LatentKeys, positions: TokenPositions, settings: AttentionSettings):
        return Comm.attend_latent(self, q, keys, positions, settings)

    def _to_heads(self, a: jax.Array) -> jax.Array:
        """`[B, S / P, N, H]` of this stage's tokens → `[B, S, N / P, H]` of its heads."""
        B, _, N, H = a.shape
        a = collectives.all_to_all(a.reshape(B, -1, self.length, N, H), "pipeline", 3, 2, tiled=True)
        return checkpoint_name(a.reshape(B, -1, *a.shape[3:]), "exchanged")

    def _to_tokens(self, a: jax.Array) -> jax.Array:
        """Inverse of `_to_heads`."""
        B, _, N, H = a.shape
        a = collectives.all_to_all(a.reshape(B, -1, self.stages * self.length, N, H), "pipeline", 2, 3, tiled=True)
        return checkpoint_name(a.reshape(B, -1, *a.shape[3:]), "exchanged")
