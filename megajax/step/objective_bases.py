"""What objectives derive from that see what the model's head predicts: `Elementwise`, `Logits` and `Segment`.

Such a class declares its settings (`Settings`, the keys of `objective.settings`), the batch fields that it reads
besides the usual ones (`FIELDS`), and the numbers that it gives beside its losses (`METRICS`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from megajax.errors import ConfigError, array_form, counted
from megajax.parallel.mesh_comm import MeshComm
from megajax.schema.fields import BATCH_AXES, Count, Section
from megajax.step.head import SUMS, ChunkLoss, LossHead
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
    reads: tuple[str, ...] = ()
    reads_positions = False
    # Fields [rows, sequence_length, *extra] of its own by name: the dtype, or (dtype, *extra)
    FIELDS: ClassVar[Mapping[str, Any]] = {}
    # Numbers of steps and evaluations: `loss` returns (losses, {name: numbers}), whose means are taken as the losses'
    METRICS: ClassVar[tuple[str, ...]] = ()
    # Whether `fields` have what the config's teacher predicts: `teacher_log_probs` of the targets, as the own ones
    TEACHER: ClassVar[bool] = False

    class Settings(Section):
        """The keys of `objective.settings`."""

    def __init__(self, plan: StepPlan, comm: MeshComm):
        self.head, self.comm, self.sizes = LossHead(plan, comm), comm, plan.sizes
        self.settings = plan.objective_settings(type(self))
        if self.TEACHER:
            assert plan.teacher is not None
            self.reads, self.teacher = (STREAM,), TeacherHead(plan.teacher, comm)

    @property
    def EVALUATED(self) -> tuple[str, ...]:
        return "loss", *self.METRICS

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
        return {name: losses[name] for name in self.EVALUATED}

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
        fields = self.of_tokens(arrays, batch, streams)
        of_head = streams[HIDDEN], fields.pop("targets"), fields["loss_mask"]
        sums = (*SUMS, *self.METRICS)
        losses, dx, table = self.head.losses_and_gradients(arrays.table, *of_head, table, loss, fields, sums)
        return plus(gradients, {HIDDEN: dx}), table, Results(losses=losses)

    def of_tokens(self, arrays: StepArrays, batch: Microbatch, streams: Streams) -> dict[str, jax.Array]:
        """The fields that it reads, and what the teacher predicts, `[T, ...]`."""
        own = {name: batch.fields[name].reshape(-1, *field.extra) for name, field in self.fields().items()}
        return own | (self.of_teacher(arrays.table, streams[STREAM], own["targets"]) if self.TEACHER else {})

    def of_teacher(self, table: Arrays, h: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        return {"teacher_log_probs": self.teacher.log_probs(table, h, targets)}


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
        fields = self.of_tokens(arrays, batch, streams)
        of_head = streams[HIDDEN], fields["targets"], fields["loss_mask"]
        return self.head.sums_of(arrays.table, *of_head, self.chunk_loss(1.0, arrays.table), fields, self.EVALUATED)

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
    of `Elementwise`; with `TEACHER` the fields have `teacher_logits` [tokens, V].
    """

    def loss(self, logits: jax.Array, fields: Arrays) -> jax.Array:
        """Losses `[tokens]` from the FP32 logits `[tokens, V]` and the fields `[tokens, ...]`; differentiable."""
        raise NotImplementedError

    def chunk_loss(self, scale: jax.Array | float, table: Arrays) -> ChunkLoss:
        def with_teacher(logits: jax.Array, mask: jax.Array, fields: Arrays) -> tuple[Arrays, jax.Array]:
            own = {name: field for name, field in fields.items() if name != STREAM}
            teachers = {"teacher_logits": self.teacher.logits(table, fields[STREAM])} if self.TEACHER else {}
            return self._with_slopes(logits, mask, own | teachers)

        return self.head.of_logits(scale, with_teacher)

    def of_teacher(self, table: Arrays, h: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        return {STREAM: self.comm.all_gather_tokens(h)}  # a chunk's logits are made with its own


class Segment(Objective):
    """A function of the summed log-probabilities of segments, such as the two answers of a preference.

    The batch field `segments` numbers the tokens' segments within a microbatch, below the number of its sequences; -1:
    no segment. By default each sequence is one. Log-probabilities and fields are multiplied by `loss_mask` and summed
    over each segment, on all devices. A first pass over the head gives the log-probabilities, a second one the
    gradients.
    """

    TOGETHER: ClassVar[Count] = 1  # the number of consecutive segments with one loss, such as 2 of a pair

    def __init__(self, plan: StepPlan, comm: MeshComm):
        super().__init__(plan, comm)
        self.number = plan.batch_shape[1]
        if self.number % self.TOGETHER:
            problem = f"a microbatch has {counted(self.number, 'sequence')}, and so many segments"
            need = f"objective.kind={plan.objective.kind} takes {self.TOGETHER} together"
            cure = f"set batch.global_size to a multiple of {self.TOGETHER} times batch.num_microbatches"
            raise ConfigError(f"{problem}, but {need}: {cure}.")

    def fields(self) -> dict[str, Field]:
        return joined_fields(
            {"segments": Field(jnp.int32, "objective.kind", limit=self.number, least=-1, of_row=True)}, super().fields()
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
        x, fields = streams[HIDDEN], self.of_tokens(arrays, batch, streams)
        log_probs = self.head.log_probs(arrays.table, x, fields["targets"])
        losses, slopes = self._with_slopes(log_probs, fields)
        loss = self.head.cross_entropy(arrays.loss_factors[self.NAME])
        _, dx, table = self.head.losses_and_gradients(arrays.table, x, fields["targets"], -slopes, table, loss)
        return plus(gradients, {HIDDEN: dx}), table, Results(losses=losses)

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        fields = self.of_tokens(arrays, batch, streams)
        log_probs = self.head.log_probs(arrays.table, streams[HIDDEN], fields["targets"])
        losses, _, metrics = self._losses(log_probs, fields)
        return self._shares(losses, metrics)

    def _with_slopes(self, values: jax.Array, fields: Arrays) -> tuple[dict[str, jax.Array], jax.Array]:
        """(shares of a microbatch's losses and metrics, derivatives of its loss by this device's `values [T, ...]`)."""
        losses, pull, metrics = self._losses(values, fields)
        (slopes,) = pull(jnp.ones_like(losses))
        ids = fields["segments"]
        slopes = jnp.where(ids >= 0, fields["loss_mask"] * slopes[jnp.maximum(ids, 0)].T, 0).T
        return self._shares(losses, metrics), slopes

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

    def _shares(self, losses: jax.Array, metrics: Arrays) -> dict[str, jax.Array]:
        """This device's shares of the sums."""
        return {name: a.sum() / math.prod(self.sizes.values()) for name, a in {"loss": losses, **metrics}.items()}

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
