"""The benchmark's parts: a breakdown of a small trace, computed by hand, and facts from the compiled text."""

from pathlib import Path

import breakdown
import hlo
import hlo_counts
import pytest

from megajax import bench

# Made up too. Its sizes make rooflines round numbers of ms: a matmul's 2·M·N·K is 2 ms · 989 TFLOP/s, and so on.
MODULE = (Path(__file__).parent / "data/small_step.hlo").read_text()
STEPS = 2


def trace_events() -> list[dict]:
    """Two steps on two GPUs, 12 ms apart and 10 ms long; the matmul of GPU 1 takes longer than that of GPU 0."""
    events = [{"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "/host:CPU"}}]
    for gpu, matmul in ((0, 4), (1, 5)):
        events += [
            {"ph": "M", "name": "process_name", "pid": gpu + 1, "args": {"name": f"/device:GPU:{gpu}"}},
            {"ph": "M", "name": "thread_name", "pid": gpu + 1, "tid": 1, "args": {"name": "Stream #1(Compute)"}},
            {"ph": "M", "name": "thread_name", "pid": gpu + 1, "tid": 2, "args": {"name": "XLA Ops"}},
        ]
        for begin in (0, 12):
            for name, op, start, ms in (
                ("nvjet_tst", "matmul", 0, matmul),
                ("ncclDevKernel_AllGather_RING_LL", "gather-start", 3, 3),
                ("sdpa_bprop", "attend", 6, 2),
                ("convert_dq", "attend", 8, 0.5),
                ("convert_dq", "attend", 8.5, 0.5),
                ("loop_add_fusion", "sum", 9, 1),
            ):
                args = {"hlo_op": op, "hlo_module": "jit__train_step"}
                event = {"ph": "X", "name": name, "pid": gpu + 1, "args": args}
                times = {"ts": 1e3 * (begin + start), "dur": 1e3 * ms}
                events += [{**event, **times, "tid": 1}, {**event, **times, "tid": 2}]
    # A copy of another module, of the same name as an operation of this one.
    args = {"hlo_op": "sum", "hlo_module": "jit_other"}
    events.append({"ph": "X", "name": "copy", "pid": 1, "tid": 1, "ts": 20e3, "dur": 2e3, "args": args})
    return events


@pytest.fixture
def ops() -> dict[str, hlo.Op]:
    return {op.name: op for op in hlo.parse(MODULE)}


@pytest.fixture
def kernels() -> list[breakdown.Kernel]:
    return breakdown.read_trace(trace_events(), "jit__train_step")


def test_operations_are_read_with_their_loops_shapes_and_traffic(ops):
    assert list(ops) == ["matmul", "gather-start", "attend", "turned", "loop", "on_a_slice", "experts", "latent", "sum"]
    assert {name: op.loops for name, op in ops.items() if op.loops} == {"turned": 1}
    gather, turned = ops["gather-start"], ops["turned"]
    assert (gather.kind, gather.group_size, gather.operand_bytes, gather.result_bytes) == ("all-gather", 4, 15e7, 6e8)
    assert turned.only_moves and not ops["sum"].only_moves
    assert turned.traffic == 2 * 4 * 500_000 + 4, "an eighth of the stack is read"
    assert ops["sum"].traffic == 3 * 1.6e9
    assert ops["matmul"].scopes == ("_train_step", "mlp", "dot_general")


def test_a_library_call_inside_a_fusion_is_the_call(ops):
    call = ops["on_a_slice"]
    assert (call.kind, call.target) == ("custom-call", "__cublas$lt$matmul$f8")
    assert breakdown.part_of(call) == ("head and loss", "matmul 200×300×100 FP8")
    assert breakdown.roofline_ms(call) == pytest.approx(2e3 * 200 * 300 * 100 / 1979e12)


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
    assert breakdown.part_of(ops[name]) == part
    assert breakdown.roofline_ms(ops[name]) == pytest.approx(ms)


def test_kernels_of_streams_alone_are_read(kernels):
    assert len(kernels) == 2 * STEPS * 6 + 1
    assert [kernel.name for kernel in kernels if not kernel.op] == ["copy"]


def test_a_library_call_of_several_kernels_ran_as_often_as_the_rarest(kernels, ops):
    attention = breakdown.parts(kernels, ops, STEPS)["attention", "backward"]
    assert (attention.kernels, attention.ms, attention.roofline) == pytest.approx((3, 3, 2))


def test_exposed_communication_and_idle_time(kernels, ops):
    own = [[kernel for kernel in kernels if kernel.gpu == gpu and kernel.op] for gpu in (0, 1)]
    first, second = (breakdown.timeline(kernels, ops, STEPS) for kernels in own)
    assert first == breakdown.Timeline(step=11, compute=8, communication=3, exposed=2, idle=1)
    assert second == breakdown.Timeline(step=11, compute=9, communication=3, exposed=1, idle=1)


def test_the_report_has_a_row_for_each_part_and_a_line_for_each_gpu(kernels, ops):
    lines = breakdown.report([kernel for kernel in kernels if kernel.op], ops.values(), STEPS).splitlines()
    assert lines[0] == "| part | kernels a step | ms a step | share | roofline ms | reached | slowest GPU |"
    assert lines[2:6] == [
        "| attention | 3 | 3.00 | 27.3% | 2.00 | 67% | 3.00 (GPU 0) |",
        "| matmuls | 1 | 4.50 | 40.9% | 2.00 | 44% | 5.00 (GPU 1) |",
        "| norms and elementwise | 1 | 1.00 | 9.1% | 1.00 | 100% | 1.00 (GPU 0) |",
        "| collectives | 1 | 3.00 | 27.3% | 1.00 | 33% | 3.00 (GPU 0) |",
    ]
    assert lines[7] == ("GPU 0 (slowest): 11.0 ms a step: compute 8.0, communication 3.0 (exposed 2.0), idle 1.0")
    assert lines[8].startswith("GPU 1 (busiest): 11.0 ms a step: compute 9.0")


def test_without_gpus_a_sentence_says_that_there_is_no_breakdown(ops):
    assert "NVIDIA GPUs" in breakdown.report([], ops.values(), STEPS)


def test_counts_of_a_module_are_one_line_a_kind(ops):
    lines = [" ".join(line.split()) for line in hlo_counts.describe(ops.values(), {"temporary": 3 * 2**29})]
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


def test_configs_are_found_by_path_and_by_name(tmp_path):
    named = bench.synthetic_config("llama3_8b_l8", ["run.steps=3"], str(tmp_path))
    assert (named.run.name, named.run.steps, named.data.kind) == ("llama3_8b_l8", 3, "synthetic")
    (tmp_path / "mine.yaml").write_text(named.to_yaml())
    assert bench.synthetic_config(str(tmp_path / "mine.yaml"), [], str(tmp_path)) == named
    assert bench.split_runs(["a", "b", "x=1", "y=2"]) == [["a"], ["b", "x=1", "y=2"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["llama3_8b_l9"], "there is no config llama3_8b_l9 (the command line): did you mean llama3_8b_l8?"),
        (["nowhere/x.yaml"], "there is no config nowhere/x.yaml (the command line): give the path of a YAML file"),
        (["run.steps=3", "llama3_1b"], "no config precedes the override run.steps=3 (the command line)"),
        (["llama3_1b", "model.num_layer=3"], "did you mean model.num_layers?"),
        ([], "python -m megajax.bench --help lists the arguments."),
    ],
)
def test_mistakes_are_a_sentence_before_anything_runs(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith("megajax: error: ") and sentence in printed.err
