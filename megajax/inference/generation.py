"""Continuing prompts: one program reads them, one produces tokens in a loop on the devices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from megajax import cluster
from megajax.data.images import PlacedPicture
from megajax.data.spans import START
from megajax.data.tokenizers import decode_after
from megajax.errors import InputError, counted, shown
from megajax.inference.comm import Decode, Prefill
from megajax.inference.language_model import ROPE, LanguageModel, Source, positions_from
from megajax.inference.prompts import PicturePrompt
from megajax.inference.sampling import DEFAULT, Sampling, choose
from megajax.inference.speculation import Drafter, Drafts, DraftWindow, Verified
from megajax.inference.weights import ModelWeights
from megajax.layout.kinds import block_layers
from megajax.layout.sublayers import DECODING, DRAFTS, lacking

LENGTH_MULTIPLE = 64  # of lengths, by default
NONE = -1  # instead of a token after the end of a sequence


class PaddedPrompts(NamedTuple):
    """The prompts of a batch: arrays of the host or of the devices."""

    tokens: Any  # [B, P] int32, padded at their ends
    lengths: Any  # [B] int32
    seed: Any  # uint32
    sources: Any = None  # tokens and lengths of what an encoder reads
    images: Any = None  # the fields of a batch with pictures


class GenerationState(NamedTuple):
    """The state between tokens."""

    caches: tuple[Any, ...]  # what the layers keep
    tokens: jax.Array  # [B, N] int32, the new tokens; NONE after the end
    count: jax.Array  # [B] int32, how many of them there are
    position: jax.Array  # [B] int32, of the newest token
    done: jax.Array  # [B] bool
    keys: jax.Array  # [B] random keys
    source_lengths: jax.Array | None = None  # [B], of prompts that an encoder read
    rope_shift: jax.Array | None = None  # [B], with pictures: the rotary position of a new token minus its position
    drafts: Drafts | None = None  # with speculation
    verified: Verified | None = None

    def active(self, ends: jax.Array | np.ndarray) -> jax.Array:
        """The sequences that go on before they have `ends [B]` new tokens, `[B]`."""
        return ~self.done & (self.count < ends)


class Generator:
    """The two compiled programs of a model, for one setting of the sampling.

    Of the newest call of `tokens`: `verified` counts its drafts, with speculation; `cut` says of each sequence whether
    it ended at the model's context.
    """

    def __init__(self, model: LanguageModel, sampling: Sampling = DEFAULT, multiple: int = LENGTH_MULTIPLE):
        """Lengths are rounded up to a `multiple`, so that prompts of similar lengths share compiled programs."""
        if not isinstance(sampling, Sampling):
            raise InputError(f"sampling={shown(sampling)} is no Sampling: give megajax.inference.sampling.Sampling().")
        sampling.check()
        check_decoding(model)
        self.model, self.sampling, self.multiple = model, sampling, multiple
        self.drafter, self.verified = Drafter(model, sampling) if model.speculate else None, None
        self.cut = np.zeros(0, bool)
        self.stop = np.array([*model.stop_tokens, NONE], np.int32)
        self._prefill = jax.jit(self._prefill_program, static_argnames=("size", "room"))
        self._decode = jax.jit(self._decode_program, donate_argnames="progress")

    def tokens(
        self,
        prompts: Sequence[Sequence[int] | PicturePrompt],
        max_tokens: int,
        seed: int = 0,
        chunk: int | None = None,
        growing: bool = False,
    ) -> Iterator[list[list[int]]]:
        """The new tokens of each prompt so far, every `chunk` tokens (None: once), until all are complete.

        A sequence ends before a stop token, after `max_tokens`, or at the model's context. One seed gives a prompt the
        same tokens on every mesh and beside any prompts after it. The caller may stop early. Raises InputError for a
        prompt that is empty, has unknown tokens, or leaves no room in the context. With speculation, pieces may be up
        to as many tokens longer as are drafted in a step. Of `growing` prompts, those of a conversation, few lengths
        are distinguished, so that most calls need no new programs.
        """
        sources, images = None, None
        pictures = [prompt.pictures if isinstance(prompt, PicturePrompt) else () for prompt in prompts]
        prompts = [prompt.tokens if isinstance(prompt, PicturePrompt) else prompt for prompt in prompts]
        if self.model.config.of_encoder is not None:  # it reads the prompts, and the new tokens follow START
            sources, prompts = self._padded(prompts, growing), [[START]] * len(prompts)
        longest = max(map(len, prompts))
        self._check(prompts, longest, max_tokens)
        limits = np.array([min(max_tokens, self.model.max_length - len(prompt)) for prompt in prompts], np.int32)
        most = int(limits.max())
        padded = self._rounded(longest, growing)
        written = self.drafter.written if self.drafter else 1
        size = self._rounded(min(padded + most, self.model.max_length) + written - 1, growing)
        tokens, lengths = _in_rows(prompts, min(padded, self.model.max_length))
        room = self._rounded(min(max_tokens, self.model.max_length), growing)
        if any(pictures):
            images = self._image_fields(pictures, lengths, tokens.shape[1])
        padded_prompts = PaddedPrompts(tokens, lengths, np.uint32(seed), sources, images)
        progress = self._prefill(self.model.weights, padded_prompts, size=size, room=room)
        while True:
            done, count, self.verified = _on_host((progress.done, progress.count, progress.verified))
            active = np.asarray(progress._replace(done=done, count=count).active(limits))
            self.cut = ~done & ~active & (limits < max_tokens)
            if chunk is not None or not active.any():
                rows = zip(_on_host(progress.tokens), limits, strict=True)
                yield [[int(token) for token in row[:limit] if token != NONE] for row, limit in rows]
            if not active.any():
                return
            ends = np.minimum(limits, count[active].min() + (chunk or most))
            progress = self._decode(self.model.weights, progress, ends)

    def explain_cut(self, max_tokens: int) -> str:
        """A sentence on the sequences of the newest call that ended at the context; empty if none did."""
        if not self.cut.any():
            return ""
        ended = f"{counted(int(self.cut.sum()), 'text')} ended at the model's context of {self.model.max_length} tokens"
        return f"{ended}, before --tokens={max_tokens}: give a shorter prompt, or a model with a longer context."

    def _padded(self, prompts: Sequence[Sequence[int]], growing: bool) -> tuple[np.ndarray, np.ndarray]:
        """Prompts for an encoder `[B, T]`, padded at their ends, and their lengths. Raises InputError as `tokens`."""
        for prompt in prompts:
            self.model.check_tokens(np.array([prompt], np.int32)[:, : self.model.max_length])
        return _in_rows(prompts, self._rounded(max(map(len, prompts)), growing))

    def _image_fields(
        self, pictures: Sequence[Sequence[PlacedPicture]], lengths: np.ndarray, padded: int
    ) -> dict[str, np.ndarray]:
        """The fields of prompts' pictures, with as many patches as the most of a prompt, rounded up."""
        images = self.model.images
        most = max(sum(images.entries(placed.sized) for placed in each) for each in pictures)
        multiple = images.vision.merge**2 * self.multiple
        rows = [(each, np.array([length])) for each, length in zip(pictures, lengths, strict=True)]
        return images.fields(rows, padded, False, -(-most // multiple) * multiple)

    def _rounded(self, length: int, growing: bool) -> int:
        """A length rounded up, for shared programs: to a multiple, or if `growing` to a multiple by a power of two."""
        pieces = -(-length // self.multiple)
        return self.multiple * (1 << (pieces - 1).bit_length() if growing else pieces)

    def _check(self, prompts: Sequence[Sequence[int]], longest: int, max_tokens: int) -> None:
        assert max_tokens >= 1, max_tokens
        for prompt in prompts:
            self.model.check_tokens(np.array([prompt], np.int32))
        if longest >= self.model.max_length:
            raise InputError(
                f"a prompt has {longest} tokens, which leaves no room in the model's context of "
                f"{self.model.max_length} tokens: shorten it."
            )

    def _prefill_program(
        self, weights: ModelWeights, prompts: PaddedPrompts, *, size: int, room: int
    ) -> GenerationState:
        """The state with the first new token of each prompt; caches of `size` slots."""
        tokens, lengths, seed, sources, images = prompts
        B, written = len(tokens), self.drafter.written if self.drafter else 1
        comm = Prefill(self.model.mesh, self.model.kernels, self.model.max_length, lengths, size, written)
        prefix = lengths if self.model.config.prefix_lm else None
        source = Source(images=images, prefix=prefix) if sources is None else self.model.encoded(weights, *sources)
        h = self.model.whole_sequences(weights, tokens, comm, source)
        newest = jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0]
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(B))
        empty, none = jnp.full((B, room), NONE, jnp.int32), jnp.zeros(B, jnp.int32)
        start = GenerationState(tuple(comm.caches), empty, none, lengths - 1, jnp.zeros(B, bool), keys)
        start = start._replace(source_lengths=source.lengths, rope_shift=_rope_shift(images, lengths))
        progress, token = self._with_token(start, self.model.model.logits(weights.outer, newest), ~start.done)
        if self.drafter is None:
            return progress
        window = DraftWindow(h, tokens, none, lengths - 1)
        drafts, caches = self.drafter.draft(weights, window, token, keys, comm)
        verified = Verified(jnp.int32(0), jnp.zeros(self.drafter.count, jnp.int32))
        return progress._replace(caches=(*start.caches, *caches), drafts=drafts, verified=verified)

    def _decode_program(self, weights: ModelWeights, progress: GenerationState, ends: jax.Array) -> GenerationState:
        """The state after steps until each sequence has its `ends [B]` new tokens, or more with drafts, or is done."""
        step = self._step if self.drafter is None else partial(self._speculative_step, self.drafter)
        return lax.while_loop(lambda p: p.active(ends).any(), partial(step, ends, weights), progress)

    def _step(self, ends: jax.Array, weights: ModelWeights, progress: GenerationState) -> GenerationState:
        """One token more of the sequences that go on."""
        comm = Decode(self.model.mesh, self.model.kernels, self.model.max_length, progress.caches)
        newest = jnp.take_along_axis(progress.tokens, progress.count[:, None] - 1, axis=1)
        source = Source(progress.source_lengths, rope_shift=progress.rope_shift)
        h = self.model.new_tokens(weights, jnp.maximum(newest, 0), progress.position, comm, source)
        logits = self.model.model.logits(weights.outer, h[:, 0])
        active = progress.active(ends)
        return self._with_token(progress._replace(caches=tuple(comm.caches)), logits, active)[0]

    def _with_token(
        self, progress: GenerationState, logits: jax.Array, active: jax.Array
    ) -> tuple[GenerationState, jax.Array]:
        """(the state with one token more of the `active` sequences, the tokens), chosen by `logits [B, V]`."""
        position = progress.position + 1
        keys = jax.vmap(jax.random.fold_in)(progress.keys, position)
        token = choose(logits, self.sampling, keys)
        return self._with_tokens(progress, token[:, None], jnp.zeros_like(position), active), token

    def _with_tokens(
        self, progress: GenerationState, tokens: jax.Array, last: jax.Array, active: jax.Array
    ) -> GenerationState:
        """The state of the `active` sequences with the new `tokens [B, S]` up to the index `last [B]`."""
        new = jnp.arange(tokens.shape[1]) <= last[:, None]
        stopped = new & (tokens[..., None] == self.stop).any(axis=2)
        ended = progress.done[:, None] | (jnp.cumsum(stopped, axis=1) > 0)
        written = jnp.where(active[:, None] & new & ~ended, tokens, NONE)
        rows, added = jnp.arange(len(tokens))[:, None], jnp.where(active, last + 1, 0)
        return progress._replace(
            tokens=progress.tokens.at[rows, positions_from(progress.count, tokens.shape[1])].set(written),
            count=progress.count + added,
            position=progress.position + added,
            done=progress.done | active & stopped.any(axis=1),
        )

    def _speculative_step(
        self, drafter: Drafter, ends, weights: ModelWeights, progress: GenerationState
    ) -> GenerationState:
        """The accepted drafts and the token after them, then the next drafts; other sequences than the active stay."""
        active, drafts, verified = progress.active(ends), progress.drafts, progress.verified
        assert drafts is not None and verified is not None
        comm = Decode(self.model.mesh, self.model.kernels, self.model.max_length, progress.caches)
        accepted, token, window = drafter.verify(weights, drafts, progress.position, progress.keys, comm)
        of_model = tuple(comm.caches)
        following, of_modules = drafter.draft(weights, window, token, progress.keys, comm)
        offered = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
        tokens = jnp.where(jnp.arange(drafter.count + 1) == accepted[:, None], token[:, None], offered)
        counted = (jnp.arange(drafter.count) < accepted[:, None]) & active[:, None]
        return self._with_tokens(progress, tokens, accepted, active)._replace(
            caches=(*of_model, *of_modules),
            drafts=jax.tree.map(partial(_where_rows, active), following, drafts),
            verified=Verified(verified.steps + active.sum(), verified.accepted + counted.sum(axis=0)),
        )


def _on_host(arrays: Any) -> Any:
    """Arrays whose rows may be on the devices of several processes, which all call this."""
    return (
        multihost_utils.process_allgather(arrays, tiled=True) if cluster.current().size > 1 else jax.device_get(arrays)
    )


def _rope_shift(images: Mapping[str, jax.Array] | None, lengths: jax.Array) -> jax.Array | None:
    """The rotary position of the token after each prompt, `lengths [B]`, minus its position: after the largest one."""
    if images is None or ROPE not in images:
        return None
    rope = images[ROPE]
    is_real = jnp.arange(rope.shape[1]) < lengths[:, None]
    return jnp.where(is_real, rope.max(axis=2), 0).max(axis=1) + 1 - lengths


def _in_rows(prompts: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(prompts `[B, length]`, padded at their ends, their lengths `[B]`)."""
    tokens = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts], np.int32)


def _where_rows(active: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new [B, ...]` in the rows that are active, else `old`."""
    return jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def check_decoding(model: LanguageModel) -> None:
    """Raises InputError if a sublayer cannot do with what was kept of earlier tokens."""
    model.check_is_causal("generation")
    needs = {DECODING: "generation keeps earlier tokens in a cache"}
    if model.speculate:
        needs[DRAFTS] = "speculation replaces drafts that are not accepted"
    for ability, reason in needs.items():
        for kind in block_layers(model.config):
            if lack := lacking(kind, ability):
                cure = f": {lack.cure}" if lack.cure else ""
                raise InputError(f"{reason}, which needs {ability}, {lack.what}{cure}.")


@lru_cache(maxsize=8)
def generator(model: LanguageModel, sampling: Sampling) -> Generator:
    """The model's generator for these settings, the same for every call, so that its programs are compiled once."""
    return Generator(model, sampling)


def continue_texts(
    model: LanguageModel,
    prompts: Sequence[str | Sequence[int] | PicturePrompt],
    max_tokens: int = 100,
    sampling: Sampling = DEFAULT,
    *,
    stop: Sequence[str] = (),
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
    growing: bool = False,
) -> list[str]:
    """The continuation of each prompt, a text or tokens with or without pictures, cut before the first of `stop`.

    A special token, which is not in the text, ends it too if a text of `stop` has its name.
    `on_text` gets the text of a single prompt piece by piece. For `growing` and errors see `Generator.tokens`.
    """
    tokenizer = model.tokenizer
    assert tokenizer is not None, "the model has no tokenizer"
    encoded = [model.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    chunk = 8 if on_text else LENGTH_MULTIPLE if stop else None
    ends = {tokenizer.token_id(name) for name in tokenizer.special_tokens if any(name in text for text in stop)}
    printed, texts, used = 0, [""] * len(prompts), generator(model, sampling)
    for rows in used.tokens(encoded, max_tokens, seed, chunk, growing):
        ended = [next((i for i, token in enumerate(row) if token in ends), None) for row in rows]
        rows = [row[:end] for row, end in zip(rows, ended, strict=True)]
        before = [list(each.tokens if isinstance(each, PicturePrompt) else each) for each in encoded]
        before = before if model.config.of_encoder is None else [[]] * len(rows)
        texts = [decode_after(tokenizer, *each) for each in zip(before, rows, strict=True)]
        cut = [min((text.find(end) for end in stop if end in text), default=-1) for text in texts]
        texts = [text if end < 0 else text[:end] for text, end in zip(texts, cut, strict=True)]
        if on_text:
            # The last characters may change: half of a UTF-8 character, or the beginning of a stop text.
            held = max((len(end) - 1 for end in stop), default=0) if cut[0] < 0 else 0
            ready = max(printed, len(texts[0].rstrip("\ufffd")) - held)
            on_text(texts[0][printed:ready])
            printed = ready
        going_on = np.array([end < 0 and token is None for end, token in zip(cut, ended, strict=True)])
        used.cut &= going_on
        if not going_on.any():
            break
    if on_text:
        on_text(texts[0][printed:])
    return texts
