"""What objectives with parameters of their own in place of the model's head derive from: `Hidden`, `HiddenSegment`."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.errors import ConfigError, array_form, counted
from megajax.schema.model import ModelConfig
from megajax.sharding import OBJECTIVE, below
from megajax.step.head import NORMS
from megajax.step.nodes import HIDDEN, Arrays, Microbatch, Results, StepArrays, Streams, Table, plus, plus_weights
from megajax.step.objective_bases import Elementwise, Objective, Segment, masked_sums


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
        return function(below(weights, OBJECTIVE), self.head.norm(weights, x), fields)

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
    return plus(gradients, {HIDDEN: dx}), plus_weights(table, of_weights)


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
        fields = self.local(self.of_tokens(arrays, batch, streams))
        loss, pull, metrics = self.of_trained(self._sum, arrays, streams, fields, table)
        pulled = pull(arrays.loss_factors[self.NAME])
        return *with_gradients(pulled, gradients, table), Results(losses={"loss": loss, **metrics})

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        fields = self.local(self.of_tokens(arrays, batch, streams))
        loss, metrics = self.of_hidden(self._sum, self.weights(arrays.table), streams[HIDDEN], fields)
        return {"loss": loss, **metrics}

    def _sum(self, w: Arrays, hidden: jax.Array, fields: Arrays) -> tuple[jax.Array, Arrays]:
        """The summed loss and metrics of this device's tokens."""
        mask = fields["loss_mask"]
        sums = masked_sums(*self._of_tokens(self.loss(w, hidden, fields), mask), mask)
        return sums.pop("loss"), sums


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
        fields = self.of_tokens(arrays, batch, streams)
        values, pull, _ = self.of_trained(self._values, arrays, streams, self.local(fields), table)
        losses, slopes = self._with_slopes(self.comm.all_gather_tokens(values), fields)
        pulled = pull(self.comm.local_tokens(slopes * arrays.loss_factors[self.NAME]))
        return *with_gradients(pulled, gradients, table), Results(losses=losses)

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        fields = self.of_tokens(arrays, batch, streams)
        values, _ = self.of_hidden(self._values, self.weights(arrays.table), streams[HIDDEN], self.local(fields))
        losses, _, metrics = self._losses(self.comm.all_gather_tokens(values), fields)
        return self._shares(losses, metrics)

    def _values(self, w: Arrays, hidden: jax.Array, fields: Arrays) -> tuple[jax.Array, Arrays]:
        """(`values`, which must be numbers for each token, no metrics). Raises ConfigError for others."""
        values, mask = self.values(w, hidden, fields), fields["loss_mask"]
        shape = getattr(values, "shape", None)
        if not shape or shape[0] != len(mask) or not jnp.issubdtype(values.dtype, jnp.floating):
            problem = f"{type(self).__name__}.values returns {array_form(values)} for {counted(mask.size, 'token')}"
            raise ConfigError(f"{problem}: return a number for each token, [tokens], or several.")
        return values.astype(jnp.float32), {}
