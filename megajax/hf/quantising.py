"""Weights in FP8 or FP4 on the way out, in the layouts that inference engines load; `quantised.py` reads them.

Matrices of linear layers are quantised from FP32, the nearest number and ties to even. The embedding, the head, norms,
routers and biases keep `checkpoint.export_hf.dtype`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from megajax.config import ModelConfig
from megajax.errors import InputError
from megajax.hf.quantised import COMPRESSED_SCALE, FP8_SCALE, GROUP, INPUT_SCALE
from megajax.hf.tensors import Tensor
from megajax.layout.kinds import stacked_layers
from megajax.model.block import blocks_of
from megajax.options.quantisations import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, NONE, QUANTISATIONS

Parts = Mapping[str, Sequence[tuple[Tensor, tuple[int, ...]]]]  # by the name of a tensor in the folder, with indices
E4M3_LARGEST = 448.0
BLOCK = 128
RENAMED = {  # modules of transformers 5 by the tensors of a folder; engines compare names with either
    r"^backbone\.": "model.",
    r"^language_model\.model\.": "model.language_model.",
    r"^language_model\.lm_head": "lm_head",
    r"^vision_tower\.vision_model\.": "model.vision_tower.",
    r"^(multi_modal_projector|visual)\.": r"model.\1.",
}
KEY = "checkpoint.export_hf.quantization"
InputAmax = Mapping[str, float]  # by the name of a tensor in the folder: the largest magnitude of its layer's input


class StoredForm(NamedTuple):
    """How the numbers of an exported folder are stored."""

    dtype: str  # of what is not quantised
    quantisation: str = NONE.name
    history: Mapping[str, np.ndarray] | None = None  # the amaxes of delayed scaling, as `weights.scaling.History`


class Quantiser:
    """A format: the tensors that it stores otherwise, and its section of config.json."""

    dimensions: ClassVar[int] = 2  # of the matrices: [out, in]

    def __init__(self, input_amax: InputAmax | None = None):
        self.input_amax = input_amax

    def settings(self, others: list[str]) -> dict[str, Any]:
        """`quantization_config`, where `others` are the modules whose matrices are not quantised."""
        raise NotImplementedError

    def stored(self, name: str, w: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of a FP32 matrix, with their names."""
        raise NotImplementedError

    def fits(self, name: str, parts: Iterable[Tensor]) -> bool:
        """Whether the format has this tensor."""
        return name.endswith(".weight") and all(part.pattern and part.dimensions == self.dimensions for part in parts)


class Fp8Block(Quantiser):
    """DeepSeek-V3's: a scale for 128 x 128 numbers, a power of two, as FP32 in `weight_scale_inv`."""

    def settings(self, others: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": others,
        }

    def stored(self, name: str, w: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        rows, columns = (-(-size // BLOCK) for size in w.shape)
        padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
        padded[: w.shape[0], : w.shape[1]] = w
        scales = power_of_two_scale(np.abs(padded.reshape(rows, BLOCK, columns, BLOCK)).max((1, 3)))
        each = scales.repeat(BLOCK, 0)[: w.shape[0]].repeat(BLOCK, 1)[:, : w.shape[1]]
        yield name, in_e4m3(w, each)
        yield name + FP8_SCALE, scales


class CompressedTensors(Quantiser):
    """compressed-tensors' FP8: a scale for each row of a matrix; engines scale each token of an input."""

    def settings(self, others: list[str]) -> dict[str, Any]:
        form = {"num_bits": 8, "type": "float", "symmetric": True}
        weights, inputs = ("tensor", "tensor") if self.input_amax is not None else ("channel", "token")
        group = {
            "targets": ["Linear"],
            "weights": form | {"strategy": weights, "dynamic": False},
            "input_activations": form | {"strategy": inputs, "dynamic": self.input_amax is None},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": others,
        }

    def stored(self, name: str, w: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        if self.input_amax is None:
            scales = power_of_two_scale(np.abs(w).max(1, keepdims=True))
        else:
            scales = largest_to(np.abs(w).max(keepdims=True).reshape(1))
            yield name.removesuffix("weight") + INPUT_SCALE, largest_to(np.array([self.input_amax[name]], np.float32))
        yield name, in_e4m3(w, scales)
        yield name + COMPRESSED_SCALE, scales


class Mxfp4Experts(Quantiser):
    """GPT-OSS's experts `[E, in, out]`: E2M1 in groups of 32 along `in`, with a power of two each."""

    dimensions = 3

    def settings(self, others: list[str]) -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": others}

    def fits(self, name: str, parts: Iterable[Tensor]) -> bool:
        return name.endswith("_proj")

    def stored(self, name: str, w: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        experts, inner, out = w.shape
        if inner % GROUP:
            fail(MXFP4.name, f"{name} has {inner} inputs, no multiple of {GROUP}")
        groups = np.ascontiguousarray(w.transpose(0, 2, 1)).reshape(experts, out, inner // GROUP, GROUP)
        exponents, codes = in_mxfp4(groups)
        yield f"{name}_blocks", codes[..., 0::2] | codes[..., 1::2] << 4
        yield f"{name}_scales", (exponents + 127).astype(np.uint8)


QUANTISERS = {
    FP8_BLOCK.name: Fp8Block,
    FP8_CHANNEL.name: CompressedTensors,
    FP8_TENSOR.name: CompressedTensors,
    MXFP4.name: Mxfp4Experts,
}


class QuantisedWeights(NamedTuple):
    """What of a folder is quantised; nothing by default."""

    quantiser: Quantiser | None = None
    names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = MappingProxyType({})  # keys of config.json

    def stored(self, tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of a folder, with those of `names`, which are FP32, in the format."""
        names = set(self.names)
        for name, array in tensors:
            if self.quantiser is not None and name in names:
                yield from self.quantiser.stored(name, array)
            else:
                yield name, array


def quantised_weights(
    form: StoredForm, parts: Parts, model: ModelConfig, model_type: str, heads: Sequence[str]
) -> QuantisedWeights:
    """What a form of `parts`, the tensors of a folder of this `model_type`, quantises.

    `heads` are the tensors of an untied head. Raises InputError for a model whose linear layers the format does not
    have.
    """
    if form.quantisation == NONE.name:
        return QuantisedWeights()
    quantiser, linear = QUANTISERS[form.quantisation](), _linear_layers(model)
    names = [name for name, own in parts.items() if all(tensor.ours in linear for tensor, _ in own)]
    found = [name for name in names if quantiser.fits(name, [tensor for tensor, _ in parts[name]])]
    if quantiser.dimensions == 3 and not found:
        fail(form.quantisation, f"model_type {model_type} has no experts in one tensor, as GPT-OSS has")
    if quantiser.dimensions == 2 and (left := [name for name in names if name not in found]):
        has_experts = any(Mxfp4Experts().fits(name, ()) for name in left)
        cure = MXFP4.name if has_experts else NONE.name
        fail(form.quantisation, f"{left[0]} of model_type {model_type} is no matrix [out, in]", cure)
    if QUANTISATIONS[form.quantisation].needs_history:
        if model.num_experts:  # their activations are measured times the routing weights
            fail(
                form.quantisation,
                "it has experts, whose inputs have no scale without the routing weights",
                FP8_CHANNEL.name,
            )
        if form.history is not None:
            amax = _input_amax(form.history, linear, parts, model)
            quantiser.input_amax = {name: amax[name] for name in found if amax[name] > 0}
            found = [*quantiser.input_amax]  # layers in BF16 have no amax
    others = sorted({*parts, *heads} - {*found})
    settings = quantiser.settings(_modules(name for name in others if name.endswith(".weight")))
    return QuantisedWeights(quantiser, tuple(found), {"quantization_config": settings})


def _modules(weights: Iterable[str]) -> list[str]:
    """The modules of these tensors, also by the names that transformers 5 gives them."""
    names = [name.removesuffix(".weight") for name in weights]
    return [*dict.fromkeys([*names, *(re.sub(theirs, new, name) for theirs, new in RENAMED.items() for name in names)])]


def fail(quantisation: str, problem: str, cure: str = NONE.name) -> NoReturn:
    raise InputError(f"{KEY}={quantisation} cannot store this model, because {problem}: use {cure}.")


def _linear_layers(model: ModelConfig) -> dict[str, str]:
    """The parameters of linear layers → the layers' names within a block, as FP8 has them."""
    return {
        f"blocks.{stack}.{member}": name
        for stack, block in blocks_of(model).items()
        for name in block.linear_layers
        for member in block.fused.get(name, (name,))
    }


def _input_amax(
    history: Mapping[str, np.ndarray], linear: Mapping[str, str], parts: Parts, model: ModelConfig
) -> dict[str, float]:
    """The largest amax of the inputs of each tensor's layer in the steps of the history."""
    layers, out = stacked_layers(model), dict[str, float]()
    for name, own in parts.items():
        for tensor, at in own:
            if tensor.ours in linear:
                layer = list(layers[tensor.ours.split(".")[1]])[at[0]]
                out[name] = float(history[f"{linear[tensor.ours]}.input"][layer].max())
    return out


def power_of_two_scale(amax: np.ndarray) -> np.ndarray:
    """The least power of two with which E4M3 has these magnitudes, FP32; 1 for zeros, NaN if not finite."""
    mantissa, exponent = np.frexp(amax.astype(np.float64))  # mantissas from 1/2; 448 = 7/8 · 2^9
    scale = np.ldexp(1.0, np.maximum(exponent - 9 + (mantissa > 0.875), -126))
    return np.where(np.isfinite(amax), np.where(amax > 0, scale, 1), np.nan).astype(np.float32)


def largest_to(amax: np.ndarray) -> np.ndarray:
    """The scale with which a magnitude becomes E4M3's largest number; 1 for zero."""
    return np.where(amax > 0, amax / E4M3_LARGEST, 1).astype(np.float32)


def in_e4m3(w: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The nearest numbers; larger ones become the largest."""
    return np.clip(w / scales, -E4M3_LARGEST, E4M3_LARGEST).astype(ml_dtypes.float8_e4m3fn)


def in_mxfp4(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(exponents `[...]`, codes `[..., 32]`) of FP32 groups `[..., 32]`.

    Of the two exponents with which the largest magnitude is between E2M1's 3 and 8 that with the smaller square error:
    the lower one clips above 6. Numbers that were in MXFP4 stay what they are.
    """
    _, exponent = np.frexp(np.abs(groups).max(-1).astype(np.float64))
    best = None
    for exponents in (exponent - 3, exponent - 2):
        exponents = np.clip(exponents, -127, 127)
        scaled = groups / np.ldexp(1.0, exponents)[..., None]
        values = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        error = np.square(scaled - values.astype(np.float64)).sum(-1) * np.ldexp(1.0, 2 * exponents)
        codes = values.view(np.uint8) & 15
        if best is None:
            best = exponents, codes, error
            continue
        more = error < best[2]
        best = np.where(more, exponents, best[0]), np.where(more[..., None], codes, best[1]), error
    assert best is not None
    return best[0], best[1]
