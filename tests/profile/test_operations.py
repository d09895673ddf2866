"""Operations of a made-up module: shapes, traffic, scopes, the part that each belongs to, and rooflines by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import megajax
from megajax.layout.kinds import BUILT_IN_BLOCKS
from megajax.tools.compile import describe
from megajax.tools.profile import hlo, operations

# Its sizes make rooflines round numbers of ms: a matmul's 2·M·N·K is 2 ms · 989 TFLOP/s, and so on.
FP8, SCALES = hlo.Array("f8e4m3fn", (512, 256)), hlo.Array("f32", (2, 512))
MODULE = (Path(__file__).parents[1] / "data/small_step.hlo").read_text()


@pytest.fixture
def ops() -> dict[str, hlo.Op]:
    return {op.name: op for op in hlo.parse(MODULE)}


def test_operations_are_read_with_their_loops_shapes_and_traffic(ops):
    assert list(ops) == ["matmul", "gather-start", "attend", "turned", "loop", "on_a_slice", "experts", "latent", "sum"]
    assert {name: op.loops for name, op in ops.items() if op.loops} == {"turned": 1}
    gather, turned = ops["gather-start"], ops["turned"]
    assert (gather.kind, gather.group_size, gather.operand_bytes, gather.result_bytes) == ("all-gather", 4, 15e7, 6e8)
    assert turned.only_moves and not ops["sum"].only_moves
    assert not replace(turned, fused=frozenset()).only_moves, "its computation is not in the text"
    assert turned.traffic == 2 * 4 * 500_000 + 4, "an eighth of the stack is read"
    assert ops["sum"].traffic == 3 * 1.6e9
    assert ops["matmul"].scopes == ("_train_step", "mlp", "dot_general")


def test_a_library_call_inside_a_fusion_is_the_call(ops):
    call = ops["on_a_slice"]
    assert (call.kind, call.target) == ("custom-call", "__cublas$lt$matmul$f8")
    assert operations.part_of(call) == ("head and loss", "matmul 200×300×100 FP8")
    assert operations.roofline_ms(call) == pytest.approx(2e3 * 200 * 300 * 100 / 1979e12)


@pytest.mark.parametrize(
    ("name", "part", "ms"),
    [
        ("matmul", ("matmuls", "10000×10000×9890"), 2),
        ("experts", ("matmuls", "experts 10000×10000×9890"), 2),
        ("attend", ("attention", "backward"), 2),
        ("latent", ("attention", "backward"), 1e3 * 4096**2 * 16 * 320 / 989e12),
        ("gather-start", ("collectives", "all-gather"), 1),
        ("sum", ("norms and elementwise", "norm"), 1),
        ("turned", ("copies", "other"), 4e6 / 4.8e9),
    ],
)
def test_each_operation_has_its_part_and_roofline(ops, name, part, ms):
    assert operations.part_of(ops[name]) == part
    assert operations.roofline_ms(ops[name]) == pytest.approx(ms)


def test_kernels_for_any_gpu_are_counted_as_those_for_hopper(ops):
    others = {op.name: op for op in hlo.parse(MODULE.replace("mosaic_gpu_v2", "__gpu$xla.gpu.triton"))}
    for name in ("experts", "latent"):
        assert others[name].target != ops[name].target
        assert operations.part_of(others[name]) == operations.part_of(ops[name])
        assert operations.roofline_ms(others[name]) == operations.roofline_ms(ops[name])


@pytest.mark.parametrize(
    ("scope", "operands", "result", "part"),
    [
        ("blockwise_matmul", [FP8, SCALES, FP8, SCALES], (512, 512), ("matmuls", "512×512×256 FP8")),
        ("grouped_matmul_fp8", [SCALES, SCALES, FP8, FP8], (512, 512), ("matmuls", "experts 512×512×256 FP8")),
        ("grouped_weight_gradient_blockwise", [SCALES, FP8, SCALES, FP8, SCALES], (4, 512, 512), None),
        ("grouped_quantise", [SCALES, SCALES], (512, 256), ("norms and elementwise", "moe")),
    ],
)
def test_matmuls_in_fp8_are_known_by_the_names_of_their_kernels(scope, operands, result, part):
    """Beside the matrices they read scales and tables of tiles."""
    results = (hlo.Array("bf16", result),)
    call = f'custom_call_target="mosaic_gpu_v2", metadata={{op_name="jit(step)/jvp(moe)/{scope}/mpmd_map"}}'
    op = hlo.Op("call", "custom-call", results, tuple(operands), call, 0, frozenset(), 0)
    assert operations.part_of(op) == (part or ("matmuls", "experts 512×512×256 FP8"))
    if operations.is_matmul(op):
        assert operations.roofline_ms(op) == pytest.approx(2e3 * 512 * 512 * 256 / 1979e12)


@pytest.mark.parametrize(
    ("kind", "operand", "result", "ms"),
    [
        ("all-gather", 150, 600, 1),  # a GPU sends three of four parts of the whole array at 450 GB/s
        ("reduce-scatter", 600, 150, 1),
        ("all-reduce", 600, 600, 2),  # both
        ("all-to-all", 600, 600, 1),
        ("collective-broadcast", 600, 600, 1),
        ("collective-permute", 450, 450, 1),  # all of it
    ],
)
def test_the_roofline_of_each_collective_is_that_of_the_bytes_sent(kind, operand, result, ms):
    devices = "source_target_pairs={{0,1},{1,0}}" if kind == "collective-permute" else "replica_groups={{0,1,2,3}}"
    sizes = (hlo.Array("s8", (megabytes * 10**6,)) for megabytes in (result, operand))
    found, given = ((array,) for array in sizes)
    op = hlo.Op("x", kind, found, given, f"), {devices}", 0, frozenset(), 0)
    assert operations.part_of(op) == ("collectives", kind)
    assert operations.roofline_ms(op) == pytest.approx(ms)


@pytest.mark.parametrize(
    ("dtype", "precision", "flops"),
    [("bf16", "DEFAULT", 989e12), ("f32", "HIGHEST", 67e12), ("f32", "DEFAULT", 494e12)],
)
def test_the_roofline_of_a_matmul_depends_on_its_arrays_and_their_rounding(ops, dtype, precision, flops):
    operands = tuple(replace(array, dtype=dtype) for array in ops["matmul"].operands)
    attributes = f'{ops["matmul"].attributes} "precision_config":{{"operand_precision":["{precision}","{precision}"]}}'
    op = replace(ops["matmul"], operands=operands, attributes=attributes)
    assert operations.roofline_ms(op) == pytest.approx(2e3 * 10000 * 10000 * 9890 / flops)


def test_all_collectives_have_a_roofline_by_hand():
    [marks] = test_the_roofline_of_each_collective_is_that_of_the_bytes_sent.pytestmark
    assert {case[0] for case in marks.args[1]} == {*hlo.COLLECTIVES}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("ncclDevKernel_AllGather_RING_LL", ("all-gather",)),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", ("reduce-scatter",)),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", ("all-reduce",)),
        ("ncclDevKernel_SendRecv", ("collective-permute", "all-to-all")),
        ("MemcpyP2P", ("collective-permute", "all-to-all")),
        ("loop_add_fusion", ()),
    ],
)
def test_a_kernel_of_nccl_tells_which_operations_it_can_belong_to(name, kinds):
    assert operations.kinds_of_kernel(name) == kinds


def test_matmuls_of_the_optimizer_belong_to_it(ops):
    op = replace(ops["matmul"], attributes=ops["matmul"].attributes.replace("mlp", "optimizer"))
    assert op.scopes == ("_train_step", "optimizer", "dot_general")
    assert operations.part_of(op) == ("optimizer", "matmul 10000×10000×9890")
    op = replace(ops["sum"], attributes=ops["sum"].attributes.replace("norm", "optimizer"))
    assert operations.part_of(op) == ("optimizer", "update")


def test_the_scopes_of_parts_are_those_that_the_code_names():
    """But for those around whole parts of a model, in which other scopes count."""
    around = {"encoder", "image_embeddings", "image_features", "join", "patches", "projector"}
    texts = [file.read_text() for file in Path(megajax.__file__).parent.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'named_scope\("(\w+)"\)', text)} - around
    sublayers = {name for names in BUILT_IN_BLOCKS.values() for name in names}
    assert {*operations.SCOPES} == named | sublayers


def test_counts_of_a_module_are_one_line_a_kind(ops):
    lines = [" ".join(line.split()) for line in describe(ops.values(), {"temporary": 3 * 2**29})]
    assert lines == [
        "all-gather 1 572.2 MiB",
        "copy above 1 MiB 1 1.9 MiB 1 in loops",
        "cuBLASLt FP8 matmul 1",
        "cuBLASLt matmul 1",
        "cuDNN attention, backward 1",
        "mosaic_gpu_v2 mpmd_map 2",
        "while loop 1",
        "temporary memory 1.5 GiB",
    ]


@pytest.mark.parametrize(("kind", "name"), [("copy", "copy above 1 MiB"), ("convert", "conversion above 1 MiB")])
@pytest.mark.parametrize("rows", [2**18, 2**18 + 1])  # of 4 bytes
def test_large_copies_and_conversions_are_counted(kind, name, rows):
    lines = [f"  %p = s32[{rows}]{{0}} parameter(0)", f"  ROOT %x = f32[{rows}]{{0}} {kind}(%p)"]
    found = hlo.parse("\n".join([f"ENTRY %main (p: s32[{rows}]) -> f32[{rows}] {{", *lines, "}"]))
    assert [" ".join(line.split()) for line in describe(found, {})] == [f"{name} 1 1.0 MiB"] * (rows > 2**18)


# Opcodes of XLA: those that launch nothing, those that only move data, and others
SILENT = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id")
MOVING = ("copy", "transpose", "reshape", "slice", "dynamic-slice", "concatenate", "pad", "reverse")
OTHERS = ("add", "convert", "reduce", "dot", "gather", "sort", "broadcast", "all-reduce", "custom-call")


@pytest.mark.parametrize("kind", [*SILENT, *MOVING, *OTHERS])
def test_each_instruction_moves_computes_or_launches_nothing(kind):
    lines = ["  %p = f32[8,8]{1,0} parameter(0)", f"  ROOT %x = f32[8,8]{{1,0}} {kind}(%p)"]
    found = {op.name: op for op in hlo.parse("\n".join(["ENTRY %main (p: f32[8,8]) -> f32[8,8] {", *lines, "}"]))}
    assert ("x" in found) == (kind not in SILENT)
    if found:
        assert (found["x"].only_moves, found["x"].only_converts) == (kind in MOVING, kind == "convert")
    if kind in (*MOVING, "convert", "add"):
        named = {"convert": ("norms and elementwise", "conversions"), "add": ("norms and elementwise", "other")}
        assert operations.part_of(found["x"]) == named.get(kind, ("copies", "other"))


@pytest.mark.parametrize(
    ("operands", "results", "size"),
    [
        ("f32[4,8]{1,0}", "f32[16,8]{1,0}", 4 * 16 * 8),
        ("(f32[4,8]{1,0}, bf16[2,3]{1,0})", "(f32[16,8]{1,0}, bf16[8,3]{1,0})", 4 * 16 * 8 + 2 * 8 * 3),
    ],
)
def test_the_result_of_a_start_is_the_second_part_of_its_type(operands, results, size):
    lines = ["  %p = f32[4,8]{1,0} parameter(0)", f"  ROOT %x = ({operands}, {results}) all-gather-start(%p)"]
    [op] = hlo.parse("\n".join(["ENTRY %main (p: f32[4,8]) -> f32[16,8] {", *lines, "}"]))
    assert (op.kind, op.operand_bytes, op.result_bytes) == ("all-gather", 4 * 4 * 8, size)


# Bytes of a table are 3200, of a part of it 128, of the indices 16.
TRAFFIC = {
    "slice(%table)": 128 + 128,
    "dynamic-slice(%table, %rows)": 128 + 16 + 128,
    "gather(%table, %rows)": 128 + 16 + 128,
    "dynamic-update-slice(%table, %part, %rows)": 128 + 16 + 128,
    "scatter(%table, %rows, %part)": 16 + 128 + 128,
    "gather(%part, %rows)": 128 + 16 + 128,
    "gather(%flags, %rows)": 4 + 16 + 4,
    "negate(%table)": 3200 + 3200,
}


@pytest.mark.parametrize("call", TRAFFIC)
def test_an_operation_on_a_part_of_an_array_moves_the_part_alone(call):
    result = "f32[100,8]" if "update" in call or call.startswith(("scatter", "negate")) else "f32[4,8]"
    result = "pred[4]" if "flags" in call else result
    lines = [
        "ENTRY %main (t: f32[100,8], r: s32[4], p: f32[4,8]) -> f32[4,8] {",
        "  %table = f32[100,8]{1,0} parameter(0)",
        "  %rows = s32[4]{0} parameter(1)",
        "  %part = f32[4,8]{1,0} parameter(2)",
        "  %flags = pred[100]{0} parameter(3)",
        f"  ROOT %x = {result}{{1,0}} {call}",
        "}",
    ]
    [op] = hlo.parse("\n".join(lines))
    assert op.traffic == TRAFFIC[call]


# XLA's names of calls: in its sources, cublas_cudnn.cc
LIBRARY_CALLS = {"__cublas$lt$matmul": "cuBLASLt matmul", "__cublas$lt$matmul$f8": "cuBLASLt FP8 matmul"}
LIBRARY_CALLS |= {"__cublas$gemm": "cuBLAS matmul", "__cudnn$blockScaledDot": "cuDNN block-scaled matmul"}
LIBRARY_CALLS |= {"__cudnn$fmhaSoftmax": "cuDNN attention, forward"}
LIBRARY_CALLS |= {"__cudnn$fmhaSoftmaxBackward": "cuDNN attention, backward"}


def test_each_call_of_a_library_is_counted_by_its_name(ops):
    calls = [
        replace(ops["matmul"], attributes=f'custom_call_target="{target}"') for target in (*LIBRARY_CALLS, "__other")
    ]
    found = [" ".join(line.split()) for line in describe(calls, {})]
    assert sorted(found) == sorted([*(f"{name} 1" for name in LIBRARY_CALLS.values()), "__other 1"])


AXES = {"pipeline": 1, "data": 2, "fsdp": 1, "expert": 1, "context": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups=mesh['data'=3,'context'=2,'tensor'=4] {'tensor','data'}", 12),
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[2,4]<=[8]", 4),
        ("source_target_pairs={{0,1},{1,0}}", 1),
    ],
)
def test_the_group_of_a_collective_has_the_devices_of_all_its_axes(groups, size):
    op = hlo.Op("gather", "all-gather", (), (), f"), {groups}, dimensions={{0}}", 0, frozenset(), 0)
    assert op.group_size == size


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups=mesh['data'=2,'context'=2,'tensor'=2] {'tensor','data'}", ("data", "tensor")),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("data", "context")),
        ("replica_groups={}", ("data", "context", "tensor")),
        ("replica_groups=[4,2]<=[8]", ("tensor",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("context",)),
        ("source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}", ("context",)),
        ("replica_groups={{0,8}}", ()),  # of more devices than the mesh has
    ],
)
def test_a_collective_is_one_of_the_axes_along_which_its_groups_differ(groups, axes):
    op = hlo.Op("gather", "all-gather", (), (), f"), {groups}, dimensions={{0}}", 0, frozenset(), 0)
    assert op.axes_of(AXES) == axes


# Names in traces of H100s and H200s, each with one part of KERNELS only
OF_KERNELS = {
    "collectives": (
        *("ncclDevKernel_AllGather_RING_LL", "MemcpyP2P", "void stream_executor::gpu::AllReduceKernelImpl<float, 0>"),
        "void stream_executor::gpu::MultiGpuBarrierKernelImpl<1>",
    ),
    "attention": (
        *("cudnn_generated_fort_native_sdpa_sm90_fprop_f16", "cudnn_generated_fort_native_sdpa_sm80_bprop_f16"),
        *("fmha_v2_bf16_128_S_40_sm90", "flash_fwd_splitkv_kernel", "ranged_attention_keys"),
    ),
    "head and loss": ("cross_entropy_backward",),
    "matmuls": (
        *("nvjet_sm90_tst_128x160_v_bz_NNT", "sm80_xmma_gemm_bf16bf16_bf16f32_f32_nn_n"),
        *("cutlass_80_wmma_tensorop_bf16_s161616", "grouped_matmul_fp8", "grouped_weight_gradient", "blockwise_matmul"),
    ),
    "copies": ("MemcpyD2D", "MemsetD", "input_transpose_fusion", "wrapped_copy"),
    "norms and elementwise": ("loop_add_fusion", "grouped_quantise", "grouped_activation_gradient"),
}


def test_a_kernel_without_an_operation_has_the_group_of_its_name():
    found = {name: operations.group_of_kernel(name) for names in OF_KERNELS.values() for name in names}
    assert found == {name: group for group, names in OF_KERNELS.items() for name in names}
    names = [name.lower() for name in found]
    for group, parts in operations.KERNELS:
        for part in parts:
            others = [other for _, members in operations.KERNELS for other in members if other not in part]
            only = [name for name in names if part in name and not any(other in name for other in others)]
            assert only, f"{group}: no name above has {part} alone"


def test_the_roofline_of_a_window_counts_the_pairs_within_it(ops):
    """Of 1000 queries the first 100 see 1 to 100 keys, the others 100: 95,050 pairs, by the integral 95,000."""
    window = ops["attend"].attributes.replace('"sliding_window_length": 0', '"sliding_window_length": 100')
    flops = 2 * 5 * 989 * 95_000 * (150 + 50) * 2  # keys and values, backward
    assert operations.roofline_ms(replace(ops["attend"], attributes=window)) == pytest.approx(1e3 * flops / 989e12)


def test_attention_without_a_library_is_what_is_in_its_scope():
    def part(scope: str, kind: str) -> tuple[str, str]:
        metadata = f'metadata={{op_name="jit(_train_step)/jvp(attention)/{scope}dot_general"}}'
        return operations.part_of(hlo.Op("x", kind, (), (), metadata, 0, frozenset(), 0))

    assert part("core_attention/", "dot") == ("attention", "matmuls")
    assert part("core_attention/", "exponential") == ("attention", "elementwise")
    assert part("", "dot") == ("matmuls", "attention")


@pytest.mark.parametrize("kind", hlo.COLLECTIVES)
def test_bytes_between_hosts_are_those_of_the_rings_of_the_groups_on_several_hosts(ops, kind):
    """Two hosts of eight. Over `data` eight groups of two have a device on both; over `fsdp` each group is in one."""
    part, whole = (hlo.Array("bf16", (n,)) for n in (150_000_000, 300_000_000))
    operand, result = {"all-gather": (part, whole), "reduce-scatter": (whole, part)}.get(kind, (whole, whole))
    op = replace(ops["gather-start"], kind=kind, operands=(operand,), results=(result,))
    mesh = "replica_groups=mesh['data'=2, 'fsdp'=8] {{'{}'}}"
    listed = {"data": "replica_groups=[8,2]<=[2,8]T(1,0)", "fsdp": "replica_groups=[2,8]<=[16]"}
    passes = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}.get(kind, 0)
    for axis, expected in (("data", 8 * passes * 6e8 / 2), ("fsdp", 0)):
        for attributes in (mesh.format(axis), listed[axis]):
            assert replace(op, attributes=attributes).between_hosts(8) == expected, attributes


def test_arrays_have_the_bytes_of_their_dtypes():
    sizes = {"pred": 1, "s8": 1, "f8e4m3fn": 1, "u16": 2, "bf16": 2, "s32": 4, "f32": 4, "s64": 8, "c64": 8}
    assert {dtype: hlo.Array(dtype, (3, 5)).bytes for dtype in sizes} == {d: 15 * size for d, size in sizes.items()}
    assert hlo.Array("s4", (3, 6)).bytes == 9
