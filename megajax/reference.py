"""A training step on one device, written as plainly as possible: the page to read first.

It has the mathematics of the parallel step without its machinery: the same sublayers (`megajax.model`) with the
communication of one device, the logits of all tokens at once, `jax.grad`, one microbatch after another, all in FP32.
It imports nothing of the parallel step. Tests compare the step on meshes with this page.

    reference = Reference(config, adamw(config, learning_rate=1e-3))  # or another optimizer of optax
    state, step = reference.first_state(), jax.jit(reference.train_step)
    state, losses = step(state, batch)  # arrays [rows, S]: tokens, targets, loss_mask, positions

Shape letters: M microbatches of B sequences, S tokens in a sequence, T = B·S, D model width, V vocabulary, L layers of
one kind of block.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from megajax import ops
from megajax.config import Config
from megajax.config.sentences import fail, format_keys
from megajax.layout.kinds import extra_layers, extra_of, stacked_layers
from megajax.model.block import layer_state
from megajax.model.comm import TokenPositions
from megajax.model.parameters import init_parameters, parameters
from megajax.model.sublayer import BlockInputs, RealTokens, is_maximum
from megajax.model.transformer import Transformer
from megajax.options.registered import OWN_OBJECTIVES

Arrays = Mapping[str, jax.Array]
ByKind = Mapping[str, Arrays]  # by kind of block and name, [L, ...]
# Folded into a step's key. Dropout has the lower numbers, 0 after the embedding, then one for each sublayer of a layer.
JITTER, AHEAD = 2**31, 2**31 + 2


class StepState(NamedTuple):
    """Everything that a step changes."""

    weights: Arrays  # by canonical name, such as embedding.tokens [V, D] and blocks.dense.mlp.up [L, D, F]
    optimizer: optax.OptState
    layers: ByKind  # state that is not trained, such as routers' biases
    step: jax.Array  # number of steps so far


class Reference:
    """The step of a config and an optimizer."""

    def __init__(self, config: Config, optimizer: optax.GradientTransformation):
        """Raises ConfigError for adapters (`lora`) and for an objective that is not built in."""
        _refuse(config, {"lora.rank": config.lora.rank, "objective.kind": config.objective.kind not in OWN_OBJECTIVES})
        self.config, self.optimizer, self.model = config, optimizer, Transformer(config.model)

    def first_state(self, weights: Mapping[str, Any] | None = None) -> StepState:
        """The state before the first step, with the initial weights of `run.seed` or with others."""
        if weights is None:
            weights = init_parameters(self.model, self.config.run.seed, self.config.model.init_std)
        weights = {name: jnp.asarray(w) for name, w in weights.items()}
        layers = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layer_state(self.config.model))
        return StepState(weights, self.optimizer.init(weights), layers, jnp.int32(0))

    def train_step(self, state: StepState, batch: Arrays) -> tuple[StepState, dict[str, jax.Array]]:
        """(the state after one more step, its losses and gradient norm)."""
        losses, gradients, metrics = self.losses_and_gradients(state, batch)
        return self.updated(state, gradients, metrics), losses | {"grad_norm": optax.tree.norm(gradients)}

    def losses_and_gradients(self, state: StepState, batch: Arrays) -> tuple[dict[str, jax.Array], Arrays, ByKind]:
        """(losses by name, gradients of the weights, metrics of the layers)."""
        key = jax.random.fold_in(jax.random.key(self.config.run.seed + 1), state.step)
        total = jax.grad(self.loss, has_aux=True)
        gradients, (losses, metrics) = total(state.weights, state.layers, batch, key)
        return losses, gradients, metrics

    def updated(self, state: StepState, gradients: Arrays, metrics: ByKind) -> StepState:
        """The state after a step with these gradients and metrics."""
        directions, moments = self.optimizer.update(gradients, state.optimizer, state.weights)
        weights: Any = optax.apply_updates(state.weights, directions)
        for kind, block in self.model.blocks.items():  # model.qk_clip scales queries and keys of too large scores
            for name, factor in block.rescaled(metrics[kind]).items():
                weights[f"blocks.{kind}.{name}"] *= factor
        layers = {kind: self.model.blocks[kind].updated_state(a, metrics[kind]) for kind, a in state.layers.items()}
        return StepState(weights, moments, layers, state.step + 1)

    def loss(
        self, weights: Arrays, layers: ByKind, batch: Arrays, key: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], ByKind]]:
        """(the number that is minimised, (losses by name, metrics of the layers)) of a batch `[rows, S]`.

        `key` is for dropout; without it this is evaluation. Losses are means over the tokens that count in the whole
        batch; with `objective.average: microbatches` the mean of the microbatches' means is minimised. Losses of
        routers are not linear in the tokens: they are means over the microbatches.
        """
        model, M = self.config.model, self.config.batch.num_microbatches

        def run(one: tuple[jax.Array, Arrays]) -> tuple[jax.Array, ByKind]:
            return self.microbatch(weights, layers, *one, key)

        with jax.default_matmul_precision("highest"):
            sums, metrics = lax.map(run, (jnp.arange(M), {n: a.reshape(M, -1, *a.shape[1:]) for n, a in batch.items()}))
        means = _means(sums.sum(0))  # [1 + extra layers, 2]: of the model, then of each layer after it
        by_tokens = self.config.objective.average == "tokens"
        minimised = (means if by_tokens else _means(sums).mean(0)).sum(-1)
        extra = extra_of(model)
        ahead = extra.weight(model) * minimised[1:].sum() / extra.count(model) if extra else 0
        metrics = {kind: {name: _combined(name, a) for name, a in own.items()} for kind, own in metrics.items()}
        names = {name for block in self.model.blocks.values() for name in block.losses}
        routers = sum(a.sum() for own in metrics.values() for name, a in own.items() if name in names)
        losses = {"loss": means[0, 0], "z_loss": means[0, 1]}
        losses |= {f"{extra.name}_loss/module": means[1:, 0]} if extra else {}
        return minimised[0] + ahead + routers, (losses, metrics)

    def microbatch(
        self, weights: Arrays, layers: ByKind, index: jax.Array, fields: Arrays, key: jax.Array | None
    ) -> tuple[jax.Array, ByKind]:
        """(sums of `cross_entropy` `[1 + extra layers, 3]`, metrics of the layers); fields `[B, S]`."""
        model, metrics = self.model, []
        inputs = model.with_stream(weights, self.inputs(index, fields, key), fields)
        targets, counted = fields["targets"], fields["loss_mask"]
        x = model.embed(weights, fields["tokens"].reshape(-1), fields["positions"].reshape(-1), inputs)
        x = self.dropout(x, inputs)
        for layer in range(self.config.model.num_layers):
            x, measured = model.layer(weights, layer, x, inputs, layers)
            metrics.append(measured)
        h = model.output(weights, x)
        smoothing = 0.0 if key is None else self.config.objective.label_smoothing
        sums = [self.cross_entropy(model.logits(weights, h), targets, counted, smoothing)]
        for k, layer in enumerate(extra_layers(self.config.model)):  # reads the target, predicts the next
            own_inputs = replace(inputs, dropout_key=_folded(inputs.dropout_key, AHEAD + k))
            embedded = self.dropout(model.embed_tokens(weights, targets.reshape(-1)), own_inputs)
            h, measured = model.layer(weights, layer, jnp.concatenate([embedded, h], axis=1), own_inputs, layers)
            metrics.append(measured)
            targets, counted = (_of_next_token(a, fields.get("segment_ids")) for a in (targets, counted))
            sums.append(self.cross_entropy(model.logits(weights, h), targets, counted))
        kinds = stacked_layers(self.config.model).items()
        by_kind = {kind: jax.tree.map(lambda *a: jnp.stack(a), *(metrics[i] for i in layers)) for kind, layers in kinds}
        return jnp.stack(sums), by_kind

    def cross_entropy(self, logits: jax.Array, targets: jax.Array, counted: jax.Array, smoothing: float = 0.0):
        """Sums over the tokens that count: cross-entropy, z-loss, number of tokens; `logits [T, V]`."""
        counted = counted.reshape(-1).astype(jnp.float32)
        normalisers = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        log_probs = logits - normalisers
        chosen = jnp.take_along_axis(log_probs, targets.reshape(-1, 1), axis=-1)[:, 0]
        entropies = -(1 - smoothing) * chosen - smoothing * log_probs.mean(-1)
        z_losses = self.config.model.z_loss * jnp.square(normalisers[:, 0])
        return jnp.stack([counted @ entropies, counted @ z_losses, counted.sum()])

    def inputs(self, index: jax.Array, fields: Arrays, key: jax.Array | None) -> BlockInputs:
        """The inputs of all layers besides the residual stream, for microbatch `index`."""
        (B, S), real = fields["tokens"].shape, None
        places = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        ids = ((index * B + jnp.arange(B))[:, None] * S + places).astype(jnp.uint32)
        segments = fields.get("segment_ids")
        if "is_real" in fields:  # the other tokens are padding
            if not self.config.model.causal:
                segments = jnp.where(fields["is_real"], 0 if segments is None else segments, -1)
            lengths = fields["is_real"].sum(-1, dtype=jnp.int32)
            numbers = (jnp.maximum(a, 1) for a in (lengths, lengths.sum(), (lengths > 0).sum()))
            real = RealTokens(fields["is_real"].reshape(-1), *numbers)
        return BlockInputs(
            fields["positions"],
            TokenPositions(
                places, None if segments is None else ops.documents_of(segments), is_real=fields.get("is_real")
            ),
            ids.reshape(-1),  # each token's number in the batch: its dropout does not depend on the mesh
            dropout_key=key if self.config.model.dropout else None,
            jitter_key=_folded(key, JITTER) if self.config.model.router.jitter else None,
            layer_loss_scale=None if key is None else jnp.float32(1),  # set: the layers give metrics
            real=real,
        )

    def dropout(self, x: jax.Array, inputs: BlockInputs) -> jax.Array:
        """Dropout after the embedding; the layers have theirs."""
        key = _folded(inputs.dropout_key, 0)
        return x if key is None else ops.dropout(x, self.config.model.dropout, key, inputs.token_ids)


def adamw(config: Config, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Clipping, then AdamW, with the settings of `optimizer`; a schedule gets the number of steps before."""
    own = config.optimizer
    used = {"kind": own.kind != "adamw", "groups": own.groups, "layer_decay": own.layer_decay != 1}
    used = {f"optimizer.{name}": is_used for name, is_used in used.items()}
    _refuse(config, used | {"model.mup_base_width": config.model.mup_base_width is not None})
    decays = {"matrix": True, "embedding": own.decay_embeddings, "norm": own.decay_norms, "bias": own.decay_biases}
    decayed = {name: decays[parameter.role] for name, parameter in parameters(Transformer(config.model)).items()}
    update = optax.adamw(learning_rate, own.beta1, own.beta2, own.epsilon, weight_decay=own.weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(own.clip_norm), update) if own.clip_norm else update


def _folded(key: jax.Array | None, number: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)


def _of_next_token(a: jax.Array, documents: jax.Array | None) -> jax.Array:
    """`a [B, S]` of the token after each one; 0 at the end of its document."""
    after = a[:, 1:] if documents is None else jnp.where(documents[:, 1:] == documents[:, :-1], a[:, 1:], 0)
    return jnp.pad(after, ((0, 0), (0, 1)))


def _means(sums: jax.Array) -> jax.Array:
    """`[..., 3]` of `cross_entropy` → the mean cross-entropy and z-loss, `[..., 2]`."""
    count = sums[..., 2:]
    return sums[..., :2] / jnp.where(count > 0, count, 1)


def _combined(name: str, a: jax.Array) -> jax.Array:
    """A metric of all microbatches, `[M, L, ...]`: counts are added, other numbers averaged."""
    if is_maximum(name):
        return a.max(0)
    return a.sum(0) if jnp.issubdtype(a.dtype, jnp.integer) else a.mean(0)


def _refuse(config: Config, used: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting in use that this page does not have."""
    for key in (key for key, is_used in used.items() if is_used):
        problem = f"{format_keys(config, key)} is not part of megajax.reference"
        fail(config, problem, "remove it, or use megajax.TrainProgram", key)
