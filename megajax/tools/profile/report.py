"""The table of a traced step beside the planner's estimate, and the sentence on its largest gap."""

from collections.abc import Sequence

from megajax.config.checks import check_mesh
from megajax.config.sentences import mesh_name
from megajax.errors import counted
from megajax.layout.backward_parts import backward_parts
from megajax.step.pipeline.schedules import Schedule, make_schedule
from megajax.tools.plan.rates import Rates
from megajax.tools.profile import parts
from megajax.tools.profile.operations import ATTENTION, ELEMENTWISE, HEAD, MATMULS, OPTIMIZER
from megajax.tools.profile.prediction import joined, predict
from megajax.tools.profile.timeline import (
    BUBBLE,
    EXPOSED,
    HOST,
    IDLE,
    OTHERS,
    UNKNOWN_AXIS,
    WAITING,
    Measured,
    Reading,
    Rows,
    computing,
    exposed,
    measure,
    unnamed,
    waiting,
)
from megajax.tools.profile.trace import Trace

USEFUL = (MATMULS, ATTENTION, HEAD)
BEFORE, AFTER = (*USEFUL, ELEMENTWISE, OPTIMIZER), (WAITING, BUBBLE, HOST, IDLE, OTHERS)  # the collectives in between
SMALL = 0.01  # of a step: smaller gaps are not named
SHOWN = 8  # devices with a line of their own
CURES = {
    MATMULS: "look at their shapes with --parts: small ones are slow (a larger microbatch, less mesh.tensor), and "
    "megajax preflight shows a GPU whose matmuls are slow",
    ATTENTION: "look at the kernel that the run's summary names (kernels.attention), and at its time with --parts",
    HEAD: "look at its matmuls and its elementwise work with --parts; kernels.loss_chunk_tokens sets their size",
    ELEMENTWISE: "--parts and --operations 20 show which norms, conversions and copies they are",
    OPTIMIZER: "more devices on mesh.fsdp or mesh.data share it, and fewer microbatches add up fewer gradients",
    WAITING: "megajax preflight shows slow GPUs; with experts or documents the work itself is uneven",
    BUBBLE: "use more batch.num_microbatches, more pipeline.virtual_stages or pipeline.schedule=zero_bubble",
    HOST: "the devices waited for the host: for the data loader, for cores that other processes use, or for what runs "
    "between the steps",
    IDLE: "launched kernels waited, for each other or for copies: look at the timeline in Nsight Systems",
    OTHERS: "programs besides the train step ran: evaluation, saving or your own code between the steps",
}
CURE_OF_COLLECTIVES = "no computation hides them: use larger microbatches or less of that axis (megajax plan compares \
meshes), and megajax preflight measures the links"


def report(trace: Trace, rates: Rates | None, with_parts: bool = False, operations: int = 0) -> str:
    """The whole text. rates: those of the prediction; None: no prediction. operations: the number to show."""
    sizes = check_mesh(trace.config, trace.devices)
    reading = Reading(trace.module, trace.ops, sizes)
    measured = measure(trace.kernels, reading, trace.steps, schedule_of(trace, sizes))
    predicted = None
    if rates is not None:
        predicted = joined(predict(trace.config, trace.devices, rates), measured.mean)
    devices = f"{mesh_name(sizes)}, {trace.devices} × {trace.device_kind}"
    title = f"{trace.config.run.name}, {devices}, {counted(trace.steps, 'traced step')}"
    lines = [title, "", *table(measured, predicted, rates), "", *device_lines(measured)]
    lines += ["", *notes(trace, reading, rates), largest_gap(measured, predicted)]
    if with_parts:
        lines += ["", *parts.table(trace.kernels, reading, trace.steps, measured.step)]
    if operations:
        lines += ["", *parts.operations(trace.kernels, reading, trace.steps, operations)]
    return "\n".join(lines)


def schedule_of(trace: Trace, sizes: dict[str, int]) -> Schedule | None:
    """The schedule of a pipeline."""
    settings, stages = trace.config.pipeline, sizes["pipeline"]
    if stages == 1:
        return None
    shape = stages, trace.config.batch.num_microbatches, settings.virtual_stages
    return make_schedule(settings.schedule, *shape, len(backward_parts(trace.config, sizes).slots))


def in_order(rows: Sequence[str]) -> list[str]:
    """Work first, then collectives by axis, then the rest."""
    collectives = sorted(row for row in rows if row.startswith(EXPOSED))
    return [row for row in (*BEFORE, *collectives, *AFTER) if row in rows]


def table(measured: Measured, predicted: Rows | None, rates: Rates | None) -> list[str]:
    """A row for each kind of time, then the step."""
    whole = measured.step
    columns = ["", "ms a step", "share"]
    if predicted is not None and rates is not None:
        columns += [f"predicted, {rates.name}", "difference"]
    lines = [parts.row(columns), parts.row(["---", *["---:"] * (len(columns) - 1)])]
    totals = {"step": (whole, sum((predicted or {}).values()))}
    rows = {row: (measured.mean.get(row, 0.0), (predicted or {}).get(row, 0.0)) for row in _rows(measured, predicted)}
    for name, (ms, estimate) in {**rows, **totals}.items():
        cells = [_title(name), f"{ms:,.2f}", f"{ms / whole:.1%}"]
        if predicted is not None:
            cells += [f"{estimate:,.2f}", f"{ms - estimate:+,.2f}"]
        lines.append(parts.row(cells))
    return lines


def _rows(measured: Measured, predicted: Rows | None) -> list[str]:
    return in_order([*measured.mean, *(row for row in predicted or () if row not in measured.mean)])


def _title(row: str) -> str:
    return f"exposed {row}" if row.startswith(EXPOSED) else row


def device_lines(measured: Measured) -> list[str]:
    """What each device did, a line each; of many devices, those at both ends."""
    lines, names = [], list(measured.devices)
    if len(names) > SHOWN:
        names.sort(key=lambda name: -computing(measured.devices[name]))
        lines = [f"Of {len(names)} devices, those that compute longest and shortest:"]
        names = [*names[: SHOWN // 2], *names[-SHOWN // 2 :]]
    for device in names:
        rows = measured.devices[device]
        gaps = rows.get(HOST, 0.0) + rows.get(IDLE, 0.0)
        lines.append(
            f"{device}: {sum(rows.values()):.2f} ms a step: computing {computing(rows):.2f}, exposed collectives "
            f"{exposed(rows):.2f}, waiting in them {waiting(rows):.2f}, idle {gaps:.2f} (host gaps "
            f"{rows.get(HOST, 0.0):.2f})"
        )
    return lines


def notes(trace: Trace, reading: Reading, rates: Rates | None) -> list[str]:
    """What the table cannot tell."""
    found, kernels = [], [kernel for own in trace.kernels.values() for kernel in own]
    shares = unnamed(trace.kernels, reading)
    if (share := sum(shares.values())) > SMALL:
        largest = ", ".join(f"{own:.1%} {name[:60]}" for name, own in list(shares.items())[:3])
        found.append(
            f"{share:.0%} of the kernels' time is of kernels whose operation the trace does not name, as in CUDA "
            f"graphs: they are sorted by their names only ({largest}). For all names, trace a config (megajax profile "
            "CONFIG), or start the run with XLA_FLAGS=--xla_gpu_enable_command_buffer= in its environment."
        )
    if not any(kernel.launched is not None for kernel in kernels):
        found.append("The trace has no launches, so it cannot tell what the host held back: all gaps count as idle.")
    if trace.device_kind.lower() == "cpu":
        found.append(
            "Virtual CPU devices share the machine's cores: a device that waits for a core counts as one that waits "
            "in a collective or is idle, so these shares say nothing about GPUs."
        )
    if rates is None:
        found.append(f"The planner has no rates of {trace.device_kind}: --device h200 adds an H200's prediction.")
    if trace.config.batch.schedule is not None:
        found.append(
            f"The prediction and the bubble are those of batch.global_size={trace.config.batch.global_size}; "
            "batch.schedule may have had fewer sequences in the traced steps."
        )
    if reading.sizes["pipeline"] > 1:
        found.append(
            "Stages of a pipeline compute in the bubble too, on unused values: the bubble is the schedule's share of "
            "the layers' time."
        )
    return found


def largest_gap(measured: Measured, predicted: Rows | None) -> str:
    """The sentence that names the row that costs most above the prediction, or, without one, most besides the work."""
    whole = measured.step
    if predicted is None:
        gaps = {row: ms for row, ms in measured.mean.items() if row not in USEFUL}
    else:
        gaps = {row: measured.mean.get(row, 0.0) - predicted.get(row, 0.0) for row in _rows(measured, predicted)}
    row = max(gaps, key=lambda row: gaps[row], default=None)
    if row is None or gaps[row] <= SMALL * whole:
        best = "the prediction" if predicted is not None else "matmuls and attention"
        return f"No gap: every row is within {SMALL:.0%} of the step of {best}."
    ms = measured.mean[row]
    size = f"{ms:,.2f} ms, {ms / whole:.1%} of the step"
    if predicted is not None:
        size = f"{ms:,.2f} ms in place of {predicted.get(row, 0.0):,.2f}, {gaps[row] / whole:.1%} of the step"
    return f"The largest gap: {_title(row)} ({size}): {_cure(row)}."


def _cure(row: str) -> str:
    if row == EXPOSED + UNKNOWN_AXIS:
        return "trace a config in place of a run, so that the trace names their operations"
    return CURE_OF_COLLECTIVES if row.startswith(EXPOSED) else CURES[row]
