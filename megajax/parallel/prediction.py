"""Multi-token prediction: modules after the last layer, each predicts a token further ahead (DeepSeek-AI 2024, 2.2).

Module k computes h_k = Block(W [RMSNorm(Emb(t_{i+k})); RMSNorm(h_{k-1})]) for each token i, where h_0 is the model's
output after its final norm, and h_k is after the module's own. The model's head predicts t_{i+k+1} from h_k. A module
runs forward and backward between the two passes of the layers, so its activations do not outlive the head's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.config.kinds import MTP, prediction_layers
from megajax.model.block import Block
from megajax.model.parts import BlockInputs, add_metrics, normalise
from megajax.parallel.comm import MeshComm
from megajax.parallel.embedding import TOKENS, MeshEmbedding
from megajax.parallel.head import NORMS, LossHead
from megajax.parallel.stack.layers import LayerStack
from megajax.parallel.stack.weights import Amax, ByGroup, GroupWeights, Metrics
from megajax.parallel.weights.exchange import WeightExchange
from megajax.parallel.weights.fused import FusedWeights
from megajax.parallel.weights.sums import added
from megajax.step_plan import StepPlan

DROPOUT = 2**31 + 2  # and the depth: folded into the step's key for the dropout of a module's embedded tokens
Arrays = Mapping[str, jax.Array]


class ModuleArrays(NamedTuple):
    """Arrays of the modules that all microbatches of a step share."""

    weights: ByGroup[GroupWeights]  # from `StackWeights.gather_once`
    scales: jax.Array  # [depth], the factors of their summed losses


class Predicted(NamedTuple):
    """The results of the modules for one microbatch, by module as `LayerStack` has them by segment."""

    gradients: ByGroup[GroupWeights]
    metrics: ByGroup[Metrics]
    amax: ByGroup[tuple[Amax, ...]]

    def plus(self, other: "Predicted") -> "Predicted":
        """Sums of gradients, in the dtype of these, and of metrics; maxima of the amaxes."""
        gradients = jax.tree.map(added, self.gradients, other.gradients)
        metrics = add_metrics(self.metrics, other.metrics)
        return Predicted(gradients, metrics, jax.tree.map(jnp.maximum, self.amax, other.amax))


class _Forward(NamedTuple):
    """A module's forward pass."""

    y: jax.Array  # [T / tensor, D], normalised
    saved: Any
    metrics: Metrics
    tokens: dict[str, jax.Array]  # the field of its embedding
    inputs: BlockInputs


class MultiTokenPrediction:
    """The modules, their losses and gradients; embedding and head are the model's."""

    def __init__(self, plan: StepPlan, comm: MeshComm, block: Block, exchange: WeightExchange, fused: FusedWeights):
        assert plan.prediction is not None
        self.model, self.exchange, self.comm = plan.config.model, exchange, comm
        self.layers = prediction_layers(self.model)
        self.weight = self.model.mtp_loss_weight / len(self.layers)  # of each module's loss
        self.stack = LayerStack(plan.prediction, comm, {MTP: block}, exchange, {MTP: fused})
        self.embedding, self.head = MeshEmbedding(plan, comm), LossHead(plan, comm, norms=())

    def losses_and_gradients(
        self,
        modules: ModuleArrays,
        non_block: Arrays,
        x: jax.Array,
        dx: jax.Array,
        fields: Arrays,
        inputs: BlockInputs,
        accumulated: dict[str, jax.Array],
        only_microbatch: bool,
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array, Predicted]:
        """(dx, `accumulated` plus gradients, this device's shares of the summed losses `[depth]`, other results).

        `x [T / tensor, D]` leaves the last layer, `dx` is its gradient of the model's own loss, `fields` are those of a
        microbatch `[B, S]`, `accumulated` are gradients outside the blocks.
        """
        x, dx = self._in_order((x, dx))
        weights, scales = modules
        norms = {name: non_block[name] for name in NORMS if name in non_block}
        h, pull = jax.vjp(self._final_norm, norms, x)
        passes: list[_Forward] = []
        for k in range(len(self.layers)):
            passes.append(self._forward(k, weights, non_block, h, fields, inputs))
            h = passes[-1].y
        dh, losses, gradients, amax = None, [], [], []
        for k, module in reversed([*enumerate(passes)]):
            target, mask = (fields[name][..., k].reshape(-1) for name in ("mtp_targets", "mtp_mask"))
            sums, dy, accumulated = self.head.losses_and_gradients(
                non_block, module.y, target, mask, scales[k], accumulated
            )
            losses.insert(0, sums["loss"])
            dy = dy if dh is None else dy + dh
            group = self._group(weights, k)
            if module is not passes[-1]:  # else XLA would keep the weights of the forward pass
                group, _ = self.exchange.tie_gather((group, dy))
            dpair, gradient, largest = self.stack.groups.backward(self._at(k), group, module.saved, dy, module.inputs)
            de, dh = jnp.split(dpair, 2, axis=1)
            accumulated = self.embedding.backward(accumulated, _table(non_block), module.tokens, module.inputs, de)
            gradient = self.stack.weights.reduce(gradient, self.stack.segments[k], 0, only_microbatch)
            dh, accumulated, gradient = self._in_order((dh, accumulated, gradient))
            gradients.insert(0, (gradient,))
            amax.insert(0, (largest,))
        dnorms, dx_of_modules = pull(dh)
        accumulated = {**accumulated, **{name: added(accumulated[name], g) for name, g in dnorms.items()}}
        predicted = Predicted(gradients, [(each.metrics,) for each in passes], amax)
        return dx + dx_of_modules, accumulated, jnp.stack(losses), predicted

    def _forward(self, k: int, weights, non_block: Arrays, h: jax.Array, fields: Arrays, inputs: BlockInputs):
        tokens = {"tokens": fields["targets"] if k == 0 else fields["mtp_targets"][..., k - 1]}
        key = inputs.dropout_key
        own = replace(inputs, dropout_key=None if key is None else jax.random.fold_in(key, DROPOUT + k))
        embedded = self.embedding.forward(_table(non_block), tokens, own)
        pair, at = jnp.concatenate([embedded, h], axis=1), self._at(k)
        y, saved, metrics = self.stack.groups.forward(at, self._group(weights, k), pair, own, True)
        return _Forward(y, saved, metrics, tokens, own)

    def _at(self, k: int):
        return self.stack.groups.at(self.stack.segments[k], 0, self.layers[k])

    def _group(self, weights: ByGroup[GroupWeights], k: int) -> GroupWeights:
        return self.stack.weights.group_at(weights[k][0], self.stack.segments[k], 0)

    def _final_norm(self, norms: Arrays, x: jax.Array) -> jax.Array:
        return normalise(self.model, x, norms["final_norm"], norms.get("final_norm_bias"))

    def _in_order[Values](self, values: Values) -> Values:
        """`values`, none available before all are: collectives must not overlap those of the layers (`LayerStack`)."""
        return lax.optimization_barrier(values) if max(self.comm.sizes.values()) > 1 else values


def _table(non_block: Arrays) -> dict[str, jax.Array]:
    """The weights of a module's embedding: rows of the token table, without learned positions."""
    return {TOKENS: non_block[TOKENS]}
