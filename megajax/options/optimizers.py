"""Optimizers and the forms of moments: what each reads of the section `optimizer`; `optim/` has their computation."""

from dataclasses import dataclass
from typing import Any

from megajax.options.registry import Registry

BETA1, BETA2, EPSILON = READ_BY_SOME = ("beta1", "beta2", "epsilon")


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer, by its declarations."""

    name: str  # for `optimizer.kind`, and the name of the section with its own settings, if the schema has one
    reads: tuple[str, ...] = READ_BY_SOME  # of these keys
    scales_with_width: bool = False  # whether its learning rate follows µP's table
    is_stateless: bool = False  # whether it keeps no moments with beta1 = 0
    decides_arrays: tuple[str, ...] = ()  # keys that its arrays depend on, besides kind and state: `settings`
    beside_adamw: bool = False  # whether it updates matrices, and AdamW, which reads all of them, the rest
    made: type[Any] | None = None  # the class of an extension's optimizer, with its `Settings`

    def has_effect(self, key: str) -> bool:
        """Whether a run reads beta1, beta2 or epsilon."""
        return self.beside_adamw or key in self.reads


@dataclass(frozen=True)
class MomentForm:
    """A form of moments between steps, by its declarations."""

    name: str  # for `optimizer.state`
    is_small: bool = False  # whether the memory that it saves would be lost to operands of late weight gradients


OPTIMIZERS = Registry(
    "optimizer",
    OptimizerKind("adamw", scales_with_width=True),
    OptimizerKind("ademamix", scales_with_width=True),
    OptimizerKind("sgd", reads=(BETA1,), is_stateless=True),
    OptimizerKind("lion", reads=(BETA1, BETA2), scales_with_width=True),
    OptimizerKind("muon", reads=(), scales_with_width=True, beside_adamw=True),
    OptimizerKind("soap", decides_arrays=("soap.max_dimension",), beside_adamw=True),
)
FORMS = Registry("form of moments", MomentForm("float32"), MomentForm("bfloat16"), MomentForm("int8", is_small=True))
