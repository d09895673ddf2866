"""The table of the differences of both programs' curves, weights and decays, with a verdict for each case."""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from megatron_parity.case import Case

TOLERANCE = 5e-5  # of a loss; rounding stays below 1e-5
GAP = 2e-5  # experts whose scores are nearer than this are at a tie within rounding
LOSSES = {  # our metric by Megatron's, which has no factor of the config
    "load_balancing_loss": "aux_loss",
    "seq_load_balancing_loss": "aux_loss",
    "global_load_balancing_loss": "aux_loss",
    "z_loss": "router_z_loss",
    "mtp_loss": "mtp_loss",
}
HEADER = (
    "| case | loss, first → last | max \\|Δloss\\| | max \\|Δnorm\\| / norm | max \\|Δrate\\| | max ‖Δw‖ / ‖w‖ "
    "| steps | verdict | row |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass
class Difference:
    """How far the two programs' runs of a case are from each other."""

    ends: tuple[float, float]  # the first loss and the last one
    loss: float
    first_norm: float  # relative, of step 1
    norm: float
    rate: float
    weights: float  # of the parameter that differs most, with a gradient that is not zero
    steps: int
    at_tie: bool  # from some step on a token chose another expert at a tie within rounding; until then equal
    facts: list[str] = field(default_factory=list)  # other differences, in words

    @property
    def equal(self) -> bool:
        return (self.loss < TOLERANCE or self.at_tie) and self.first_norm < 1e-4 and self.rate < 1e-6


def compare(case: Case, folder: Path) -> Difference:
    """Read and compare the two runs of a case."""
    ours, theirs = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("megajax", "megatron")
    )
    curves = ours["curve"], theirs["curve"]
    numbers = {name: _both(curves, name) for name in ("loss", "grad_norm", "learning_rate")}
    losses, norms = np.abs(np.subtract(*numbers["loss"])), numbers["grad_norm"]
    relative = np.abs(norms[0] / norms[1] - 1)
    return Difference(
        ends=(float(numbers["loss"][0][0]), float(numbers["loss"][0][-1])),
        loss=float(losses.max()),
        first_norm=float(relative[0]),
        norm=float(relative.max()),
        rate=float(np.abs(np.subtract(*numbers["learning_rate"])).max()),
        weights=_weights(case, np.load(folder / "megajax.npz"), np.load(folder / "megatron.npz")),
        steps=case.steps,
        at_tie=_is_at_tie(case, curves, losses),
        facts=[*_other_losses(case, curves), *_decays(case, ours, theirs), *_initial(folder, ours, theirs)],
    )


def _both(curves: tuple[list, list], name: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([row[name] for row in curve], float) for curve in curves)


def _weights(case: Case, ours: Any, theirs: Any) -> float:
    """A key's bias without rotary positions has no gradient, so it is left out with those beside it."""
    worst = 0.0
    for name in ours.files:
        if case.model.get("position") == "learned" and name.endswith(("linear_qkv.bias", "k_layernorm.bias")):
            continue
        found, expected = ours[name], theirs[name].reshape(ours[name].shape)
        worst = max(worst, float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-12)))
    return worst


def _is_at_tie(case: Case, curves: tuple[list, list], losses: np.ndarray) -> bool:
    if "expert_counts" not in curves[0][0] or case.model.get("router", {}).get("capacity_factor"):
        return False  # Megatron's counts are without the dropped ones
    for step, (a, b) in enumerate(zip(*curves, strict=True)):
        if a["expert_counts"] != b["expert_counts"]:
            return bool(b["least_gap"] < GAP and (losses[:step] < TOLERANCE).all())
    return False


def _other_losses(case: Case, curves: tuple[list, list]) -> list[str]:
    router, found = case.model.get("router", {}), []
    factors = {
        "aux_loss": router.get("global_loss", 0) + router.get("sequence_loss", 0),
        "router_z_loss": router.get("z_loss", 0),
        "mtp_loss": 1.0,
    }
    for theirs, ours in LOSSES.items():
        if ours in curves[0][0] and theirs in curves[1][0]:
            a, b = _both((curves[0], curves[0]), ours)[0], _both((curves[1], curves[1]), theirs)[0]
            if (difference := float(np.abs(a - factors[ours] * b).max())) > TOLERANCE:
                found.append(f"{ours} {difference:.0e}")
    return found


def _decays(case: Case, ours: dict, theirs: dict) -> list[str]:
    if not case.optimizer["weight_decay"] or case.distributed_optimizer:  # it has parameters of its own
        return []
    expected = theirs["decay"]
    own = {name: factor for name, factor in ours["decay"].items() if name in expected}
    return [f"decay of {name}: {f:g}, {expected[name]:g}" for name, f in own.items() if abs(f - expected[name]) > 1e-6]


def _initial(folder: Path, ours: dict, theirs: dict) -> list[str]:
    """Parameters whose own initial numbers have another mean or deviation in the two programs."""
    found, sizes = [], {name: array.size for name, array in np.load(folder / "start.npz").items()}
    for name, (mean, deviation) in ours["initial"].items():
        expected_mean, expected = theirs["initial"][name]
        limit = 5 * max(deviation, expected) / np.sqrt(2 * sizes[name]) + 1e-6
        if abs(mean - expected_mean) > 0.01 or abs(deviation - expected) > limit:
            found.append(f"first {name}: deviation {deviation:.3f}, {expected:.3f}")
    return found


def verdict(case: Case, found: Difference) -> str:
    """One word, in capitals if it is not the expected one."""
    if found.equal == (not case.row):
        return "equal" if found.equal else "differs"
    return "EQUAL" if found.equal else "DIFFERS"


def table(cases: dict[str, Case], found: dict[str, Difference]) -> str:
    """A row for each case."""
    lines = [HEADER]
    for name, own in found.items():
        case = cases[name]
        numbers = " | ".join(f"{x:.0e}" for x in (own.loss, own.norm, own.rate, own.weights))
        row = f"`{case.row}`" if case.row else ""
        ends = f"{own.ends[0]:.4f} → {own.ends[1]:.4f}"
        lines.append(f"| {name} | {ends} | {numbers} | {own.steps} | {verdict(case, own)} | {row} |")
    return "\n".join(lines) + "\n"


def curves(
    folder: Path,
    names: list[str],
    programs: tuple[str, ...] = ("megajax", "megatron"),
    keys: tuple[str, ...] = ("loss",),
) -> str:
    """Numbers of the steps as JSON, a line for each curve."""
    lines = []
    for name, program, key in itertools.product(names, programs, keys):
        curve = json.loads((folder / name / f"{program}.json").read_text(encoding="utf-8"))["curve"]
        lines.append(f"{json.dumps(f'{name}/{program}/{key}')}: {json.dumps([round(row[key], 7) for row in curve])}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
