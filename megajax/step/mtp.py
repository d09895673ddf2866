"""Multi-token prediction: modules after the last layer, each predicts a token further ahead (DeepSeek-AI 2024, 2.2).

Module k, counted from 1, computes h_k = Block(W [RMSNorm(Emb(t_{i+k})); RMSNorm(h_{k-1})]) for each token i, where h_0
is the model's output after its final norm, and h_k is after the module's own. The model's head predicts t_{i+k+1} from
h_k. A module runs forward and backward between the two passes of the layers, so its activations do not outlive the
head's. The code counts modules from 0.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.layout.kinds import extra_layers
from megajax.layout.prediction_modules import MODULES, MTP
from megajax.model.block import Block
from megajax.model.sublayer import BlockInputs, normalise
from megajax.ops.barriers import not_before
from megajax.parallel.mesh_comm import MeshComm
from megajax.step.embedding import TOKENS, Embedding
from megajax.step.head import NORMS, LossHead
from megajax.step.nodes import HIDDEN, Arrays, Field, Microbatch, Results, StepArrays, Streams, Table, plus_weights
from megajax.step.stack.layers import LayerStack
from megajax.step.stack.remat_groups import StreamGradients
from megajax.step.stack.stack_weights import ByGroup, GroupMetrics, GroupWeights
from megajax.step_plan import ExtraPlan, StepPlan
from megajax.weights.weight import Weight

DROPOUT = 2**31 + 2  # and the depth: folded into the step's key for the dropout of a module's embedded tokens


class _Forward(NamedTuple):
    """A module's forward pass."""

    y: jax.Array  # [T / tensor, D], normalised
    saved: Any
    metrics: GroupMetrics
    tokens: dict[str, jax.Array]  # the field of its embedding
    inputs: BlockInputs


class MultiTokenPrediction:
    """The modules, their losses and gradients: a terminal node; embedding and head are the model's."""

    NAME = MTP
    EVALUATED = ()  # evaluation reports the model's own loss
    reads = ()  # its layers read whole streams, by their inputs
    reads_positions = True

    def __init__(self, plan: StepPlan, comm: MeshComm, block: Block, weights: Mapping[str, Weight]):
        self.model, self.comm = plan.model, comm
        self.layers = extra_layers(self.model)
        self.weight = MODULES.weight(self.model) / len(self.layers)  # of each module's loss
        own, can_reduce_in_backward = ExtraPlan.after(plan), not plan.sums_gradients
        self.stack = LayerStack(MTP, own, comm, {MTP: block}, {MTP: weights}, can_reduce_in_backward)
        self.embedding, self.head = Embedding(plan, comm), LossHead(plan, comm, before=())

    def fields(self) -> dict[str, Field]:
        depth, key = (len(self.layers),), MODULES.key
        own = {"mtp_targets": Field(jnp.int32, key, depth, True), "mtp_mask": Field(jnp.float32, key, depth, True)}
        return {"targets": Field(jnp.int32), **own}

    def derived_fields(self, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return fields_of_modules(fields, len(self.layers))

    def counts(self, batch: Arrays) -> dict[str, jax.Array]:
        return {"mtp_loss": batch["mtp_mask"].astype(jnp.float32).sum((0, 1, 2))}

    def loss_factor(self, loss_scale: jax.Array, counts: Arrays) -> jax.Array:
        """`[depth]`."""
        return self.weight * loss_scale / counts["mtp_loss"]

    def turn(
        self, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        x, dx = self._not_overlapped((streams[HIDDEN], gradients[HIDDEN]))
        weights, factors = arrays.stacks[MTP], arrays.loss_factors[MTP]
        norms = {name: arrays.table[name] for name in NORMS if name in arrays.table}
        h, pull = jax.vjp(self._final_norm, norms, x)
        batch = batch._replace(inputs=self.stack.with_streams(batch, streams))
        of_streams = self.stack.first_gradients(gradients, batch.inputs).streams
        passes: list[_Forward] = []
        for k in range(len(self.layers)):
            passes.append(self._forward(k, weights, arrays.table, h, batch))
            h = passes[-1].y
        dh, losses, found, amax = None, [], [], []
        for k, module in reversed([*enumerate(passes)]):
            target, mask = (batch.fields[name][..., k].reshape(-1) for name in ("mtp_targets", "mtp_mask"))
            sums, dy, table = self.head.losses_and_gradients(
                arrays.table, module.y, target, mask, table, self.head.cross_entropy(factors[k])
            )
            losses.insert(0, sums["loss"])
            dy = dy if dh is None else dy + dh
            group = self._group(weights, k)
            if module is not passes[-1]:  # else XLA would keep the weights of the forward pass
                group, _ = self.stack.weights.tie_gather((group, dy))
            dy = StreamGradients(dy, of_streams)
            dpair, gradient, largest = self.stack.groups.backward(self._at(k), group, module.saved, dy, module.inputs)
            of_streams = dpair.streams
            de, dh = jnp.split(dpair.x, 2, axis=1)
            table = self.embedding.add_gradients(table, _table(arrays.table), module.tokens, module.inputs, de)
            gradient = self.stack.weights.reduce_group(gradient, self.stack.segments[k], 0)
            dh, table, gradient = self._not_overlapped((dh, table, gradient))
            found.insert(0, (gradient,))
            amax.insert(0, (largest,))
        dnorms, dx_of_modules = pull(dh)
        table = plus_weights(table, dnorms)
        gradients, metrics = (
            gradients | {HIDDEN: dx + dx_of_modules, **of_streams},
            [(each.metrics,) for each in passes],
        )
        return gradients, table, Results({MTP: found}, {"mtp_loss": jnp.stack(losses)}, {MTP: metrics}, {MTP: amax})

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        return {}

    def metrics(self, losses: Arrays) -> dict[str, jax.Array]:
        """The modules' mean loss, and each one's if there are several."""
        own = losses["mtp_loss"]
        return {"mtp_loss": own.mean(), **({"mtp_loss/module": own} if len(own) > 1 else {})}

    def _forward(self, k: int, weights, table: Arrays, h: jax.Array, batch: Microbatch):
        tokens = {"tokens": batch.fields["targets"] if k == 0 else batch.fields["mtp_targets"][..., k - 1]}
        key = batch.inputs.dropout_key
        own = replace(batch.inputs, dropout_key=None if key is None else jax.random.fold_in(key, DROPOUT + k))
        embedded = self.embedding.embed(_table(table), tokens, own)
        pair, at = jnp.concatenate([embedded, h], axis=1), self._at(k)
        y, saved, metrics = self.stack.groups.forward(at, self._group(weights, k), pair, own, True)
        return _Forward(y, saved, metrics, tokens, own)

    def _at(self, k: int):
        return self.stack.groups.at(self.stack.segments[k], 0, self.layers[k])

    def _group(self, weights: ByGroup[GroupWeights], k: int) -> GroupWeights:
        return self.stack.weights.select_group(weights[k][0], self.stack.segments[k], 0)

    def _final_norm(self, norms: Arrays, x: jax.Array) -> jax.Array:
        return normalise(self.model, x, norms["final_norm"], norms.get("final_norm_bias"))

    def _not_overlapped[Values](self, values: Values) -> Values:
        """`values`, none available before all are: collectives must not overlap those of the layers (`LayerStack`)."""
        return not_before(values) if max(self.comm.sizes.values()) > 1 else values


def _table(table: Arrays) -> dict[str, jax.Array]:
    """The weights of a module's embedding: rows of the token table, without learned positions."""
    return {TOKENS: table[TOKENS]}


def fields_of_modules(fields: Mapping[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    """`mtp_targets` and `mtp_mask` `[rows, S, depth]` of whole rows.

    Module k predicts the target k tokens later, if it is in the same document; elsewhere its target is 0 and does not
    count. Without `segment_ids` a row is one document.
    """
    token, counts = fields["targets"], np.asarray(fields["loss_mask"])
    documents = fields.get("segment_ids", np.zeros_like(token))
    same, end = documents[:, 1:] == documents[:, :-1], ((0, 0), (0, 1))
    targets, masks = [], []
    for _ in range(depth):
        token, counts = (np.pad(np.where(same, a[:, 1:], 0), end) for a in (token, counts))
        targets.append(token)
        masks.append(counts)
    return {"mtp_targets": np.stack(targets, axis=2), "mtp_mask": np.stack(masks, axis=2)}
