"""The planner's estimate of a step, in the rows of a trace."""

from collections.abc import Iterable

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import Rates
from megajax.tools.profile.operations import ATTENTION, ELEMENTWISE, HEAD, MATMULS, OPTIMIZER
from megajax.tools.profile.timeline import BUBBLE, EXPOSED, WAITING, Rows


def predict(config: Config, devices: int, rates: Rates) -> Rows:
    """The ms of each row of a step on `devices` GPUs. What is computed again counts in the rows of its kind."""
    time = Candidate.of(config, check_mesh(config, devices), rates).time
    again = {axis: each.exposed for axis, each in time.recomputed.traffic.items()}
    axes = {*time.communication, *again}
    seconds = {
        MATMULS: time.matmuls + time.recomputed.matmuls,
        ATTENTION: time.attention + time.recomputed.attention,
        HEAD: time.head,
        ELEMENTWISE: time.elementwise + time.recomputed.elementwise + time.loops + time.conversions,
        OPTIMIZER: time.optimizer,
        WAITING: time.waiting,
        BUBBLE: time.bubble,
        f"{EXPOSED}pipeline": time.ticks,
    }
    for axis in axes:
        exposed = time.communication.get(axis, 0.0) + again.get(axis, 0.0)
        seconds[EXPOSED + axis] = seconds.get(EXPOSED + axis, 0.0) + exposed
    return {row: 1e3 * own for row, own in seconds.items() if own}


def joined(predicted: Rows, measured: Iterable[str]) -> Rows:
    """The prediction in the rows that were measured: an axis without a row of its own counts in one that it is part of.

    XLA runs a collective over several axes as one, the planner adds up the axes.
    """
    rows: Rows = {}
    measured = list(measured)
    for row, ms in predicted.items():
        axis = row.removeprefix(EXPOSED)
        shared = [other for other in measured if row.startswith(EXPOSED) and axis in _axes(other)]
        target = row if row in measured or not shared else shared[0]
        rows[target] = rows.get(target, 0.0) + ms
    return rows


def _axes(row: str) -> list[str]:
    return row.removeprefix(EXPOSED).split(" and ") if row.startswith(EXPOSED) else []
