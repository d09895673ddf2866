"""Traces of made-up GPUs: exposed time, waiting, gaps and bubbles worked out by hand."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.profiler
import pytest
from made_up_trace import Event, space

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.step.pipeline.schedules import make_schedule
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import H200
from megajax.tools.profile import hlo, parts, timeline, trace
from megajax.tools.profile.prediction import joined, predict
from megajax.tools.profile.report import CURES, device_lines, largest_gap, notes, schedule_of, table

MODULE = (Path(__file__).parents[1] / "data/small_step.hlo").read_text()
STEP, STEPS = "jit__train_step", 2
SIZES = {"pipeline": 1, "data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}
# The rows of a step in their order, work first, each with what its cure alone names
ROWS = {
    "matmuls": "megajax preflight shows a GPU whose matmuls are slow",
    "attention": "kernels.attention",
    "head and loss": "kernels.loss_chunk_tokens",
    "norms and elementwise": "conversions",
    "optimizer": "mesh.fsdp",
    "waiting for the slowest device": "megajax preflight shows slow GPUs",
    "pipeline bubble": "pipeline.schedule=zero_bubble",
    "host gaps": "data loader",
    "idle between kernels": "Nsight",
    "other programs": "evaluation",
}


def two_gpus() -> jax.profiler.ProfileData:
    """Two steps on two GPUs, 12 ms apart and 10 ms long; the matmul of GPU 1 takes longer than that of GPU 0.

    GPU 0 begins its gather before its matmul ends, and waits for GPU 1, whose gather begins after its matmul.
    The host launches the second step 1.5 ms after the first one has ended.
    """
    planes: dict[str, dict[str, Sequence[Event]]] = {}
    launches = []
    for gpu, matmul, gather in ((0, 4, 3), (1, 5, 1)):
        events = []
        for begin in (0, 12):
            for name, op, start, ms in (
                ("nvjet_tst", "matmul", 0, matmul),
                ("ncclDevKernel_AllGather_RING_LL", "gather-start", 6 - gather, gather),
                ("sdpa_bprop", "attend", 6, 2),
                ("convert_dq", "attend", 8, 0.5),
                ("convert_dq", "attend", 8.5, 0.5),
                ("loop_add_fusion", "sum", 9, 1),
            ):
                call = 100 * gpu + len(events)
                stats = {"hlo_op": op, "hlo_module": STEP, "correlation_id": call}
                events.append(Event(name, begin + start, begin + start + ms, stats))
                launched = 11.5 if begin else 0
                launches.append(
                    Event("cuLaunchKernel", launched - 0.1 if begin else 0, launched, {"correlation_id": call})
                )
        planes[f"/device:GPU:{gpu}"] = {"Stream #1(Compute)": events, "XLA Ops": events[:1]}
    file = space({**planes, "/host:CPU": {"python": launches}})
    return jax.profiler.ProfileData.from_serialized_xspace(file)


@pytest.fixture
def reading() -> timeline.Reading:
    return timeline.Reading(STEP, trace.named(hlo.parse(MODULE)), SIZES)


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[trace.Kernel]]:
    return trace.by_device(trace.read_kernels(two_gpus()))


def test_devices_are_in_the_order_of_their_numbers():
    names = [f"GPU {number}" for number in range(12)]
    found = trace.by_device(trace.Kernel(name, "add", "", "", 0.0, 1.0) for name in sorted(names))
    assert [*found] == names


def test_of_several_traces_the_newest_of_each_host_is_read(tmp_path):
    """By their times: a clock that was set back, or a folder that was copied, has other names."""
    written = [("2026_02", "b"), ("2026_03", "a"), ("2026_01", "a")]
    for seconds, (folder, host) in enumerate(written, 1000):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / f"{host}.xplane.pb"
        path.touch()
        os.utime(path, (seconds, seconds))
    assert trace.newest(tmp_path) == [tmp_path / "2026_01/a.xplane.pb", tmp_path / "2026_02/b.xplane.pb"]


def test_a_step_is_divided_into_work_exposed_collectives_and_gaps(kernels, reading):
    """GPU 0's gather of 3 ms waits for 2, beside a matmul for 1 of them. Half of the 11 ms each is a step."""
    assert {device: len(own) for device, own in kernels.items()} == {"GPU 0": 12, "GPU 1": 12}
    shared = {"attention": 3, "norms and elementwise": 1, "host gaps": 0.75, "idle between kernels": 0.25}
    measured = timeline.measure(kernels, reading, STEPS)
    gathered, waited = {"collectives over fsdp": 1}, {"waiting in collectives over fsdp": 1}
    assert measured.devices["GPU 0"] == pytest.approx({**shared, "matmuls": 4, **gathered, **waited})
    assert measured.devices["GPU 1"] == pytest.approx({**shared, "matmuls": 5, **gathered})
    mean = {**shared, "matmuls": 4.5, "collectives over fsdp": 1, "waiting for the slowest device": 0.5}
    assert measured.mean == pytest.approx(mean)
    assert measured.step == pytest.approx(11)
    # Of each GPU its step, what it computes, communicates, waits for the other GPU and is idle, of that for the host.
    figures = [re.findall(r"\d+\.\d+", line) for line in device_lines(measured)]
    assert figures == [
        ["11.00", "8.00", "1.00", "1.00", "1.00", "0.75"],
        ["11.00", "9.00", "1.00", "0.00", "1.00", "0.75"],
    ]


def test_of_collectives_that_devices_did_not_run_as_often_no_time_is_waiting(kernels, reading):
    transfers = timeline.transfer_times(kernels, reading)
    assert sorted(transfers.values()) == pytest.approx([1, 1, 1, 1])
    one_less = {**kernels, "GPU 1": [k for k in kernels["GPU 1"] if k.op != "gather-start" or k.start < 10]}
    assert timeline.transfer_times(one_less, reading) == {}
    of_another = {
        device: [replace(k, op="other-start") for k in own if k.op == "gather-start"] for device, own in kernels.items()
    }
    more = kernels | {"GPU 0": [*kernels["GPU 0"], *of_another["GPU 0"]]}
    assert timeline.transfer_times(more, reading) == transfers, "its kernels have the same name"
    assert timeline.transfer_times({"GPU 0": kernels["GPU 0"]}, reading).keys() == {
        kernel for kernel in kernels["GPU 0"] if kernel.op == "gather-start"
    }


def test_a_collective_that_computation_interrupts_waits_before_it_transfers(reading):
    """Of 10 ms it transfers in the last 4; matmuls run in the fourth and in the eighth of them."""

    def kernel(name: str, op: str, start: float, end: float) -> trace.Kernel:
        return trace.Kernel("GPU 0", name, op, STEP, start, end)

    gather = kernel("ncclDevKernel_AllGather_RING_LL", "gather-start", 0, 10)
    own = [gather, kernel("nvjet_tst", "matmul", 3, 4), kernel("nvjet_tst", "matmul", 7, 8)]
    assert timeline.rows_of(own, reading, {gather: 4.0}) == {
        "matmuls": 2,
        "waiting in collectives over fsdp": 3 + 2,
        "collectives over fsdp": 1 + 2,
    }


def test_the_table_has_each_rows_share_of_the_step_and_difference_from_the_prediction():
    measured = timeline.Measured({"matmuls": 6.0, "collectives over tensor": 2.0}, {})
    predicted = {"matmuls": 5.0, "optimizer": 1.5}
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(measured, predicted, H200)[2:]]
    assert cells == [
        ["matmuls", "6.00", "75.0%", "5.00", "+1.00"],
        ["optimizer", "0.00", "0.0%", "1.50", "-1.50"],
        ["exposed collectives over tensor", "2.00", "25.0%", "0.00", "+2.00"],
        ["step", "8.00", "100.0%", "6.50", "+1.50"],
    ]
    every = timeline.Measured(dict.fromkeys([*ROWS, "collectives over fsdp"], 1.0), {})
    shown = [line.split("|")[1].strip() for line in table(every, None, None)[2:]]
    work, rest = [*ROWS][:5], [*ROWS][5:]
    assert shown == [*work, "exposed collectives over fsdp", *rest, "step"]


def test_kernels_without_an_operation_or_of_other_programs_have_rows_of_their_own(reading):
    def kernel(name: str, start: float, end: float, **names: str) -> trace.Kernel:
        return trace.Kernel("GPU 0", name, **{"op": "", "module": "", **names}, start=start, end=end)

    own = [
        kernel("nvjet_tst", 0, 4),
        kernel("loop", 0, 20, op="loop", module=STEP),  # contains others
        kernel("ncclDevKernel_SendRecv", 2, 7),
        kernel("copy", 8, 9, op="sum", module="jit_other"),  # of the same name as an operation of this one
        kernel("slow", 9, 12, op="sum", module=STEP),
        kernel("inside", 10, 11, op="matmul", module=STEP),  # began last
    ]
    assert timeline.rows_of(own, reading) == {
        "matmuls": 4 + 1,
        "collectives over axes that the trace does not name": 3,
        "idle between kernels": 1,
        "other programs": 1,
        "norms and elementwise": 2,
    }
    for kind in ("while", "call", "conditional"):  # as XLA names those that contain others
        loop = {"loop": replace(reading.ops["loop"], kind=kind)}
        assert timeline.rows_of(own[1:2], replace(reading, ops=loop)) == {}, kind
    reduction = kernel("ncclDevKernel_AllReduce_Sum_f32", 0, 3, module="jit_other")
    assert timeline.rows_of([reduction], reading, {reduction: 1.0}) == {"other programs": 3}
    whole = 4 + 20 + 5 + 3 + 1
    shares = timeline.unnamed({"GPU 0": own}, reading)
    assert [*shares.items()] == [("ncclDevKernel_SendRecv", 5 / whole), ("nvjet_tst", 4 / whole)]


def test_the_host_holds_a_device_back_only_where_it_is_late(reading):
    """Gaps of 5 ms: launched before the gap, within it, after its end by the clock of another processor, not known."""
    own, start = [], 0.0
    for launched in (None, start + 10 - 4, 25 + 2, 40 + 9, None):
        own.append(trace.Kernel("GPU 0", "nvjet_tst", "matmul", STEP, start, start + 10, launched))
        start += 15
    assert timeline.rows_of(own, reading) == {"matmuls": 50, "host gaps": 0 + 2 + 5, "idle between kernels": 5 + 3 + 5}


def test_kernels_of_cpus_are_launched_by_the_call_that_runs_their_program():
    """The first event of the host with the number of the run."""
    stats = {"hlo_op": "sum", "hlo_module": STEP, "device_ordinal": 3, "run_id": 7}
    calls = [Event(f"call {start}", start, 9, {"run_id": 7}) for start in (2, 1, 3)] + [Event("sum", 4, 5, stats)]
    file = space({"/host:CPU": {"python": [Event("other", 0, 9, {"run_id": 6}), *calls]}})
    [found] = trace.read_kernels(jax.profiler.ProfileData.from_serialized_xspace(file))
    assert found == trace.Kernel("CPU 3", "sum", "sum", STEP, 4, 5, 1)


def test_a_collective_without_an_operation_has_the_axes_that_all_of_its_kind_have(reading):
    """The module gathers over fsdp only and reduces nothing; with a gather over data too the axes are not known."""

    def row(name: str, reading: timeline.Reading) -> str:
        return reading.row(trace.Kernel("GPU 0", name, op="", module="", start=0, end=1))

    gather = reading.ops["gather-start"]
    assert row("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", reading) == "collectives over fsdp"
    assert row("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", reading).endswith("does not name")
    over_data = replace(gather, name="other-start", attributes=gather.attributes.replace("{'fsdp'}", "{'data'}"))
    several = timeline.Reading(STEP, {**reading.ops, "other-start": over_data}, SIZES)
    assert row("ncclDevKernel_AllGather_RING_LL", several).endswith("does not name")
    permuted = replace(gather, kind="collective-permute")
    assert row("MemcpyP2P", timeline.Reading(STEP, {"send": permuted}, SIZES)) == "collectives over fsdp"


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "rounds", "share"),
    [
        # The idle time of docs/pipeline.md, with F = I = W, beside the useful M (F + I + W).
        ("1f1b", 2, 4, 1, 1 / 5),
        ("gpipe", 4, 8, 1, 3 / 11),
        ("1f1b", 4, 8, 2, (3 / 2) / (8 + 3 / 2)),
        ("zero_bubble", 4, 8, 1, 2 * 3 / (3 * 8 + 2 * 3)),
    ],
)
def test_the_bubble_is_the_schedules_share_of_the_layers(kind, stages, microbatches, rounds, share):
    schedule = make_schedule(kind, stages, microbatches, rounds)
    assert timeline.idle_share(schedule) == pytest.approx(share)
    rows = {"matmuls": 60.0, "attention": 30.0, "head and loss": 5.0}
    found = timeline.without_bubble(rows, schedule)
    assert found == pytest.approx(
        {
            "matmuls": 60 * (1 - share),
            "attention": 30 * (1 - share),
            "head and loss": 5,
            "pipeline bubble": 90 * share,
        }
    )


def test_with_one_operation_a_tick_the_bubble_is_a_part_of_the_waits_for_other_stages():
    """Two stages and four microbatches: idle for a fourth of the layers' time, but not for longer than they wait."""
    schedule = make_schedule("1f1b", 2, 4, parts_per_backward=2)
    rows = {"matmuls": 60.0, "attention": 20.0, "collectives over pipeline": 25.0, "collectives over fsdp": 3.0}
    assert timeline.without_bubble(rows, schedule) == pytest.approx(
        rows | {"collectives over pipeline": 5.0, "pipeline bubble": 20.0}
    )
    waited = rows | {"collectives over pipeline": 10.0, "waiting in collectives over pipeline": 15.0}
    assert timeline.without_bubble(waited, schedule) == pytest.approx(
        waited
        | {"collectives over pipeline": 2.0, "waiting in collectives over pipeline": 3.0, "pipeline bubble": 20.0}
    )
    few = rows | {"collectives over pipeline": 15.0}
    assert timeline.without_bubble(few, schedule) == pytest.approx(
        few | {"collectives over pipeline": 0.0, "pipeline bubble": 15.0}
    )


@pytest.mark.parametrize(
    ("overrides", "waits", "bubble"),
    [
        ([], 5.0, 20.0),  # one operation a tick, as above
        (["remat.policy=full"], 25.0, 16.0),  # in lockstep a fifth of the layers' rows
        (["pipeline.virtual_stages=2"], 25.0, 80 / 9),
        (["pipeline.schedule=gpipe"], 25.0, 16.0),
        (["pipeline.schedule=zero_bubble"], 25.0, 80 * 2 / 14),
        (["mesh.pipeline=1"], 25.0, 0.0),
    ],
)
def test_the_bubble_of_a_trace_is_that_of_the_schedule_that_its_run_has(overrides, waits, bubble):
    """Two stages, four microbatches: idle for the time of 1 beside them; with virtual stages 1 / 2, deferred 2 / 3."""
    common = ["mesh.pipeline=2", "mesh.data=-1", "batch.num_microbatches=4", *overrides]
    config = load_config("llama3_8b_l16_pipeline", common)
    traced = trace.Trace(config, {}, "", {}, STEPS, 2, "NVIDIA H200")
    rows = {"matmuls": 60.0, "attention": 20.0, "collectives over pipeline": 25.0}
    found = timeline.without_bubble(rows, schedule_of(traced, check_mesh(config, 2)))
    assert found.get("pipeline bubble", 0.0) == pytest.approx(bubble)
    assert found["collectives over pipeline"] == pytest.approx(waits)
    assert sum(found.values()) == pytest.approx(105)


def test_the_parts_have_rooflines_and_a_call_of_several_kernels_counts_once(kernels, reading):
    attention = parts.parts(kernels, reading, STEPS)["attention", "backward"]
    assert (attention.kernels, attention.ms, attention.roofline) == pytest.approx((3, 3, 2))
    lines = parts.table(kernels, reading, STEPS, step=11)
    assert lines[2:] == [
        "| attention | 3 | 3.00 | 27.3% | 2.00 | 67% | 3.00 (GPU 0) |",
        "| matmuls | 1 | 4.50 | 40.9% | 2.00 | 44% | 5.00 (GPU 1) |",
        "| norms and elementwise | 1 | 1.00 | 9.1% | 1.00 | 100% | 1.00 (GPU 0) |",
        "| collectives | 1 | 2.00 | 18.2% | 1.00 | 50% | 3.00 (GPU 0) |",
    ]
    assert lines[0] == "| part | kernels a step | ms a step | share | roofline ms | reached | slowest device |"
    groups = {"nccl": "collectives", "fprop": "attention", "gemm": "matmuls", "memset": "copies", "add": "norms"}
    groups |= {"cross_entropy": "head and loss", "update": "optimizer"}
    own = {"GPU 0": [replace(kernels["GPU 0"][0], name=name, op="") for name in groups if name != "update"]}
    own["GPU 0"].append(replace(kernels["GPU 0"][0], op="update"))
    update = replace(reading.ops["sum"], attributes=reading.ops["sum"].attributes.replace("norm", "optimizer"))
    named = replace(reading, ops={**reading.ops, "update": update})
    shown = [line.split("|")[1] for line in parts.table(own, named, 1, step=1)[2:]]
    assert [next(name for name in groups.values() if name in row) for row in shown] == [
        *("attention", "matmuls", "head and loss", "norms", "optimizer", "copies", "collectives")
    ]
    longest = parts.operations(kernels, reading, STEPS, 1)
    assert longest[0] == "| hlo_op | part | scope | ms a step |"
    assert longest[2:] == ["| matmul | matmuls, 10000×10000×9890 | mlp | 4.50 |"]


def test_each_note_is_about_what_its_trace_has(kernels, reading):
    batch = SimpleNamespace(schedule=None, global_size=8)
    gpus = {"kernels": kernels, "device_kind": "NVIDIA H200", "config": SimpleNamespace(batch=batch)}
    scheduled = SimpleNamespace(batch=SimpleNamespace(schedule="0: 4, 1M: 8", global_size=8))
    without_launches = {"GPU 0": [replace(kernel, launched=None) for kernel in kernels["GPU 0"]]}
    pipeline = replace(reading, sizes=SIZES | {"pipeline": 2})

    def found(read=reading, rates=H200, **changed) -> list[str]:
        traced: Any = SimpleNamespace(**gpus | changed)
        return [" ".join(note.split()[:3]) for note in notes(traced, read, rates)]

    assert found() == []
    assert found(pipeline) == ["Stages of a"]
    assert found(rates=None) == ["The planner has"]
    assert found(device_kind="cpu") == ["Virtual CPU devices"]
    assert found(config=scheduled) == ["The prediction and"]
    assert found(kernels=without_launches) == ["The trace has"]


def test_the_largest_gap_is_the_one_above_the_prediction_or_without_it_the_largest_loss():
    measured = timeline.Measured({"matmuls": 70.0, "optimizer": 10.0, "collectives over tensor": 20.0}, {})
    assert largest_gap(measured, None).startswith(
        "The largest gap: exposed collectives over tensor (20.00 ms, 20.0% of the step): no computation hides them:"
    )
    predicted = {"matmuls": 69.0, "optimizer": 4.0, "collectives over tensor": 19.0}
    assert largest_gap(measured, predicted).startswith(
        "The largest gap: optimizer (10.00 ms in place of 4.00, 6.0% of the step): "
    )
    assert largest_gap(measured, measured.mean).startswith("No gap: ")
    assert CURES.keys() == ROWS.keys()
    for row, named in ROWS.items():
        assert named in largest_gap(timeline.Measured({row: 10.0}, {}), {}).partition("): ")[2], row


def test_of_many_devices_those_that_compute_longest_and_shortest_have_lines():
    """Device n of twelve computes n ms, communicates 2 ms, and is idle for 1 ms, half of it because of the host."""
    gaps = {"host gaps": 0.5, "idle between kernels": 0.5}
    devices = {
        f"GPU {n}": {"matmuls": n - 0.5, "other programs": 0.5, "collectives over data": 2.0} | gaps
        for n in (5, 3, 12, 1, 7, 9, 2, 11, 4, 6, 8, 10)
    }
    first, *lines = device_lines(timeline.Measured({}, devices))
    assert first == "Of 12 devices, those that compute longest and shortest:"
    assert [line.partition(":")[0] for line in lines] == [f"GPU {n}" for n in (12, 11, 10, 9, 4, 3, 2, 1)]
    rest = "exposed collectives 2.00, waiting in them 0.00, idle 1.00 (host gaps 0.50)"
    assert lines[0] == f"GPU 12: 15.00 ms a step: computing 12.00, {rest}"
    few = dict(list(devices.items())[:8])
    assert [line.partition(":")[0] for line in device_lines(timeline.Measured({}, few))] == [*few]


def test_a_prediction_for_one_axis_counts_in_a_row_of_several_axes_if_it_has_none_of_its_own():
    predicted = {
        "matmuls": 1.0,
        "collectives over data": 2.0,
        "collectives over fsdp": 3.0,
        "collectives over tensor": 4.0,
    }
    rows = joined(predicted, ["matmuls", "collectives over data and fsdp", "collectives over fsdp"])
    assert rows == {
        "matmuls": 1,
        "collectives over data and fsdp": 2,
        "collectives over fsdp": 3,
        "collectives over tensor": 4,
    }


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama3_8b_l16_pipeline", ["mesh.pipeline=2", "mesh.tensor=2", "remat.policy=full"]),
        ("mixtral_l2", ["mesh.data=1", "mesh.expert=4", "batch.global_size=16"]),
    ],
)
def test_the_rows_of_the_prediction_add_up_to_the_planners_time(name, overrides):
    config = load_config(name, overrides)
    rows, time = predict(config, 4, H200), Candidate.of(config, check_mesh(config, 4)).time
    assert sum(rows.values()) == pytest.approx(1e3 * time.total)
    # A layer's forward pass, which is computed again, is a third of its time; its last matmul is not needed.
    recomputed = config.remat.policy == "full"
    assert rows["attention"] == pytest.approx(1e3 * (4 / 3 if recomputed else 1) * time.attention)
    share = 1 - 4096 * 14336 / (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)) if recomputed else 0
    assert rows["matmuls"] == pytest.approx(1e3 * (1 + share / 3) * time.matmuls, rel=0.01)
    assert ("pipeline bubble" in rows) == ("collectives over pipeline" in rows) == (time.ticks > 0)
