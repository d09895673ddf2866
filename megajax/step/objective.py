"""The objective of training: a terminal node. `objective.kind` names it; `register_objective` adds one.

A class of your own derives from `Elementwise`, `Logits`, `Segment`, `Hidden` or `HiddenSegment`. It declares its
settings (`Settings`, the keys of `objective.settings`), the batch fields that it reads besides the usual ones
(`FIELDS`), and the numbers that it gives beside its losses (`METRICS`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.errors import ConfigError, array_form, check_methods, counted
from megajax.ops.numerics import added
from megajax.options.registered import MASKED_TOKENS, NEXT_TOKEN, OBJECTIVES
from megajax.parallel.mesh_comm import MeshComm
from megajax.schema.fields import BATCH_AXES, Section
from megajax.schema.model import ModelConfig
from megajax.sharding import OBJECTIVE
from megajax.step.head import NORMS, SUMS, ChunkLoss, LossHead
from megajax.step.nodes import (
    HIDDEN,
    Arrays,
    Field,
    Microbatch,
    Results,
    StepArrays,
    Streams,
    Table,
    joined_fields,
    plus,
)
from megajax.step.teacher import STREAM, TeacherHead
from megajax.step_plan import StepPlan

SHARES = (*BATCH_AXES, "context", "pipeline")  # the axes that divide the tokens at the head


class Objective:
    """What objectives share: one loss, divided by one count. `targets` and `loss_mask` are read by all."""

    NAME = "loss"
    EVALUATED = ("loss",)
    reads: tuple[str, ...] = ()
    reads_positions = False
    # Fields [rows, sequence_length, *extra] of its own by name: the dtype, or (dtype, *extra)
    FIELDS: ClassVar[Mapping[str, Any]] = {}
    # Numbers that steps log: `loss` returns (losses, {name: numbers}), of which the mean is taken as of the losses
    METRICS: ClassVar[tuple[str, ...]] = ()

    class Settings(Section):
        """The keys of `objective.settings`."""

    def __init__(self, plan: StepPlan, comm: MeshComm):
        self.head, self.comm, self.sizes = LossHead(plan, comm), comm, plan.sizes
        self.settings = plan.objective_settings(type(self))

    def fields(self) -> dict[str, Field]:
        declared = {name: own if isinstance(own, tuple) else (own,) for name, own in self.FIELDS.items()}
        own = {name: Field(dtype, "objective.kind", tuple(extra)) for name, (dtype, *extra) in declared.items()}
        return joined_fields({"targets": Field(jnp.int32), "loss_mask": Field(jnp.float32)}, own)

    def derived_fields(self, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {}

    def counts(self, batch: Arrays) -> dict[str, jax.Array]:
        return {"loss": batch["loss_mask"].astype(jnp.float32).sum()}

    def loss_factor(self, loss_scale: jax.Array, counts: Arrays) -> jax.Array:
        return loss_scale / counts["loss"]

    def metrics(self, losses: Arrays) -> dict[str, jax.Array]:
        return {name: losses[name] for name in ("loss", *self.METRICS)}

    def measured(self, returned: Any) -> tuple[Any, Arrays]:
        """What `loss` returned → (losses, numbers by name). Raises ConfigError if the names are not METRICS."""
        losses, numbers = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if not isinstance(numbers, Mapping) or {*numbers} != {*self.METRICS}:
            found = ", ".join(map(str, numbers)) if isinstance(numbers, Mapping) else array_form(numbers)
            problem = f"{type(self).__name__}.loss returns the metrics {found or 'none'}"
            declared = ", ".join(self.METRICS) or "empty"
            cure = "return (losses, {name: numbers}) with the names of METRICS, or only the losses if that is empty"
            raise ConfigError(f"{problem}, but {type(self).__name__}.METRICS is {declared}: {cure}.")
        return losses, {name: jnp.asarray(number, jnp.float32) for name, number in numbers.items()}

    def one_pass(
        self, loss: ChunkLoss, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        """`TerminalNode.turn` by one pass over the head."""
        fields = self.of_tokens(batch, streams)
        of_head = streams[HIDDEN], fields.pop("targets"), fields["loss_mask"]
        sums = (*SUMS, *self.METRICS)
        losses, dx, table = self.head.losses_and_gradients(arrays.table, *of_head, table, loss, fields, sums)
        return plus(gradients, {HIDDEN: dx}), table, Results(losses=losses)

    def of_tokens(self, batch: Microbatch, streams: Streams) -> dict[str, jax.Array]:
        """The fields and the streams that it reads, `[T, ...]`."""
        own = {name: batch.fields[name].reshape(-1, *field.extra) for name, field in self.fields().items()}
        return own | {name: self.comm.all_gather_tokens(streams[name]) for name in self.reads}


class NextToken(Objective):
    """The objective of next-token prediction; evaluation has no label smoothing."""

    def __init__(self, plan: StepPlan, comm: MeshComm):
        super().__init__(plan, comm)
        self.z_loss, self.smoothing = plan.model.z_loss, plan.objective.label_smoothing

    def turn(
        self, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        loss = self.head.cross_entropy(arrays.loss_factors[self.NAME], self.smoothing)
        return self.one_pass(loss, arrays, streams, gradients, batch, table)

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        fields = self.of_tokens(batch, streams)
        return {"loss": self.head.losses(arrays.table, streams[HIDDEN], fields["targets"], fields["loss_mask"])}

    def metrics(self, losses: Arrays) -> dict[str, jax.Array]:
        return {"loss": losses["loss"], **({"z_loss": losses["z_loss"]} if self.z_loss else {})}


class MaskedTokens(NextToken):
    """The same for masked tokens: `targets` are the tokens themselves, `loss_mask` those hidden in `tokens`."""


class Elementwise(Objective):
    """The sum of a function of each token's log-probability: one pass over the head, as the next-token loss.

    A token's loss is multiplied by `loss_mask`. By default the sum is divided by the sum of `loss_mask`.
    """

    def loss(self, log_probs: jax.Array, fields: Arrays) -> jax.Array:
        """Losses of tokens from the log-probabilities of their targets and from the fields, all `[tokens]`, in FP32.

        Differentiable in `log_probs`; a token's loss depends on no other token.
        """
        raise NotImplementedError

    def count(self, fields: Arrays) -> jax.Array:
        """What each token adds to the divisor."""
        return fields["loss_mask"]

    def counts(self, batch: Arrays) -> dict[str, jax.Array]:
        fields = {name: batch[name].reshape(-1, *field.extra) for name, field in self.fields().items()}
        counts, shape = self.count(fields), fields["loss_mask"].shape
        if getattr(counts, "shape", None) != shape:
            problem = f"{type(self).__name__}.count returns {array_form(counts)} for {counted(shape[0], 'token')}"
            raise ConfigError(f"{problem}: return what each token adds to the divisor, [tokens].")
        return {"loss": counts.astype(jnp.float32).sum()}

    def turn(
        self, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        loss = self.chunk_loss(arrays.loss_factors[self.NAME], arrays.table)
        return self.one_pass(loss, arrays, streams, gradients, batch, table)

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        fields = self.of_tokens(batch, streams)
        of_head = streams[HIDDEN], fields["targets"], fields["loss_mask"]
        return {"loss": self.head.losses_of(arrays.table, *of_head, self.chunk_loss(1.0, arrays.table), fields)}

    def chunk_loss(self, scale: jax.Array | float, table: Arrays) -> ChunkLoss:
        """`loss` as the head takes it, with the gradient of `scale` times its sum."""
        return self.head.of_log_probs(scale, self._with_slopes)

    def _of_tokens(self, returned: Any, mask: jax.Array) -> tuple[jax.Array, Arrays]:
        """(losses, METRICS) that `loss` returned: each a number for each token of `mask`, else a ConfigError."""
        losses, metrics = self.measured(returned)
        if getattr(losses, "shape", None) != mask.shape or not jnp.issubdtype(losses.dtype, jnp.floating):
            problem = f"{type(self).__name__}.loss returns {array_form(losses)} for {counted(mask.size, 'token')}"
            raise ConfigError(f"{problem}: return a loss for each token, [tokens]; sums and means are taken of these.")
        check_shapes(self, metrics, mask.shape)
        return losses, metrics

    def _with_slopes(self, values: jax.Array, mask: jax.Array, fields: Arrays) -> tuple[Arrays, jax.Array]:
        """(sums of losses and metrics, derivatives of the losses by the values `[tokens, ...]`), times the mask."""

        def run(values: jax.Array) -> tuple[jax.Array, Arrays]:
            return self._of_tokens(self.loss(values, fields), mask)

        losses, pull, metrics = jax.vjp(run, values, has_aux=True)
        (slopes,) = pull(jnp.ones_like(losses))
        lead = mask.reshape(-1, *[1] * (slopes.ndim - 1))
        return masked_sums(losses, metrics, mask), jnp.where(lead > 0, lead * slopes, 0)


def masked_sums(losses: jax.Array, metrics: Arrays, mask: jax.Array) -> dict[str, jax.Array]:
    """Sums of tokens' losses and metrics times the mask. In padding, whose fields are zero, they may not be finite."""
    return {name: jnp.where(mask > 0, mask * a, 0).sum() for name, a in {"loss": losses, **metrics}.items()}


def check_shapes(objective: Objective, metrics: Arrays, shape: tuple[int, ...]) -> None:
    """Raise ConfigError if a metric has another shape than the losses."""
    for name, numbers in metrics.items():
        if numbers.shape != shape:
            problem = f"{type(objective).__name__}.loss returns {array_form(numbers)} as the metric {name}"
            raise ConfigError(f"{problem}, and losses {[*shape]}: return a number for each loss.")


class Logits(Elementwise):
    """The sum of a function of each token's logits, such as the distance from a teacher's: one pass over the head.

    It sees a chunk of tokens at a time, gathered over `tensor`: `[T, V]` is never in memory. Mask and divisor are those
    of `Elementwise`.
    """

    TEACHER: ClassVar[bool] = False  # whether `fields` have `teacher_logits` [tokens, V], those of the config's teacher

    def __init__(self, plan: StepPlan, comm: MeshComm):
        super().__init__(plan, comm)
        if self.TEACHER:
            assert plan.teacher is not None
            self.reads, self.teacher = (STREAM,), TeacherHead(plan.teacher, comm)

    def loss(self, logits: jax.Array, fields: Arrays) -> jax.Array:
        """Losses `[tokens]` from the FP32 logits `[tokens, V]` and the fields `[tokens, ...]`; differentiable."""
        raise NotImplementedError

    def chunk_loss(self, scale: jax.Array | float, table: Arrays) -> ChunkLoss:
        def with_teacher(logits: jax.Array, mask: jax.Array, fields: Arrays) -> tuple[Arrays, jax.Array]:
            own = {name: field for name, field in fields.items() if name not in self.reads}
            teachers = {f"{name}_logits": self.teacher.logits(table, fields[name]) for name in self.reads}
            return self._with_slopes(logits, mask, own | teachers)

        return self.head.of_logits(scale, with_teacher)


class OwnHead(Objective):
    """Parameters of an objective, such as those of a value or class head, that take the place of the model's head."""

    REPLACES_HEAD: ClassVar[bool] = True

    @classmethod
    def parameters(cls, model: ModelConfig, settings: Any) -> Mapping[str, nnx.Param]:
        """Its parameters (`declare`), called `objective.NAME`; the axis "outputs" is whole on each device, in FP32."""
        return {}

    @jax.named_scope("head")
    def of_hidden(self, function: Callable, weights: Arrays, x: jax.Array, fields: Arrays) -> Any:
        """`function` of the parameters, the hidden states of this device's `x [T / tensor, D]`, and their fields."""
        own = {name.removeprefix(OBJECTIVE): w for name, w in weights.items() if name.startswith(OBJECTIVE)}
        return function(own, self.head.norm(weights, x), fields)

    def of_trained(
        self, function: Callable, arrays: StepArrays, streams: Streams, fields: Arrays, table: Table
    ) -> tuple[jax.Array, Callable, Arrays]:
        """(`of_hidden`, its pullback to the weights that `table` has and to the residual stream, metrics).

        `function` gives (a value, metrics).
        """
        own = self.weights(arrays.table)
        trained = {name: w for name, w in own.items() if name in table}

        def run(w: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
            return self.of_hidden(function, {**own, **w}, x, fields)

        return jax.vjp(run, trained, streams[HIDDEN], has_aux=True)

    def weights(self, table: Arrays) -> dict[str, jax.Array]:
        return {name: w for name, w in table.items() if name in NORMS or name.startswith(OBJECTIVE)}

    def local(self, fields: Arrays) -> dict[str, jax.Array]:
        return {name: self.comm.local_tokens(field) for name, field in fields.items()}


def with_gradients(pulled: tuple[Arrays, jax.Array], gradients: Streams, table: Table) -> tuple[Streams, Table]:
    """What the pullback of `OwnHead.of_trained` gives, added to the gradients of the streams and to the table's."""
    of_weights, dx = pulled
    summed = {name: added(table[name], gradient) for name, gradient in of_weights.items()}
    return plus(gradients, {HIDDEN: dx}), table | summed


class Hidden(OwnHead, Elementwise):
    """The sum of a function of each token's hidden state, the model's output after its final norm: no logits.

    Its own parameters take the place of the model's head. Each device computes its own tokens at once. Mask and divisor
    are those of `Elementwise`.
    """

    def loss(self, w: Arrays, hidden: jax.Array, fields: Arrays) -> jax.Array:
        """Losses `[tokens]` from the parameters by name, the hidden states `[tokens, D]` and the fields.

        Differentiable in `w` and `hidden`; a token's loss depends on no other token, which may be on another device.
        Loss and derivatives must be finite in padding, whose fields are zero.
        """
        raise NotImplementedError

    def turn(
        self, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        fields = self.local(self.of_tokens(batch, streams))
        loss, pull, metrics = self.of_trained(self._sum, arrays, streams, fields, table)
        pulled = pull(arrays.loss_factors[self.NAME])
        return *with_gradients(pulled, gradients, table), Results(losses={"loss": loss, **metrics})

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        fields = self.local(self.of_tokens(batch, streams))
        return {"loss": self.of_hidden(self._sum, self.weights(arrays.table), streams[HIDDEN], fields)[0]}

    def _sum(self, w: Arrays, hidden: jax.Array, fields: Arrays) -> tuple[jax.Array, Arrays]:
        """The summed loss and metrics of this device's tokens."""
        mask = fields["loss_mask"]
        sums = masked_sums(*self._of_tokens(self.loss(w, hidden, fields), mask), mask)
        return sums.pop("loss"), sums


class Segment(Objective):
    """A function of the summed log-probabilities of segments, such as the two answers of a preference.

    The batch field `segments` numbers the tokens' segments within a microbatch, below the number of its sequences; -1:
    no segment. Log-probabilities and fields are multiplied by `loss_mask` and summed over each segment, on all devices.
    A first pass over the head gives the log-probabilities, a second one the gradients.
    """

    def __init__(self, plan: StepPlan, comm: MeshComm):
        super().__init__(plan, comm)
        self.number = plan.batch_shape[1]

    def fields(self) -> dict[str, Field]:
        return joined_fields(
            {"segments": Field(jnp.int32, "objective.kind", limit=self.number, least=-1)}, super().fields()
        )

    def loss(self, log_probs: jax.Array, fields: Arrays) -> jax.Array:
        """Losses, in any shape, from the sums over the segments of a microbatch: all `[segments]`, in FP32."""
        raise NotImplementedError

    def count(self, fields: Arrays) -> jax.Array:
        """What each loss adds to the divisor, in their shape, from the sums over the segments; 0: left out."""
        return fields["loss_mask"] > 0

    def counts(self, batch: Arrays) -> dict[str, jax.Array]:
        own = {name: batch[name].reshape(len(batch[name]), -1, *field.extra) for name, field in self.fields().items()}
        counts = jax.vmap(lambda fields: jnp.asarray(self.count(self._sums(fields)), jnp.float32).sum())(
            own | {"share": jnp.full(own["segments"].shape, 1 / self.sizes["pipeline"])}
        )
        copies = self.sizes["tensor"] * self.sizes["pipeline"]
        return {"loss": counts.sum() * copies / math.prod(self.sizes.values())}

    def turn(
        self, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        x, fields = streams[HIDDEN], self.of_tokens(batch, streams)
        log_probs = self.head.log_probs(arrays.table, x, fields["targets"])
        losses, slopes = self._with_slopes(log_probs, fields)
        loss = self.head.cross_entropy(arrays.loss_factors[self.NAME])
        _, dx, table = self.head.losses_and_gradients(arrays.table, x, fields["targets"], -slopes, table, loss)
        return plus(gradients, {HIDDEN: dx}), table, Results(losses=losses)

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        fields = self.of_tokens(batch, streams)
        log_probs = self.head.log_probs(arrays.table, streams[HIDDEN], fields["targets"])
        return {"loss": self._share(self._losses(log_probs, fields)[0])}

    def _with_slopes(self, values: jax.Array, fields: Arrays) -> tuple[dict[str, jax.Array], jax.Array]:
        """(shares of a microbatch's losses and metrics, derivatives of its loss by this device's `values [T, ...]`)."""
        losses, pull, metrics = self._losses(values, fields)
        (slopes,) = pull(jnp.ones_like(losses))
        ids = fields["segments"]
        slopes = jnp.where(ids >= 0, fields["loss_mask"] * slopes[jnp.maximum(ids, 0)].T, 0).T
        return {name: self._share(a) for name, a in {"loss": losses, **metrics}.items()}, slopes

    def _losses(self, values: jax.Array, fields: Arrays) -> tuple[jax.Array, Callable, Arrays]:
        """(the losses of a microbatch, equal on all devices, their pullback to the sums over the segments, metrics)."""
        sums = self._sums({**fields, "": values})
        own = sums.pop("")
        return jax.vjp(lambda values: self._counted(self.loss(values, sums), sums), own, has_aux=True)

    def _counted(self, returned: Any, sums: Arrays) -> tuple[jax.Array, Arrays]:
        """Losses and metrics with 0 where `count` has 0. Raises ConfigError if their shapes differ."""
        (losses, metrics), name = self.measured(returned), type(self).__name__
        counts = jnp.asarray(self.count(sums))
        if getattr(losses, "shape", None) != counts.shape or not jnp.issubdtype(losses.dtype, jnp.floating):
            problem = f"{name}.loss returns {array_form(losses)} and {name}.count {array_form(counts)}"
            cure = "return both in one shape, such as [pairs]; the sum of the losses is divided by that of the counts"
            raise ConfigError(f"{problem} for {counted(self.number, 'segment')}: {cure}.")
        check_shapes(self, metrics, counts.shape)
        return jnp.where(counts > 0, losses, 0), {n: jnp.where(counts > 0, a, 0) for n, a in metrics.items()}

    def _share(self, losses: jax.Array) -> jax.Array:
        return losses.sum() / math.prod(self.sizes.values())

    def _sums(self, fields: Arrays) -> dict[str, jax.Array]:
        """Fields of this device's tokens → their sums over the segments of the microbatch.

        `share` is the part of a token that this device has.
        """
        ids, mask, share = fields["segments"], fields["loss_mask"].astype(jnp.float32), fields.get("share", 1.0)
        to = jnp.where(ids >= 0, ids, self.number)  # beyond the last: left out
        values = {name: a for name, a in fields.items() if name not in ("segments", "targets", "loss_mask", "share")}
        terms = {name: a.T * mask for name, a in values.items()} | {"loss_mask": mask}
        sums = {name: jax.ops.segment_sum((share * a).T, to, self.number) for name, a in terms.items()}
        return {name: self.comm.sum(a, SHARES) for name, a in sums.items()}


class HiddenSegment(OwnHead, Segment):
    """`Segment` of values that the objective's own parameters give each token, such as a reward; no logits.

    Its parameters are those of `Hidden`, and take the place of the model's head.
    """

    def values(self, w: Arrays, hidden: jax.Array, fields: Arrays) -> jax.Array:
        """Values `[tokens, ...]` from the parameters by name, the hidden states `[tokens, D]` and the fields.

        As `Hidden.loss`: differentiable, of no other token, finite in padding.
        """
        raise NotImplementedError

    def loss(self, values: jax.Array, fields: Arrays) -> jax.Array:
        """Losses, in any shape, from the sums over the segments of a microbatch: all `[segments, ...]`, in FP32."""
        raise NotImplementedError

    def turn(
        self, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        fields = self.of_tokens(batch, streams)
        values, pull, _ = self.of_trained(self._values, arrays, streams, self.local(fields), table)
        losses, slopes = self._with_slopes(self.comm.all_gather_tokens(values), fields)
        pulled = pull(self.comm.local_tokens(slopes * arrays.loss_factors[self.NAME]))
        return *with_gradients(pulled, gradients, table), Results(losses=losses)

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        fields = self.of_tokens(batch, streams)
        values, _ = self.of_hidden(self._values, self.weights(arrays.table), streams[HIDDEN], self.local(fields))
        return {"loss": self._share(self._losses(self.comm.all_gather_tokens(values), fields)[0])}

    def _values(self, w: Arrays, hidden: jax.Array, fields: Arrays) -> tuple[jax.Array, Arrays]:
        """(`values`, which must be numbers for each token, no metrics). Raises ConfigError for others."""
        values, mask = self.values(w, hidden, fields), fields["loss_mask"]
        shape = getattr(values, "shape", None)
        if not shape or shape[0] != len(mask) or not jnp.issubdtype(values.dtype, jnp.floating):
            problem = f"{type(self).__name__}.values returns {array_form(values)} for {counted(mask.size, 'token')}"
            raise ConfigError(f"{problem}: return a number for each token, [tokens], or several.")
        return values.astype(jnp.float32), {}


TAKEN = (*SUMS, "tokens", "mtp_loss")  # sums of a step that are not an objective's METRICS
BASES: tuple[Any, ...] = (Logits, Hidden, HiddenSegment, Segment, Elementwise)
OBJECTIVE_CLASSES: dict[str, type[Objective]] = {NEXT_TOKEN: NextToken, MASKED_TOKENS: MaskedTokens}


def register_objective(name: str) -> Callable[[type[Objective]], type[Objective]]:
    """A decorator that registers an objective for `objective.kind`; in a module of `run.extensions`."""
    if not isinstance(name, str):
        raise ConfigError('an objective has no name: write @register_objective("NAME") above its class.')

    def add(objective: type[Objective]) -> type[Objective]:
        known = OBJECTIVE_CLASSES.get(name) or OBJECTIVES.get(name, objective)
        ids = [f"{each.__module__}.{each.__qualname__}" for each in (known, objective)]
        if ids[0] != ids[1]:
            raise ConfigError(f"the objective {name} is {ids[0]} already: register {ids[1]} under another name.")
        _check_class(name, objective)
        OBJECTIVES[name] = objective
        return objective

    return add


def _check_class(name: str, objective: type[Objective]) -> None:
    derived = isinstance(objective, type) and issubclass(objective, Objective) and hasattr(objective, "turn")
    base: Any = next((base for base in BASES if derived and issubclass(objective, base)), Objective)
    to_write = [name for name in ("loss", "values") if hasattr(base, name)]
    lacking = [name for name in to_write if getattr(objective, name) is getattr(base, name)]
    if lacking or not derived:
        cure = f"derive a class from {', '.join(each.__name__ for each in BASES)}"
        problem = f"the objective {name} ({objective.__name__}) does not define {lacking[0] if lacking else 'loss'}"
        raise ConfigError(f"{problem}: {cure}, with the methods that docs/extensions.md has for it.")
    check_methods(objective, base)
    if getattr(objective, "TEACHER", False) and not issubclass(objective, Logits):
        problem = f"{objective.__name__}.TEACHER is set, but only a Logits objective is given a teacher's logits"
        raise ConfigError(f"{problem}: derive it from Logits, or remove TEACHER.")
    metrics = objective.METRICS
    if not isinstance(metrics, tuple) or not all(isinstance(each, str) and each not in TAKEN for each in metrics):
        problem = f"{objective.__name__}.METRICS is {metrics!r}"
        raise ConfigError(f"{problem}: give a tuple of names, none of them {', '.join(TAKEN)}.")
    if not isinstance(objective.FIELDS, Mapping):
        raise ConfigError(f"{objective.__name__}.FIELDS is no mapping: give each field's name its dtype.")
    for field, own in objective.FIELDS.items():
        dtype, *extra = own if isinstance(own, tuple) else (own,)
        try:
            jnp.dtype(dtype)
            is_field = all(isinstance(size, int) and size > 0 for size in extra)
        except TypeError:
            is_field = False
        if not is_field:
            problem = f"{objective.__name__}.FIELDS has {field}: {own!r}"
            raise ConfigError(f"{problem}: give a dtype, or (dtype, *sizes) for more dimensions.")


def make_objective(plan: StepPlan, comm: MeshComm) -> Any:
    """The node that `objective.kind` names."""
    return {**OBJECTIVES, **OBJECTIVE_CLASSES}[plan.objective.kind](plan, comm)
