"""Self-speculative decoding: the layers after the model's draft tokens, which the model verifies in one pass.

Draft k of a step is the prediction of layer k of these, a module, from the inputs that it had in training (DeepSeek-V3,
arXiv 2412.19437, section 2.2). The last module also makes the drafts after its own: for each, it moves on by a token
and takes its own output of the token before in place of an output that is not known yet, as in vLLM and SGLang.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.errors import counted
from megajax.inference.comm import Decode, Prefill, WholeSequences
from megajax.inference.language_model import LanguageModel, block_inputs, positions_from
from megajax.inference.sampling import Sampling, distribution, verify
from megajax.inference.weights import ModelWeights
from megajax.layout.kinds import extra_kind, extra_layers
from megajax.model.sublayer import LayerContext

# Folded into a position's key: a token can be drafted, accepted and replaced.
DRAFT, ACCEPT, REPLACE = 1, 2, 3


class Drafts(NamedTuple):
    """The state between steps: the drafts after the newest token, and the inputs of the modules before it.

    A module predicts from the tokens after its own, so the last positions of its cache depend on drafts. The next step
    computes these positions again, n positions for n modules.
    """

    tokens: jax.Array  # [B, N] int32
    distributions: jax.Array  # [B, N, V] float32, from which they were drawn
    recent: jax.Array  # [B, n] int32, the newest tokens
    outputs: jax.Array  # [B, n - 1, D], the model's outputs of the tokens before the newest


class Verified(NamedTuple):
    """Counts of verified drafts of all sequences."""

    steps: jax.Array  # [] int32, one for each sequence in each step
    accepted: jax.Array  # [N] int32, the steps in which each draft was accepted

    def explain(self) -> str:
        """Tokens per step, and the share of the steps in which each draft was accepted."""
        if not self.steps:
            return "speculation: no drafts were verified."
        shares = [float(count / self.steps) for count in self.accepted]
        each = ", ".join(f"{share:.0%}" for share in shares)
        drafts = "the draft was accepted in" if len(shares) == 1 else f"drafts 1 to {len(shares)} were accepted in"
        steps = counted(int(self.steps), "step")
        return f"speculation: {1 + sum(shares):.2f} tokens per step; {drafts} {each} of {steps}."


class DraftWindow(NamedTuple):
    """Consecutive tokens with the model's outputs; those behind the index `last` are not part of the text."""

    outputs: jax.Array  # [B, W, D]
    tokens: jax.Array  # [B, W] int32
    first: jax.Array  # [B] int32, the position of the first of them
    last: jax.Array  # [B] int32, an index in the window


class Drafter:
    """Drafts tokens and verifies them, for one setting of the sampling; its methods are traced."""

    def __init__(self, model: LanguageModel, sampling: Sampling):
        self.model, self.sampling, self.count = model, sampling, model.speculate
        self.modules = min(self.count, len(extra_layers(model.config)))
        self.written = self.count + self.modules  # positions that a step may write in a module's cache

    def verify(
        self, weights: ModelWeights, drafts: Drafts, position: jax.Array, keys: jax.Array, comm: Decode
    ) -> tuple[jax.Array, jax.Array, DraftWindow]:
        """(number of accepted drafts `[B]`, the token after them `[B]`, the window that ends with the last accepted).

        `position [B]` is that of the newest token, which is verified with the drafts after it.
        """
        before = self.modules - 1
        tokens = jnp.concatenate([drafts.recent, drafts.tokens], axis=1)
        h = self.model.new_tokens(weights, tokens[:, before:], position, comm)
        p = distribution(self.model.model.logits(weights.outer, h), self.sampling)
        positions = positions_from(position + 1, self.count)
        uniform = jax.vmap(jax.vmap(lambda key, at: jax.random.uniform(_key(key, at, ACCEPT)), (None, 0)))
        accepted, residual = verify(p, drafts.distributions, drafts.tokens, uniform(keys, positions))
        token = _draw(residual, keys, position + 1 + accepted, REPLACE)
        outputs = jnp.concatenate([drafts.outputs, h], axis=1)
        return accepted, token, DraftWindow(outputs, tokens, position - before, accepted + before)

    def draft(
        self, weights: ModelWeights, window: DraftWindow, newest: jax.Array, keys: jax.Array, comm: Prefill | Decode
    ) -> tuple[Drafts, tuple[Any, ...]]:
        """(the drafts after the token `newest [B]`, the modules' caches); `newest` follows the window's last token."""
        first, last, count = window.first, window.last, self.modules
        positions = positions_from(first, window.tokens.shape[1])
        tokens, x, found = _with_next(window.tokens, last, newest), window.outputs, []
        recent, outputs = _until(tokens, last, count), _until(x, last, count - 1)
        comm.replaced_first = count - 1  # the next step's window begins so much before its newest token
        for k in range(count):
            x = self._module(weights, k, x, tokens, positions, comm)
            found.append(self._choose(weights, _until(x, last, 1), keys, first + last + 2 + k))
            tokens = _with_next(tokens, last, found[-1][0])
        caches, h = comm.caches[-count:], _until(x, last, 1)
        for k in range(count, self.count):
            again = Decode(self.model.mesh, self.model.kernels, self.model.max_length, caches[-1:])
            at = positions_from(first + last + 1 + k - count, 1)
            h = self._module(weights, count - 1, h, found[-1][0][:, None], at, again)
            caches = [*caches[:-1], *again.caches]
            found.append(self._choose(weights, h, keys, first + last + 2 + k))
        drafted, distributions = (jnp.stack(arrays, axis=1) for arrays in zip(*found, strict=True))
        return Drafts(drafted, distributions, recent, outputs), tuple(caches)

    def _module(self, weights: ModelWeights, k: int, x, tokens, positions, comm: WholeSequences) -> jax.Array:
        """Module k: outputs `[B, S, D]` of the one before it, and the tokens `[B, S]` after theirs → `[B, S, D]`."""
        config, model = self.model.config, self.model.model
        layer, kind = extra_layers(config)[k], extra_kind(config)
        embedded = model.embed_tokens(weights.outer, tokens.reshape(-1))
        pair = jnp.concatenate([embedded, x.reshape(embedded.shape)], axis=1)
        pair, module = comm.place(pair, comm.token_spec(len(x))), (weights.layers[layer], weights.state[layer])
        inputs = block_inputs(positions, comm.token_positions(positions))
        ctx = LayerContext(comm, inputs, layer, kind, state=module[1])
        y, _ = model.blocks[kind.block].apply(module[0], pair, ctx)
        return y.reshape(x.shape)

    def _choose(self, weights: ModelWeights, h, keys, positions) -> tuple[jax.Array, jax.Array]:
        """A module's outputs `[B, 1, D]` → (a draft for each position `[B]`, the distribution that it is from)."""
        q = distribution(self.model.model.logits(weights.outer, h[:, 0]), self.sampling)
        return _draw(q, keys, positions, DRAFT), q


def _key(key: jax.Array, position: jax.Array, use: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, position), use)


def _draw(probabilities_bv: jax.Array, keys: jax.Array, positions: jax.Array, use: int) -> jax.Array:
    """A token of each distribution, `[B]` int32."""

    def draw(probabilities, key, position):
        return jax.random.categorical(_key(key, position, use), jnp.log(probabilities))

    return jax.vmap(draw)(probabilities_bv, keys, positions).astype(jnp.int32)


def _with_next(tokens_bw: jax.Array, last: jax.Array, token: jax.Array) -> jax.Array:
    """The tokens one position later, with `token` at the index `last`."""
    here = jnp.arange(tokens_bw.shape[1]) == last[:, None]
    return jnp.where(here, token[:, None], jnp.roll(tokens_bw, -1, axis=1))


def _until(x: jax.Array, last: jax.Array, count: int) -> jax.Array:
    """The `count` entries of the rows of `x [B, W, ...]` that end at the index `last`; before a row's first, that."""
    index = jnp.maximum(positions_from(last - count + 1, count), 0)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
