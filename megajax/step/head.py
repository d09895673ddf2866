"""Head and loss over chunks of tokens: forward and backward in one pass, without `[T, V]` logits in memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from megajax import ops
from megajax.model.sublayer import add_bias, normalise, predict, scale_head
from megajax.parallel.mesh_comm import MeshComm
from megajax.step_plan import StepPlan
from megajax.weights.sums import after_microbatch, of_microbatch

NORMS = ("final_norm", "final_norm_bias")
BEFORE = (*NORMS, "head_dense", "head_norm", "head_norm_bias")  # the weights before the output matrix
BIAS = "head_bias"
Fields = Mapping[str, jax.Array]
ROWS, MANY_ROWS = 8, 512  # of a chunk; fewer cost nothing
# (this shard's logits [c, V / tensor], targets, mask, fields) of a chunk → (sums of losses, gradient of the logits)
ChunkLoss = Callable[[jax.Array, jax.Array, jax.Array, Fields], tuple[Fields, jax.Array]]
# (log-probabilities of the targets [c] or FP32 logits [c, V], mask, fields) of a chunk's tokens → (sums of losses and
# other numbers, derivatives of the losses)
TokenLoss = Callable[[jax.Array, jax.Array, Fields], tuple[Fields, jax.Array]]
SUMS = ("loss", "z_loss")


class LossHead:
    """Final norm, head and cross-entropy of a device's tokens; the vocabulary is sharded over `tensor`."""

    def __init__(self, plan: StepPlan, comm: MeshComm, before: tuple[str, ...] = BEFORE):
        """`before` are the weights before the output matrix; without any, the input is normalised already."""
        self.model, self.plan, self.comm = plan.model, plan, comm
        self.implementation: ops.LossImplementation = plan.kernels.loss
        # FP32 logits would take a tenth of the head's time; Megatron and MaxText round them to BF16 too.
        self.dtype = plan.compute
        self.logits_dtype = jnp.bfloat16 if self.dtype == jnp.bfloat16 else jnp.float32
        self.weight_name = "embedding.tokens" if self.model.tie_embeddings else "head"
        self.before = tuple(name for name in before if name in plan.placements)
        self.names = (self.weight_name, *self.before, *((BIAS,) if self.model.head_bias else ()))

    @jax.named_scope("head")
    def losses(self, weights: Mapping[str, jax.Array], x: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """Summed cross-entropy of `x [T / tensor, D]` against targets and mask `[T]`: this device's share."""
        # XLA removes the unused gradient; a kernel would write it.
        loss = self.cross_entropy(1.0, implementation="reference")
        return self.sums_of(weights, x, targets, mask, loss, {}, ("loss",))["loss"]

    @jax.named_scope("head")
    def sums_of(
        self, weights, x, targets, mask, chunk_loss: ChunkLoss, fields: Fields, names: Sequence[str]
    ) -> dict[str, jax.Array]:
        """The sums of a chunk loss with these names: this device's shares; forward pass only."""

        def body(sums, chunk):
            logits, _, _ = self._logits(weights, chunk[0])
            found, _ = chunk_loss(logits, *chunk[1:])
            return {name: total + found[name] for name, total in sums.items()}, None

        zeros = {name: jnp.zeros((), jnp.float32) for name in names}
        sums, _ = lax.scan(body, zeros, self._chunks(x, targets, mask, fields))
        return {name: total / self.comm.tensor_size for name, total in sums.items()}

    @jax.named_scope("head")
    def log_probs(self, weights: Mapping[str, jax.Array], x: jax.Array, targets: jax.Array) -> jax.Array:
        """Log-probabilities of the targets `[T]` in FP32; forward pass only."""

        def body(_, chunk):
            logits, _, _ = self._logits(weights, chunk[0])
            return None, ops.chunk_log_probs(logits, chunk[1], self._vocabulary(logits))

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
        accumulated: Mapping[str, jax.Array],
        chunk_loss: ChunkLoss,
        fields: Fields | None = None,
        names: Sequence[str] = SUMS,
    ):
        """(this device's shares of the sums of losses, dx, `accumulated` plus the weights' gradients).

        Targets, mask and fields are `[T, ...]`. Only the weights in `accumulated` have gradients. `names` are those of
        the sums; one that `chunk_loss` does not give is 0.
        """
        totals = {name: accumulated[name] for name in self.names if name in accumulated}

        def body(carry, chunk):
            gradients, sums = carry
            logits, h, pull = self._logits(weights, chunk[0])
            losses, dlogits = chunk_loss(logits, *chunk[1:])
            w = weights[self.weight_name]
            tied = self.model.tie_embeddings
            dw = {}
            if self.weight_name in accumulated:
                equation = "cv,cd->vd" if tied else "cv,cd->dv"
                dw = {self.weight_name: jnp.einsum(equation, dlogits, h, preferred_element_type=jnp.float32)}
            if BIAS in accumulated:
                dw[BIAS] = dlogits.sum(0, dtype=jnp.float32)
            dh = jnp.einsum("cv,vd->cd" if tied else "cv,dv->cd", dlogits, w)
            before, dx = pull(self.comm.reduce_scatter_tokens(dh))
            gradients = {name: gradients[name] + {**before, **dw}[name] for name in totals}
            return (gradients, {name: sums[name] + losses.get(name, 0) for name in sums}), dx

        zeros = {name: jnp.zeros((), jnp.float32) for name in names}
        chunks = self._chunks(x, targets, mask, fields)
        (gradients, sums), dx = lax.scan(body, (of_microbatch(totals), zeros), chunks)
        # All devices of `tensor` have the same losses; each has the gradients of its own columns alone.
        sums = {name: total / self.comm.tensor_size for name, total in sums.items()}
        return sums, dx.reshape(-1, dx.shape[-1])[: x.shape[0]], {**accumulated, **after_microbatch(totals, gradients)}

    # Losses of a chunk

    def cross_entropy(
        self, scale: jax.Array | float, smoothing: float = 0.0, implementation: ops.LossImplementation | None = None
    ) -> ChunkLoss:
        """Cross-entropy with its z-loss, `model.z_loss · Σ lse²`; the gradient is that of `scale` times their sum."""

        def loss(logits: jax.Array, targets: jax.Array, mask: jax.Array, fields: Fields):
            of_chunk = ops.CHUNK_LOSSES[implementation or self.implementation]
            vocabulary, weight = self._vocabulary(logits), self.model.z_loss
            found, z_loss, dlogits = of_chunk(logits, targets, mask, scale, self.dtype, vocabulary, weight, smoothing)
            return {"loss": found, "z_loss": z_loss}, dlogits

        return loss

    def of_log_probs(self, scale: jax.Array | float, token_loss: TokenLoss) -> ChunkLoss:
        """A function of the targets' log-probabilities; the gradient is that of `scale` times its sum."""
        cross_entropy = self.cross_entropy(scale)

        def loss(logits: jax.Array, targets: jax.Array, mask: jax.Array, fields: Fields):
            log_probs = ops.chunk_log_probs(logits, targets, self._vocabulary(logits))
            sums, slopes = token_loss(log_probs, mask, {**fields, "targets": targets})
            return sums, cross_entropy(logits, targets, -slopes, fields)[1]

        return loss

    def of_logits(self, scale: jax.Array | float, logit_loss: TokenLoss) -> ChunkLoss:
        """A function of a chunk's logits, gathered over `tensor`; the gradient is that of `scale` times its sum."""
        comm = self.comm

        def loss(logits: jax.Array, targets: jax.Array, mask: jax.Array, fields: Fields):
            width = logits.shape[1]
            whole, pull = jax.vjp(self._capped, comm.gather(logits, "tensor", dim=1))
            sums, slopes = logit_loss(whole, mask, {**fields, "targets": targets})
            (gradient,) = pull(scale * slopes)
            own = lax.dynamic_slice_in_dim(gradient, comm.index("tensor") * width, width, 1)
            return sums, own.astype(self.dtype)

        return loss

    def whole_logits(self, weights, h: jax.Array) -> jax.Array:
        """The head's input `[c, D]`, the same on all devices of `tensor` → FP32 logits of the whole vocabulary."""
        return self._capped(self.comm.gather(self._product(weights, h), "tensor", dim=1))

    def _capped(self, logits: jax.Array) -> jax.Array:
        logits, cap = logits.astype(jnp.float32)[:, : self.model.vocab_size], self.model.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _logits(self, weights, x_cd: jax.Array):
        """(logits of this shard of the vocabulary, the head's input, the pullback of what is before it)."""
        before = {name: weights[name] for name in self.before}
        normed, pull = jax.vjp(self.norm, before, x_cd)
        h = self.comm.all_gather_tokens(normed)
        return self._product(weights, h), h, pull

    def _product(self, weights, h: jax.Array) -> jax.Array:
        equation = "cd,vd->cv" if self.model.tie_embeddings else "cd,dv->cv"
        logits = jnp.einsum(equation, h, weights[self.weight_name], preferred_element_type=self.logits_dtype)
        return add_bias(logits, weights.get(BIAS))

    def _vocabulary(self, logits: jax.Array) -> ops.Vocabulary:
        """This shard of the vocabulary."""
        start = self.comm.index("tensor") * logits.shape[1]
        whole = ops.Vocabulary(self.model.vocab_size, start, self.model.logit_softcap)
        if self.comm.tensor_size == 1:
            return whole
        maximum, total = partial(self.comm.max, axes="tensor"), partial(self.comm.sum, axes="tensor")
        return replace(whole, reduce_max=maximum, reduce_sum=total)

    def norm(self, norms: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        """The final norm of `x [..., D]`, and a prediction head; `norms` are their weights, or a table with them."""
        h = normalise(self.model, x, norms.get("final_norm"), norms.get("final_norm_bias"))
        return predict(self.model, norms, scale_head(self.model, h))

    def _chunks(self, x: jax.Array, targets: jax.Array, mask: jax.Array, fields: Mapping[str, jax.Array] | None = None):
        """Chunks of x, targets, mask and fields.

        Chunk j has the j-th part of every `tensor` rank's own tokens, in the order of `all_gather_tokens`.
        Padding of the last chunk is masked. A large chunk has a multiple of 8 rows, else XLA copies its logits into
        such a matrix and back for the matmuls of GPUs.
        """
        tensor, own = self.comm.tensor_size, x.shape[0]
        n = self.plan.chunks_of(targets.size)
        padding = -own % (n * ROWS if own > MANY_ROWS * n else n)

        def arrange(a: jax.Array) -> jax.Array:
            more = a.shape[1:]
            a = jnp.pad(a.reshape(tensor, own, *more), ((0, 0), (0, padding), *((0, 0) for _ in more)))
            return a.reshape(tensor, n, -1, *more).swapaxes(0, 1).reshape(n, -1, *more)

        x = jnp.pad(x, ((0, padding), (0, 0)))
        return x.reshape(n, -1, x.shape[-1]), arrange(targets), arrange(mask), jax.tree.map(arrange, fields or {})
