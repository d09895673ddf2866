"""The part of a step that an operation of the compiled module belongs to, and its roofline.

The roofline is the shortest possible time on an H200:

- a matmul: 2·M·N·K operations at 989 TFLOP/s, in FP8 at 1979, of FP32 arrays at 67, or at 494 where they are rounded
  to TF32; a grouped matmul of experts likewise, for all rows;
- attention: B·N·S²·(H + W) operations forward for keys of width H and values of width W (causal counted once), twice
  that backward, at 989 TFLOP/s; megajax's own kernels always count half of all pairs, also with documents or windows;
- a collective over n GPUs: the bytes that a GPU sends at 450 GB/s (18 NVLinks), (n−1)/n of the whole array, twice that
  for an all-reduce;
- everything else: bytes read and written at 4.8 TB/s; a plain copy reaches 4.2.
"""

import math
import re

from megajax.layout.kinds import DECLARED
from megajax.tools.profile import hlo

BF16_FLOPS, FP8_FLOPS, MEMORY_BYTES, NVLINK_BYTES = 989e12, 1979e12, 4.8e12, 450e9  # a second
FP32_FLOPS, TF32_FLOPS = 67e12, 494e12
PALLAS = ("mosaic_gpu", "__gpu$xla.gpu.triton")  # the beginnings of the targets of Pallas's kernels
EXPERTS_MATMULS = ("grouped_matmul", "grouped_weight_gradient")  # and of the names of megajax's own matmuls
OWN_MATMULS = (*EXPERTS_MATMULS, "blockwise_matmul")
CORE = "core_attention"  # the scope of attention itself, without its projections and positions
# Names of the step's parts (`jax.named_scope`); the innermost one counts.
SCOPES = ("embedding", *DECLARED, CORE, "router", "norm", "head", "weights", "gradients", "optimizer")
ATTENTION, MATMULS, HEAD, ELEMENTWISE = "attention", "matmuls", "head and loss", "norms and elementwise"
OPTIMIZER, COPIES, COLLECTIVES = "optimizer", "copies", "collectives"
GROUPS = (ATTENTION, MATMULS, HEAD, ELEMENTWISE, OPTIMIZER, COPIES, COLLECTIVES)
# Kernels whose operation the trace does not name, by a part of the kernel's name; the first that fits counts.
KERNELS = (
    (COLLECTIVES, ("nccl", "memcpyp2p", "allreducekernel", "multigpubarrier")),
    (ATTENTION, ("fprop", "bprop", "fmha", "flash", "ranged_attention")),
    (HEAD, ("cross_entropy",)),
    (MATMULS, ("nvjet", "gemm", "cutlass", *OWN_MATMULS)),
    (COPIES, ("memcpy", "memset", "transpose", "copy")),
)
# Operations that a kernel of NCCL, or a copy between GPUs, can belong to, by a part of the kernel's name.
TRANSFERS = (
    ("allgather", ("all-gather",)),
    ("reducescatter", ("reduce-scatter",)),
    ("allreduce", ("all-reduce",)),
    ("sendrecv", ("collective-permute", "all-to-all")),
    ("memcpyp2p", ("collective-permute", "all-to-all")),
)


def group_of_kernel(name: str) -> str:
    """The group of a kernel from its name only."""
    lower = name.lower()
    return next((group for group, parts in KERNELS if any(part in lower for part in parts)), ELEMENTWISE)


def kinds_of_kernel(name: str) -> tuple[str, ...]:
    """The kinds of operations that a collective's kernel can belong to, from its name only."""
    lower = name.lower()
    return next((kinds for part, kinds in TRANSFERS if part in lower), ())


def is_collective(op: hlo.Op) -> bool:
    return op.kind in hlo.COLLECTIVES


def part_of(op: hlo.Op) -> tuple[str, str]:
    """The group of an operation, one of GROUPS, and its detail within the group."""
    scope, apart = scope_of(op), {"head": HEAD, "optimizer": OPTIMIZER}  # scopes with rows of their own
    if is_collective(op):
        return COLLECTIVES, op.kind
    if op.target.startswith("__cudnn$fmha"):
        return ATTENTION, "backward" if "Backward" in op.target else "forward"
    if kernel := ranged_attention(op):
        return ATTENTION, "forward" if kernel == "ranged_attention" else "backward"
    if scope == CORE:
        return ATTENTION, "matmuls" if is_matmul(op) or is_plain_matmul(op) else "elementwise"
    if is_matmul(op):
        shape = "×".join(map(str, matmul_shape(op))) + (" FP8" if is_fp8(op) else "")
        shape = f"experts {shape}" if is_own_matmul(op, EXPERTS_MATMULS) else shape
        return (apart[scope], f"matmul {shape}") if scope in apart else (MATMULS, shape)
    if is_plain_matmul(op):
        return (apart[scope], "matmul") if scope in apart else (MATMULS, scope)
    if scope == "head":
        return HEAD, "elementwise"
    if scope == "optimizer":  # with Muon it has the matmuls of Newton–Schulz too
        return OPTIMIZER, "update"
    if op.only_moves:
        return COPIES, scope
    return ELEMENTWISE, "conversions" if op.only_converts else scope


def scope_of(op: hlo.Op) -> str:
    """The innermost of SCOPES that an operation is in; "other" if it is in none."""
    return next((name for name in reversed(op.scopes) if name in SCOPES), "other")


def ranged_attention(op: hlo.Op) -> str | None:
    """The name of megajax's attention kernel that an operation is."""
    if not op.target.startswith(PALLAS):
        return None
    return next((scope for scope in op.scopes if scope.startswith("ranged_attention")), None)


def is_matmul(op: hlo.Op) -> bool:
    """Whether it is a call of cuBLAS or of a kernel of megajax's own."""
    return op.target.startswith("__cublas") or is_own_matmul(op)


def is_own_matmul(op: hlo.Op, names: tuple[str, ...] = OWN_MATMULS) -> bool:
    """Whether it is one of megajax's kernels with these names."""
    return op.target.startswith(PALLAS) and any(scope.startswith(names) for scope in op.scopes)


def is_plain_matmul(op: hlo.Op) -> bool:
    """Whether it is a matmul that XLA compiles itself, as on CPUs; its shape is not read."""
    return op.kind == "dot" or "dot" in op.fused


def is_fp8(op: hlo.Op) -> bool:
    """Whether a matmul reads FP8."""
    return bool(_fp8_operands(op)) if is_own_matmul(op) else op.target.endswith("$f8")


def matmul_shape(op: hlo.Op) -> tuple[int, int, int]:
    """M, N, K of a matmul; batches count as rows, and the rows of all experts together."""
    if is_own_matmul(op):
        matrices = _fp8_operands(op) or op.operands[-2:]  # some have scales beside them
        left, result = math.prod(matrices[0].dims), op.results[0].dims
        if len(result) == 3:  # the weights' gradient, [experts, M, N]
            return result[1], result[2], left // result[1]
        return result[0], result[1], left // result[0]
    left = op.operands[0].dims
    contracted = math.prod(left[d] for d in _numbers(op, "lhs_contracting_dimensions"))
    rows = math.prod(left) // contracted
    return rows, math.prod(op.results[0].dims) // rows, contracted


def _fp8_operands(op: hlo.Op) -> list[hlo.Array]:
    return [operand for operand in op.operands if operand.dtype.startswith("f8")]


def _flops_of_matmul(op: hlo.Op) -> float:
    if is_fp8(op):
        return FP8_FLOPS
    if op.operands[0].dtype != "f32":
        return BF16_FLOPS
    return FP32_FLOPS if is_own_matmul(op) or '"HIGHEST"' in op.attributes else TF32_FLOPS


def roofline_ms(op: hlo.Op) -> float:
    """The roofline of one run of an operation, as in the module's docstring."""
    if is_matmul(op):
        return 2e3 * math.prod(matmul_shape(op)) / _flops_of_matmul(op)
    if op.target.startswith("__cudnn$fmha"):
        B, N, S, keys = _numbers(op, "intermediate_tensor_shape.*?dimensions")
        window = _numbers(op, "sliding_window_length")[0]
        if window:
            keys = window - window * window / (2 * S)
        elif '"CAUSAL"' in op.attributes:
            keys /= 2
        flops = 2 * B * N * S * keys * (op.operands[0].dims[-1] + op.operands[2].dims[-1])
        return 1e3 * flops * (2 if "Backward" in op.target else 1) / BF16_FLOPS
    if ranged_attention(op):
        (B, S, N, H), (_, keys, _, W) = op.operands[0].dims, op.operands[2].dims
        return 1e3 * B * N * S * keys * (H + W) / BF16_FLOPS
    if is_collective(op):
        others = 1 if op.kind == "collective-permute" else (op.group_size - 1) / op.group_size
        sent = max(op.operand_bytes, op.result_bytes) * others * (2 if op.kind == "all-reduce" else 1)
        return 1e3 * sent / NVLINK_BYTES
    return 1e3 * op.traffic / MEMORY_BYTES


def _numbers(op: hlo.Op, key: str) -> list[int]:
    """The numbers of a key in an operation's backend config, a list or a single one."""
    found = re.search(rf'"{key}": ?(\[[^\]]*\]|"?\d+)', op.attributes)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else [0]
