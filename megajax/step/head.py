"""Head and loss over chunks of tokens: forward and backward in one pass, without `[T, V]` logits in memory."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax import ops
from megajax.config import ModelConfig
from megajax.model.sublayer import normalise
from megajax.parallel.comm import MeshComm
from megajax.parallel.weights.sums import after_microbatch, of_microbatch
from megajax.step_plan import StepPlan, loss_chunks

NORMS = ("final_norm", "final_norm_bias")
# (log-probabilities of the targets, mask, fields) of a chunk's tokens → (losses, factors of the gradients of -log p)
TokenLoss = Callable[[jax.Array, jax.Array, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]


class LossHead:
    """Final norm, head and cross-entropy of a device's tokens; the vocabulary is sharded over `tensor`."""

    def __init__(self, plan: StepPlan, comm: MeshComm, norms: tuple[str, ...] = NORMS):
        """`norms` are the final norm's weights; without any, the input is normalised already."""
        config = plan.config
        self.model: ModelConfig = config.model
        self.config, self.comm = config, comm
        self.implementation: ops.LossImplementation = plan.kernels.loss
        # FP32 logits would take a tenth of the head's time; Megatron and MaxText round them to BF16 too.
        self.logits_dtype = jnp.bfloat16 if config.precision.compute == "bfloat16" else jnp.float32
        self.weight_name = "embedding.tokens" if config.model.tie_embeddings else "head"
        self.names = (self.weight_name, *norms[: 1 if config.model.norm == "rmsnorm" else 2])

    @jax.named_scope("head")
    def losses(self, weights: Mapping[str, jax.Array], x: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """Summed loss of `x [T / tensor, D]` against targets and mask `[T]`: this device's share."""

        def body(loss, chunk):
            # XLA removes the unused gradient; a kernel would write it.
            chunk_loss, _, _, _ = self._chunk(weights, chunk, 1.0, "reference")
            return loss + chunk_loss, None

        loss, _ = lax.scan(body, jnp.zeros((), jnp.float32), self._chunks(x, targets, mask))
        return loss / self.comm.tensor_size

    @jax.named_scope("head")
    def log_probs(self, weights: Mapping[str, jax.Array], x: jax.Array, targets: jax.Array) -> jax.Array:
        """Log-probabilities of the targets `[T]` in FP32; forward pass only."""

        def body(_, chunk):
            logits, _, _ = self._logits(weights, chunk[0])
            return None, ops.chunk_log_probs(logits, chunk[1], **self._vocabulary(logits))

        _, found = lax.scan(body, None, self._chunks(x, targets, jnp.ones(targets.shape)))
        tensor = self.comm.tensor_size
        found = found.reshape(len(found), tensor, -1).swapaxes(0, 1).reshape(tensor, -1)
        return found[:, : x.shape[0]].reshape(-1)

    @jax.named_scope("head")
    def losses_and_gradients(
        self,
        weights,
        x,
        targets,
        mask,
        scale,
        accumulated: Mapping[str, jax.Array],
        *,
        smoothing: float = 0.0,
        token_loss: TokenLoss | None = None,
        fields: Mapping[str, jax.Array] | None = None,
    ):
        """(this device's shares of the summed losses, dx, `accumulated` plus the weights' gradients).

        The gradients are those of `scale · (loss + z-loss)`, with z-loss = `model.z_loss · Σ lse²`, of the weights in
        `accumulated`. `token_loss` replaces the cross-entropy by a function of the log-probabilities and of `fields`
        `[T, ...]`.
        """
        totals = {name: accumulated[name] for name in self.names if name in accumulated}
        chunks = self._chunks(x, targets, mask, fields)

        def body(carry, chunk):
            gradients, loss, z_loss = carry
            chunk_loss, chunk_z, dlogits, (h, pull) = self._chunk(
                weights, chunk, scale, self.implementation, smoothing, token_loss
            )
            w = weights[self.weight_name]
            tied = self.model.tie_embeddings
            dw = {}
            if self.weight_name in accumulated:
                equation = "cv,cd->vd" if tied else "cv,cd->dv"
                dw = {self.weight_name: jnp.einsum(equation, dlogits, h, preferred_element_type=jnp.float32)}
            dh = jnp.einsum("cv,vd->cd" if tied else "cv,dv->cd", dlogits, w)
            dnorms, dx = pull(self.comm.leave(dh))
            gradients = {name: gradients[name] + {**dnorms, **dw}[name] for name in totals}
            return (gradients, loss + chunk_loss, z_loss + chunk_z), dx

        zero = jnp.zeros((), jnp.float32)
        (gradients, loss, z_loss), dx = lax.scan(body, (of_microbatch(totals), zero, zero), chunks)
        shares = self.comm.tensor_size
        sums = {"loss": loss / shares, "z_loss": z_loss / shares}
        return sums, dx.reshape(-1, dx.shape[-1])[: x.shape[0]], {**accumulated, **after_microbatch(totals, gradients)}

    def _chunk(
        self,
        weights,
        chunk,
        scale: jax.Array | float,
        implementation: ops.LossImplementation,
        smoothing: float = 0.0,
        token_loss: TokenLoss | None = None,
    ):
        x_cd, targets_c, mask_c, fields = chunk
        logits, h, pull = self._logits(weights, x_cd)
        vocabulary, own_loss = self._vocabulary(logits), None
        if token_loss is not None:
            losses, mask_c = token_loss(ops.chunk_log_probs(logits, targets_c, **vocabulary), mask_c, fields)
            own_loss = losses.sum()
        loss, z_loss, dlogits = ops.chunk_loss_and_grad(
            logits,
            targets_c,
            mask_c,
            scale,
            h.dtype,
            z_loss=self.model.z_loss,
            smoothing=smoothing,
            implementation=implementation,
            **vocabulary,
        )
        return loss if own_loss is None else own_loss, z_loss, dlogits, (h, pull)

    def _logits(self, weights, x_cd: jax.Array):
        """(logits of this shard of the vocabulary, the head's input, the pullback of the norm)."""
        norms = {name: weights[name] for name in self.names[1:]}
        normed, pull = jax.vjp(self._norm, norms, x_cd)
        h = self.comm.enter(normed)
        equation = "cd,vd->cv" if self.model.tie_embeddings else "cd,dv->cv"
        w = weights[self.weight_name]
        return jnp.einsum(equation, h, w, preferred_element_type=self.logits_dtype), h, pull

    def _vocabulary(self, logits: jax.Array) -> dict[str, Any]:
        """The arguments of `ops` about this shard of the vocabulary."""
        sharded = self.comm.tensor_size > 1
        return {
            "vocab_start": self.comm.index("tensor") * logits.shape[1],
            "vocab_size": self.model.vocab_size,
            "softcap": self.model.logit_softcap,
            "reduce_max": partial(self.comm.max, axes="tensor") if sharded else None,
            "reduce_sum": partial(self.comm.sum, axes="tensor") if sharded else None,
        }

    def _norm(self, norms: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        return normalise(self.model, x, norms.get("final_norm"), norms.get("final_norm_bias"))

    def _chunks(self, x: jax.Array, targets: jax.Array, mask: jax.Array, fields: Mapping[str, jax.Array] | None = None):
        """Chunks of x, targets, mask and fields.

        Chunk j has the j-th part of every `tensor` rank's own tokens, in the order of `enter`.
        Padding of the last chunk is masked.
        """
        tensor, own = self.comm.tensor_size, x.shape[0]
        n = loss_chunks(self.config, targets.size, tensor)
        padding = -own % n

        def arrange(a: jax.Array) -> jax.Array:
            rest = a.shape[1:]
            a = jnp.pad(a.reshape(tensor, own, *rest), ((0, 0), (0, padding), *((0, 0) for _ in rest)))
            return a.reshape(tensor, n, -1, *rest).swapaxes(0, 1).reshape(n, -1, *rest)

        x = jnp.pad(x, ((0, padding), (0, 0)))
        return x.reshape(n, -1, x.shape[-1]), arrange(targets), arrange(mask), jax.tree.map(arrange, fields or {})
