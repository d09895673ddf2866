"""Activations of MLPs and experts: the values of `model.activation`, declared once.

`ops/mlp_activation.py` computes them, and registers those of extensions.
"""

from dataclasses import dataclass

from megajax.options.registry import Registry


@dataclass(frozen=True)
class Activation:
    """An activation, by its declarations."""

    name: str  # for `model.activation`
    is_gated: bool = False  # activation(gate) · up, so the first matrix has twice the width
    in_transformer_engine: bool = True


ACTIVATIONS = Registry(
    "activation",
    Activation("swiglu", is_gated=True),
    Activation("geglu", is_gated=True),
    Activation("geglu_exact", is_gated=True, in_transformer_engine=False),
    Activation("clamped_swiglu", is_gated=True, in_transformer_engine=False),
    Activation("gelu"),
    Activation("gelu_exact"),
    Activation("quick_gelu"),
    Activation("relu"),
    Activation("relu2"),
)
