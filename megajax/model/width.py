"""Width scaling by µP (Yang et al. 2022, arXiv 2203.03466, table 3): rates found at a small width fit a larger one.

`model.mup_base_width` is the hidden size at which the initial values and the learning rate were tuned; m is the hidden
size divided by it. All widths are assumed to grow with the hidden size, by more heads and not by wider ones.

| | initial std | rate of AdamW and Lion | rate of Muon, match_adamw | rate of Muon, spectral |
| --- | --- | --- | --- | --- |
| matrices of the layers | m^-1/2 | 1/m | m^-1/2 | 1 |
| head, routers | 1/m | 1/m | AdamW: 1/m | AdamW: 1/m |
| embeddings, norms, biases | 1 | 1 | AdamW: 1 | AdamW: 1 |
"""

from collections.abc import Callable
from typing import Any

from megajax.config import ModelConfig

OUTPUTS = ("vocab", "router", "outputs")  # dimensions of outputs whose number does not grow with the width
STACKED = ("layers", "modules")


def std_factor(config: ModelConfig, parameter: Any) -> float:
    """The factor of the initial standard deviation of a declared parameter."""
    m = _ratio(config)
    if parameter.role != "matrix":
        return 1.0
    return 1 / m if is_output(parameter) else m**-0.5


def rate_factor(config: ModelConfig, parameter: Any, of_matrices: Callable[[float], float]) -> float:
    """The factor of the learning rate of a declared parameter; `of_matrices`: m → the factor of its optimizer."""
    return of_matrices(_ratio(config)) if parameter.role == "matrix" else 1.0


def is_output(parameter: Any) -> bool:
    """Whether a declared matrix reads the residual stream and has outputs that do not grow with the width."""
    inner = [axis for axis in parameter.axes if axis not in STACKED]
    return inner[0] == "embed" and all(axis in OUTPUTS for axis in inner[1:])


def _ratio(config: ModelConfig) -> float:
    return config.hidden_size / config.mup_base_width if config.mup_base_width else 1.0
