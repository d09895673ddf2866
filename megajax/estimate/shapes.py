"""The communication points of a layer without numbers: what the planner traces in place of a mesh and its kernels.

Linear layers are those of the step. Collectives have the shapes of their results. An operation with a kernel of its own
is one `kernel` here, which declares its work, and keeps for the backward pass what the step's kernel keeps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray

from megajax.jax_internals import Primitive
from megajax.kernel_choice import Kernels
from megajax.model.comm import Comm, TokenPositions
from megajax.ops import AttentionSettings
from megajax.ops.expert_mlp import ExpertMlp, Route
from megajax.ops.experts import apply_experts
from megajax.options.dispatch import ALL_GATHER, Dispatch
from megajax.options.remat import ATTENTION
from megajax.parallel.mesh_comm import MeshComm
from megajax.parallel.tensor.ring import TensorRing
from megajax.schema.fields import AXES
from megajax.step_plan import Collectives

Arrays = Sequence[jax.Array]
FP32, INT32 = jnp.dtype("float32"), jnp.dtype("int32")
# Arrays → arrays of the shapes and dtypes `results`. For a token and each token that it attends to, the kernel
# multiplies `per_key` numbers; with all tokens of an encoder's sequence `fixed` ones. A recurrence has `state` numbers,
# which it multiplies `products` times for each token.
kernel = Primitive("kernel")
kernel.multiple_results = True
kernel.def_abstract_eval(
    lambda *_, results, per_key=0, fixed=0, state=0, products=0: [ShapedArray(shape, dtype) for shape, dtype in results]
)


@dataclass(frozen=True)
class Shards:
    """The devices that share a layer's work."""

    tensor: int = 1  # they share heads and widths
    experts: int = 1  # they have different experts
    experts_over_tensor: bool = False  # whether they include the devices of `tensor`
    tokens: int = 1  # they have different tokens: only the experts' capacity depends on it
    dispatch: Dispatch = ALL_GATHER

    @property
    def experts_over(self) -> tuple[str, ...]:
        """The axes that divide the experts; the others count as `expert`."""
        return ("expert", "tensor") if self.experts_over_tensor else ("expert",)


class ShapeRing(TensorRing):
    """The devices of `tensor`; their tensors are in one piece."""

    def overlaps(self, width: int) -> bool:
        return False

    def all_gather_tokens(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([x] * self.size)

    def reduce_scatter_tokens(self, y: jax.Array) -> jax.Array:
        return y[: len(y) // self.size]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShapeRoute(Route):
    """Rows on their way to experts and back; of `[T]` tokens, `R` rows arrive."""

    found: list[jax.Array]
    R: int = field(metadata={"static": True})
    T: int = field(metadata={"static": True})

    def send(self, x: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(self._sent(a, self.R) for a in (x, *numbers))

    def back(self, rows: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        return self._sent(rows, self.T), *numbers

    def rows(self, tokens: int) -> int:
        return self.R

    def _sent(self, a: jax.Array, length: int) -> jax.Array:
        return kernel.bind(a, *self.found, self.group_sizes, results=(((length, *a.shape[1:]), a.dtype),))[0]


class ShapeComm(MeshComm):
    """The communication points of one of several devices, with shapes alone."""

    def __init__(self, shards: Shards, frozen: bool = False):
        """`frozen`: the linear layers' weights have no gradients, except adapters."""
        one: dict[str, int] = dict.fromkeys(AXES, 1)
        collectives = Collectives(
            dispatch=shards.dispatch, experts_over=shards.experts_over, expert_shards=shards.experts
        )
        super().__init__(one, Kernels(), collectives, False, frozen)
        self.shards = shards
        self.linear_attention = ShapeRecurrences()
        self.set_tensor_parallel(replace(self.tensor_parallel, ring=ShapeRing(shards.tensor, copied=False)))

    def attend(self, q, k, v, positions: TokenPositions, settings: AttentionSettings):
        return _attention(False, q, k, v), None

    def attend_to(self, q, k, v, ranges, scale):
        return _attention(True, q, k, v)

    def attend_latent(self, q, keys, positions: TokenPositions, settings: AttentionSettings):
        return Comm.attend_latent(self, q, keys, positions, settings)

    def experts(self, activation, x, experts, weights, matrices, capacity) -> jax.Array:
        whole = self.shards.experts_over_tensor
        if not whole:
            x, experts, weights = (self.all_gather_tokens(a) for a in (x, experts, weights))
        rows = self.expert_parallel.rows(len(x), experts.shape[1], matrices.num_experts, capacity)
        numbers = [((n,), INT32) for n in (rows, experts.size, matrices.num_experts)]
        *found, group_sizes = kernel.bind(experts, results=tuple(numbers))
        route, mlp = ShapeRoute(group_sizes, found, rows, len(x)), ExpertMlp(activation, self.expert_parallel.kernels)
        y: jax.Array = apply_experts(mlp, route, x, weights, matrices)
        return y if whole else self.reduce_scatter_tokens(y)

    def size(self, axes: str | Sequence[str]) -> int:
        sizes = {"tensor": self.shards.tensor, "data": self.shards.tokens}
        return math.prod(sizes.get(axis, 1) for axis in self._named(axes))

    def index(self, axis: str) -> int:
        return 0

    def gather[Tree](self, x: Tree, axes: str | Sequence[str], dim: int = 0) -> Tree:
        return jax.tree.map(lambda a: jnp.concatenate([a] * self.size(axes), dim), x)


class ShapeRecurrences:
    """The kernels of recurrences.

    Products of a state with a number for each of its own, by token, as Megatron-LM counts them: of the delta rule what
    the state has for a key, its two changes, and the output; of Mamba-2 three and a half.
    """

    def gated_delta_rule(self, q, k, v, log_decay, strength, *_: Any) -> tuple[jax.Array, jax.Array]:
        return _recurrence(4, q, k, v, log_decay, strength)

    def state_space(self, q, k, v, log_decay, *_: Any) -> tuple[jax.Array, jax.Array]:
        return _recurrence(3.5, q, k, v, log_decay)


# Kernels with what they keep. The planner never runs their backward pass.


def _not_run(*_: Any) -> Any:
    raise AssertionError("the planner traces forward passes alone")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(crosses: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of tokens to tokens, or if it `crosses` to all of an encoder's sequence."""
    return _attention_forward(crosses, q, k, v)[0]


def _attention_forward(crosses: bool, q: jax.Array, k: jax.Array, v: jax.Array):
    """It keeps its inputs, its output, and the log-sum-exp of the scores in FP32."""
    (B, S, N, H), (T, W) = q.shape, (k.shape[1], v.shape[-1])
    work = {"fixed": T * N * (H + W)} if crosses else {"per_key": N * (H + W)}
    results = ((B, S, N, W), q.dtype), ((B, N, S), FP32)
    out, lse = (checkpoint_name(a, ATTENTION) for a in kernel.bind(q, k, v, results=results, **work))
    return out, (q, k, v, out, lse)


_attention.defvjp(_attention_forward, _not_run)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(products: float, q: jax.Array, k: jax.Array, v: jax.Array, *gates: jax.Array):
    """It keeps its inputs; layers compute these again in the backward pass."""
    (B, _, N, W), H = v.shape, k.shape[-1]
    results = (v.shape, FP32), ((B, N, H, W), FP32)
    out, final = kernel.bind(q, k, v, *gates, results=results, state=N * H * W, products=products)
    return out, final


_recurrence.defvjp(lambda products, *arrays: (_recurrence(products, *arrays), arrays), _not_run)
