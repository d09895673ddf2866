"""Head and loss over chunks of tokens: forward and backward in one pass, without `[T, V]` logits in memory."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from megajax import ops
from megajax.config import ModelConfig
from megajax.model.parts import normalise
from megajax.parallel.comm import MeshComm
from megajax.parallel.weights.sums import after_microbatch, of_microbatch
from megajax.step_plan import StepPlan, loss_chunks

NORMS = ("final_norm", "final_norm_bias")


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
    def losses_and_gradients(self, weights, x, targets, mask, scale, accumulated: Mapping[str, jax.Array]):
        """(this device's shares of the summed losses, dx, `accumulated` plus the weights' gradients).

        The gradients are those of `scale · (loss + z-loss)`, with z-loss = `model.z_loss · Σ lse²`, of the weights in
        `accumulated`.
        """
        totals = {name: accumulated[name] for name in self.names if name in accumulated}
        chunks = self._chunks(x, targets, mask)

        def body(carry, chunk):
            gradients, loss, z_loss = carry
            chunk_loss, chunk_z, dlogits, (h, pull) = self._chunk(weights, chunk, scale, self.implementation)
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

    def _chunk(self, weights, chunk, scale: jax.Array | float, implementation: ops.LossImplementation):
        x_cd, targets_c, mask_c = chunk
        norms = {name: weights[name] for name in self.names[1:]}
        normed, pull = jax.vjp(self._norm, norms, x_cd)
        h = self.comm.enter(normed)
        equation = "cd,vd->cv" if self.model.tie_embeddings else "cd,dv->cv"
        w = weights[self.weight_name]
        logits = jnp.einsum(equation, h, w, preferred_element_type=self.logits_dtype)
        sharded = self.comm.tensor_size > 1
        loss, z_loss, dlogits = ops.chunk_loss_and_grad(
            logits,
            targets_c,
            mask_c,
            scale,
            h.dtype,
            vocab_start=self.comm.vocabulary_start(logits.shape[1]),
            vocab_size=self.model.vocab_size,
            softcap=self.model.logit_softcap,
            z_loss=self.model.z_loss,
            reduce_max=self.comm.max_over_tensor if sharded else None,
            reduce_sum=self.comm.sum_over_tensor if sharded else None,
            implementation=implementation,
        )
        return loss, z_loss, dlogits, (h, pull)

    def _norm(self, norms: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        return normalise(self.model, x, norms.get("final_norm"), norms.get("final_norm_bias"))

    def _chunks(self, x: jax.Array, targets: jax.Array, mask: jax.Array):
        """Chunks of tokens: chunk j has the j-th part of every `tensor` rank's own tokens, in the order of `enter`.

        Padding of the last chunk is masked.
        """
        tensor, own = self.comm.tensor_size, x.shape[0]
        n = loss_chunks(self.config, targets.size, tensor)
        padding = -own % n

        def arrange(a: jax.Array) -> jax.Array:
            a = jnp.pad(a.reshape(tensor, own), ((0, 0), (0, padding)))
            return a.reshape(tensor, n, -1).swapaxes(0, 1).reshape(n, -1)

        x = jnp.pad(x, ((0, padding), (0, 0)))
        return x.reshape(n, -1, x.shape[-1]), arrange(targets), arrange(mask)
