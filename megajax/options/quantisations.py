"""Formats of exported weights: how `checkpoint.export_hf.quantization` stores linear layers, declared once.

`hf/quantising.py` has what each writes.
"""

from dataclasses import dataclass

from megajax.options.registry import Registry


@dataclass(frozen=True)
class Quantisation:
    """A format of exported weights, by its declarations."""

    name: str  # for `checkpoint.export_hf.quantization`
    needs_history: bool = False  # of the inputs' amaxes, which delayed scaling keeps


NONE, FP8_BLOCK, FP8_CHANNEL = Quantisation("none"), Quantisation("fp8_block"), Quantisation("fp8_channel")
FP8_TENSOR, MXFP4 = Quantisation("fp8_tensor", needs_history=True), Quantisation("mxfp4")
QUANTISATIONS = Registry("format of exported weights", NONE, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4)
