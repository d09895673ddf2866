"""The choice of kernels for a config and its devices, with the reasons."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from megajax import ops
from megajax.config import Config
from megajax.errors import ConfigError
from megajax.layout.kinds import CROSS_ATTENTION, has_sublayer, layer_windows
from megajax.layout.recurrent import channels_with_decays, recurrent_heads, recurrent_widths
from megajax.mesh import within_processes
from megajax.ops import fp8, jla
from megajax.ops.blockwise_fp8 import BLOCK
from megajax.ops.fp8 import Implementation as Fp8Implementation
from megajax.ops.ranged_attention_triton import WIDEST
from megajax.options.fp8_recipes import Fp8Recipe
from megajax.runtime import permutations_are_copied

Obstacle = tuple[str, str]  # why a kernel cannot run, the cure
# jax refuses cuDNN attention with heads wider than 128 before Hopper, and wider than 256 on any GPU.
CUDNN_WIDEST_ANYWHERE = 128
CUDNN_WIDEST = 256
# The reference stores the scores of all pairs of tokens. `auto` does not choose it on GPUs for longer sequences.
REFERENCE_LONGEST_ON_GPUS = 8192
AMPERE = 8.0  # the least compute capability with BF16, and the least of megajax's kernels
INSTEAD_OF_OWN = "use kernels.attention=reference"
ALL_EXPERTS = "use kernels.grouped_matmul=reference, which multiplies all rows by the weights of all experts"
EMULATED = "precision.fp8.backend=emulated"  # of recipes in blocks
BATCHED = "kernels.grouped_matmul=xla"


@dataclass(frozen=True)
class Hardware:
    """The facts about devices, XLA flags and extras that a plan depends on."""

    platform: str  # "gpu" or "cpu"
    capability: str | None = None  # of a GPU, such as "9.0"
    copied_permutations: bool = False  # copy engines run the permutations over `tensor`, within a process
    has_jla: bool = True  # jax-linear-attention is installed

    @classmethod
    def of(cls, mesh: Mesh) -> "Hardware":
        device = mesh.devices.flat[0]
        copied = device.platform == "gpu" and permutations_are_copied() and within_processes(mesh, "tensor")
        capability = getattr(device, "compute_capability", None)
        return cls(device.platform, capability, copied, find_spec("jla") is not None)

    @property
    def is_gpu(self) -> bool:
        return self.platform in ("gpu", "cuda")


HOPPER = Hardware("gpu", "9.0")  # H100s and H200s


@dataclass(frozen=True)
class Kernels:
    """The chosen implementations, with the reasons."""

    attention: ops.Implementation = "reference"
    attention_reason: str = ""
    cross_attention: ops.Implementation = "reference"  # unused without sublayers of cross-attention
    cross_attention_reason: str = "no cross-attention"
    grouped_matmul: ops.GroupedImplementation = "reference"  # unused without experts
    grouped_matmul_reason: str = "no experts"
    linear_attention: ops.LinearAttentionImplementation = "reference"  # unused without linear recurrences
    linear_attention_reason: str = "no linear recurrences"
    fp8: Fp8Implementation = "reference"  # unused without FP8 and FP4
    loss: ops.LossImplementation = "reference"
    elementwise: ops.ElementwiseImplementation = "reference"
    symmetric_matmul: ops.ElementwiseImplementation = "reference"  # Muon's, with half of the operations

    @property
    def save_fp8(self) -> bool:
        """Whether layers in FP8 save their inputs in it: not those whose matmuls quantise them again."""
        return self.fp8 not in ("emulated", "cudnn")

    @property
    def experts(self) -> ops.ExpertKernels:
        # The reference of grouped matmuls reads rows that the activation's kernel does not write.
        elementwise = "reference" if self.grouped_matmul == "reference" else self.elementwise
        return ops.ExpertKernels(self.grouped_matmul, elementwise)

    @classmethod
    def choose(cls, config: Config, sizes: Mapping[str, int], hardware: Hardware) -> "Kernels":
        """Raises ConfigError for a kernel that cannot run."""
        model, settings = config.model, config.precision.fp8
        attention = choose_attention(config.kernels.attention, hardware, AttentionShape.of(config, sizes))
        crossed: tuple[ops.Implementation, str] = "reference", "no cross-attention"
        if has_sublayer(model, CROSS_ATTENTION):
            requested = config.kernels.attention
            crossed = choose_attention(requested, hardware, AttentionShape.of_cross_attention(config))
        of_fp8: Fp8Implementation = "reference"
        if settings.chosen.is_on:
            here = hardware.platform, hardware.capability
            of_fp8 = fp8.choose(settings.chosen, settings.backend, *here)
        grouped: tuple[ops.GroupedImplementation, str] = "reference", "no experts"
        if model.num_experts:
            assert model.expert_ffn_hidden_size is not None
            whole = "tensor" in config.mesh.experts_over
            width = model.expert_ffn_hidden_size // (1 if whole else sizes["tensor"])
            grouped = choose_grouped_matmul(
                config.kernels.grouped_matmul,
                hardware,
                config.precision.compute,
                (model.hidden_size, width),
                recipe=settings.chosen if settings.chosen.is_on and of_fp8 != "emulated" else None,
                over_tensor=not whole and sizes["tensor"] > 1,
            )
        recurrent: tuple[ops.LinearAttentionImplementation, str] = "reference", "no linear recurrences"
        if recurrent_heads(model):
            recurrent = choose_linear_attention(
                config.kernels.linear_attention,
                hardware,
                config.precision.compute,
                recurrent_widths(model),
                channels_with_decays(model) // sizes["tensor"],
            )
        fastest = "pallas" if hardware.platform == "gpu" else "reference"
        symmetric = "pallas" if hardware.capability == HOPPER.capability else "reference"
        return cls(*attention, *crossed, *grouped, *recurrent, of_fp8, fastest, fastest, symmetric)


@dataclass(frozen=True)
class AttentionShape:
    """What the choice of an attention kernel depends on, besides the hardware."""

    dtype: Any
    head_dim: int
    value_dim: int
    sequence_length: int
    softcap: float | None = None
    packed: bool = False  # a sequence holds several documents
    # Of attention to both sides: a window that is shorter than a sequence, and whether some tokens are padding
    two_sided_window: int | None = None
    padded: bool = False
    # Where attention runs over parts of the keys: the settings that cuDNN does not support for a part
    parts_with: tuple[str, ...] = ()
    has_bias: bool = False  # model.position=relative
    two_sided: str = ""  # the setting by which some tokens see later ones, and the others do not
    deterministic: bool = False

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, int]) -> "AttentionShape":
        model, length = config.model, config.batch.sequence_length
        shortest = min((window for window in layer_windows(model) if window is not None), default=length)
        return cls(
            config.precision.compute,
            model.head_dim,
            model.value_dim,
            length,
            model.attention_softcap,
            config.data.reset_attention,
            shortest if shortest < length and not model.causal else None,
            not model.causal and config.pads_samples("valid"),  # which has padding wherever training has
            _unsupported_by_parts(config, sizes),
            has_bias=model.position == "relative",
            two_sided=_two_sided(config),
            deterministic=config.run.deterministic,
        )

    @classmethod
    def of_cross_attention(cls, config: Config) -> "AttentionShape":
        """Of attention to an encoder's stream, all of which is on every device."""
        model, lengths = config.model, (config.batch.sequence_length, config.model.encoder.sequence_length or 0)
        odd = [length for length in lengths if length % 2]
        length, packed = odd[0] if odd else max(lengths), config.data.reset_attention
        widths = model.head_dim, model.head_dim
        return cls(config.precision.compute, *widths, length, packed=packed, deterministic=config.run.deterministic)


def choose_attention(requested: str, hardware: Hardware, attention: AttentionShape) -> tuple[ops.Implementation, str]:
    """The implementation for `kernels.attention` (auto or an implementation), and the reason, for the log.

    Raises ConfigError if the requested kernel cannot run, and if auto finds no kernel on a GPU and the sequence is too
    long for the reference.
    """
    key = "kernels.attention"
    if requested == "reference":
        return _asked_for(key, requested, {})
    if not hardware.is_gpu:
        if requested == "auto":
            return "reference", f"a fused kernel needs a GPU and this is {hardware.platform}"
        problem = f"{requested} needs a GPU and this is {hardware.platform}"
        return _asked_for(key, requested, {requested: (problem, "use kernels.attention=auto or reference")})
    obstacles: dict[ops.Implementation, Obstacle | None] = {
        "cudnn": _cudnn_obstacle(requested, hardware, attention),
        "pallas": _pallas_obstacle(hardware, attention),
        "triton": _triton_obstacle(hardware, attention),
    }
    if requested != "auto":
        return _asked_for(key, requested, obstacles)
    head_dim, value_dim, length = attention.head_dim, attention.value_dim, attention.sequence_length
    if head_dim != value_dim and obstacles["pallas"] is None and not _pads_heads(head_dim, value_dim):
        return "pallas", f"it is faster than cuDNN for keys and values of widths {head_dim} and {value_dim}"
    problems: list[str] = []
    order = list(obstacles)  # the fastest first
    if attention.deterministic and obstacles["cudnn"] is None:
        order.append(order.pop(0))
        problems.append("cuDNN's deterministic gradients need the scores of all pairs of tokens")
    for name in order:
        if (obstacle := obstacles[name]) is None:
            return name, ", and ".join(problems) or "the fused kernel fits this model"
        problems.append(obstacle[0])
    cudnn = obstacles["cudnn"]
    assert cudnn is not None
    if length > REFERENCE_LONGEST_ON_GPUS:
        found = ", and ".join(dict.fromkeys(problems))
        raise ConfigError(
            f"kernels.attention=auto finds no fused kernel, {found}; the reference would store the "
            f"scores of all pairs of batch.sequence_length={length} tokens: {cudnn[1]}, or set "
            "kernels.attention=reference if they fit."
        )
    return "reference", cudnn[0]


def _asked_for(key: str, name: str, obstacles: Mapping[Any, Obstacle | None]) -> tuple[Any, str]:
    """The implementation `name` that `key` asks for, and the reason. Raises ConfigError if it cannot run."""
    if (obstacle := obstacles.get(name)) is not None:
        raise ConfigError(f"{key}={name} cannot run, {obstacle[0]}: {obstacle[1]}.")
    return name, f"{key}={name}"


def _pallas_obstacle(hardware: Hardware, attention: AttentionShape) -> Obstacle | None:
    """Why megajax's kernel for Hopper cannot run; None if it can."""
    if hardware.capability != HOPPER.capability:
        problem = "megajax's own kernel is for GPUs of compute capability 9.0"
        return f"{problem} and this is {hardware.capability}", "use kernels.attention=triton"
    if (obstacle := _own_obstacle(attention)) is not None:
        return obstacle
    from megajax.ops.ranged_attention import WIDTHS, padded_widths  # here: Mosaic takes half a second

    if padded_widths(attention.head_dim, attention.value_dim) is None:
        return _too_wide("{}/{}".format(*WIDTHS[-1]), attention, "use kernels.attention=triton")
    return None


def _triton_obstacle(hardware: Hardware, attention: AttentionShape) -> Obstacle | None:
    """Why megajax's kernel for any GPU cannot run; None if it can."""
    if (obstacle := _before_ampere(hardware) or _own_obstacle(attention)) is not None:
        return obstacle
    if max(attention.head_dim, attention.value_dim) > WIDEST:
        return _too_wide(f"{WIDEST}/{WIDEST}", attention, INSTEAD_OF_OWN)
    return None


def _before_ampere(hardware: Hardware, instead: str = INSTEAD_OF_OWN) -> Obstacle | None:
    if float(hardware.capability or 0) >= AMPERE:
        return None
    return f"megajax's kernels need compute capability 8.0 or newer and this is {hardware.capability}", instead


def _own_obstacle(attention: AttentionShape) -> Obstacle | None:
    """Why none of megajax's own kernels can run on any GPU."""
    dtype = jnp.dtype(attention.dtype)
    if dtype not in (jnp.bfloat16, jnp.float16):
        cure = f"set precision.compute to bfloat16 or float16, or {INSTEAD_OF_OWN}"
        return f"megajax's own kernel does not support {dtype}", cure
    if attention.has_bias:
        return "megajax's own kernel has no bias of scores and model.position=relative", INSTEAD_OF_OWN
    return None


def _too_wide(supported: str, attention: AttentionShape, instead: str) -> Obstacle:
    given = f"model.head_dim={attention.head_dim}"
    if attention.head_dim != attention.value_dim:
        widths = f"{attention.head_dim} with model.v_head_dim={attention.value_dim}"
        given = f"model.qk_nope_head_dim + model.qk_rope_head_dim={widths}"
    problem = f"megajax's own kernel is for keys/values of widths up to {supported} and the model has {given}"
    return problem, f"change them, or {instead}"


def _pads_heads(head_dim: int, value_dim: int) -> bool:
    """Whether megajax's own kernel computes with wider heads than these."""
    from megajax.ops.ranged_attention import padded_widths  # here: Mosaic takes half a second

    return padded_widths(head_dim, value_dim) != (head_dim, value_dim)


def _cudnn_obstacle(requested: str, hardware: Hardware, attention: AttentionShape) -> Obstacle | None:
    """Why cuDNN attention cannot run; None if it can."""
    dtype, instead = jnp.dtype(attention.dtype), "or use kernels.attention=auto"  # our kernel, or the reference
    head_dim, value_dim, length = attention.head_dim, attention.value_dim, attention.sequence_length
    unequal, width = head_dim != value_dim, max(head_dim, value_dim)
    hopper = float(hardware.capability or 0) >= 9
    widest = CUDNN_WIDEST_ANYWHERE if requested == "auto" and not hopper else CUDNN_WIDEST
    if unequal and not hopper:
        problem = f"cuDNN needs a GPU of compute capability 9.0 for values of {value_dim} and keys of {head_dim}"
        return problem, "use kernels.attention=auto"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN does not support {dtype}", f"set precision.compute to bfloat16 or float16, {instead}"
    if width % 8 or width > widest:
        problem = f"cuDNN needs head widths that are multiples of 8 up to {widest} and model.head_dim={width}"
        return problem, f"change it, {instead}"
    # jax 0.11 passes its own empty placeholder for a bias, whose gradient needs even lengths.
    if length % 2:
        problem = f"jax trains cuDNN attention only on even lengths and batch.sequence_length={length}"
        return problem, f"make it even, {instead}"
    if attention.softcap is not None:
        return f"cuDNN has no soft-cap and model.attention_softcap={attention.softcap}", f"remove it, {instead}"
    if attention.packed:
        problem = "cuDNN has no document mask and the batch has packed documents"
        return problem, f"unset data.reset_attention, {instead}"
    if attention.two_sided:
        problem = f"cuDNN has no mask for some tokens that see later ones and {attention.two_sided}=true"
        return problem, f"set it to false, {instead}"
    if attention.two_sided_window is not None:
        window = f"model.sliding_window={attention.two_sided_window}"
        return f"cuDNN has no window on both sides and model.causal=false with {window}", f"remove it, {instead}"
    if attention.padded:
        problem = "cuDNN does not hide padding from tokens before it and model.causal=false with padded sequences"
        return problem, f"use another data.kind, {instead}"
    if attention.parts_with:
        problem = f"cuDNN does not support {' and '.join(attention.parts_with)} for a part of the keys"
        return problem, f"set communication.context=all_to_all, {instead}"
    return None


def _two_sided(config: Config) -> str:
    model = config.model
    if model.prefix_lm:
        return "model.prefix_lm"
    return "model.vision.bidirectional" if model.vision is not None and model.vision.bidirectional else ""


def _unsupported_by_parts(config: Config, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Settings that cuDNN's attention to a part of the keys (`ops/partial_attention.py`) does not support."""
    if config.context_strategy(sizes).key_shards(sizes["context"]) == 1:
        return ()
    windows = [window for window in layer_windows(config.model) if window is not None]
    found = []
    if min(windows, default=math.inf) < config.batch.sequence_length:
        found.append(f"model.sliding_window={config.model.sliding_window}")
    if config.model.position == "relative":
        found.append("model.position=relative")
    # Equal calls of its deterministic backward pass fail at run time, as `AttentionScales` says.
    return (*found, "run.deterministic") if config.run.deterministic else tuple(found)


def choose_grouped_matmul(
    requested: str,
    hardware: Hardware,
    dtype: Any,
    widths: tuple[int, ...],
    recipe: Fp8Recipe | None = None,
    over_tensor: bool = False,
) -> tuple[ops.GroupedImplementation, str]:
    """The implementation for `kernels.grouped_matmul` (auto or an implementation), and the reason, for the log.

    `widths` are all widths of operands and of results, `dtype` is that of results. `recipe` is of operands that are
    quantised; `over_tensor` says whether `tensor` divides one of the widths.
    Raises ConfigError if the implementation cannot run, or none for auto on a GPU: the reference multiplies all rows by
    the weights of all groups.
    """
    key = "kernels.grouped_matmul"
    if requested == "reference":
        return _asked_for(key, requested, {})
    own = recipe is not None and recipe.has_hopper_kernels  # nothing else multiplies its blocks
    cure = f"set {EMULATED} or {ALL_EXPERTS}" if own else f"use {BATCHED}"
    of_kernels = _grouped_kernel_obstacle(hardware, jnp.dtype(dtype))
    without_fp8 = None if recipe is None else ("the kernel for GPUs other than Hopper has no FP8", cure)
    in_blocks = ("XLA does not multiply the blocks of this FP8 recipe", cure) if own else None
    obstacles: dict[ops.GroupedImplementation, Obstacle | None] = {
        "pallas": of_kernels or _hopper_grouped_obstacle(hardware, widths, recipe, over_tensor, cure),
        "triton": of_kernels or without_fp8,
        "xla": in_blocks or (_before_ampere(hardware, ALL_EXPERTS) if hardware.is_gpu else None),
    }
    if requested != "auto":
        return _asked_for(key, requested, obstacles)
    if not hardware.is_gpu:
        return "reference", f"the kernels need a GPU and this is {hardware.platform}"
    reasons = dict[str, str]()  # in order, with the cures
    for name, obstacle in obstacles.items():
        if obstacle is None:
            return name, "; ".join(reasons) or "the Hopper kernel fits this model"
        reasons.setdefault(*obstacle)
    problem, cure = next(iter(reasons.items()))
    return _asked_for(key, requested, {requested: (problem, cure)})


def _grouped_kernel_obstacle(hardware: Hardware, dtype: Any) -> Obstacle | None:
    """Why no kernel for experts can run; None if one can."""
    if not hardware.is_gpu:
        return f"the kernel needs a GPU and this is {hardware.platform}", ALL_EXPERTS
    if dtype not in (jnp.bfloat16, jnp.float16):
        cure = f"set precision.compute to bfloat16 or float16, or use {BATCHED}"
        return f"the kernel does not support {dtype}", cure
    return _before_ampere(hardware, ALL_EXPERTS)


def _hopper_grouped_obstacle(
    hardware: Hardware, widths: tuple[int, ...], recipe: Fp8Recipe | None, over_tensor: bool, cure: str
) -> Obstacle | None:
    """Why the Hopper kernel cannot run; None if it can."""
    if hardware.capability != HOPPER.capability:
        problem = f"the Hopper kernel needs compute capability 9.0 and this is {hardware.capability}"
        return problem, "set it to auto"
    from megajax.ops.grouped_matmul_kernel import COLUMNS  # here: Mosaic takes half a second

    in_blocks = recipe is not None and recipe.has_hopper_kernels
    multiple = BLOCK if in_blocks else COLUMNS
    if any(width % multiple for width in widths):
        instead = f"add tensor to mesh.experts_over, or {cure}" if over_tensor else cure
        given = ", ".join(str(width) for width in widths)
        name = "kernel of this FP8 recipe" if in_blocks else "Hopper kernel"
        return f"the {name} needs widths that are multiples of {multiple} and these are {given}", instead
    return None


def choose_linear_attention(
    requested: str, hardware: Hardware, dtype: Any, widths: Mapping[str, int], channels: int = 0
) -> tuple[ops.LinearAttentionImplementation, str]:
    """The implementation for `kernels.linear_attention` (auto, jla, reference), and the reason, for the log.

    `widths` are those of a head's keys and values, by the model's keys; `channels` are those of a device's heads that
    have decays of their own. Raises ConfigError if the kernels that are requested cannot run.
    """
    obstacle = _jla_obstacle(hardware, jnp.dtype(dtype), widths, channels)
    if requested == "auto" and obstacle is not None:
        return "reference", f"{obstacle[0]}: {obstacle[1]}" if hardware.is_gpu else obstacle[0]
    if requested == "auto":
        return "jla", "the Hopper kernels fit this model"
    if obstacle is not None:
        obstacle = obstacle[0], f"{obstacle[1]}, or use kernels.linear_attention=reference"
    return _asked_for("kernels.linear_attention", requested, {"jla": obstacle})


def _jla_obstacle(hardware: Hardware, dtype: Any, widths: Mapping[str, int], channels: int) -> Obstacle | None:
    """Why the kernels of jax-linear-attention cannot run; None if they can."""
    if hardware.capability != "9.0" or not hardware.is_gpu:
        here = f"compute capability {hardware.capability}" if hardware.is_gpu else hardware.platform
        return f"the kernels need a Hopper GPU and this is {here}", "run on H100s or H200s"
    if dtype != jnp.bfloat16:
        return f"the kernels do not support {dtype}", "set precision.compute=bfloat16"
    if others := [f"{key}={width}" for key, width in widths.items() if width not in jla.WIDTHS]:
        return f"the kernels are for widths 64 and 128 and the model has {' and '.join(others)}", "change it"
    if channels % jla.CHANNELS:
        needed = f"KDA's kernels need a multiple of {jla.CHANNELS} channels on a device"
        instead = "change model.kda.num_heads, model.kda.head_dim or mesh.tensor"
        return f"{needed} and model.kda has {channels} there", instead
    if not hardware.has_jla:
        return "jax-linear-attention is not installed", "pip install 'megajax[linear-attention]'"
    return None
