"""The differences of two runs of a small config, and the part of them that rounding explains."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megajax.tools.verify.runs import Arrays, RunTrace

# FP32's rounding, relative; docs/verify.md derives these figures. The first difference is looked for in this order.
TOLERANCES = {"gradient": 1e-4, "layer state": 1e-4, "update": 1e-2, "loss": 1e-5, "gradient norm": 1e-5}
ROUNDING = 1e-5  # of the root mean square of a gradient: smaller numbers of it are rounding
NEGLIGIBLE = 1e-6  # of the whole norm: a smaller gradient is rounding, such as that of GPT-2's key biases
SMALL = 1e-2  # of the whole norm: a smaller gradient, perhaps of terms that cancel, may differ by as much
LATER_NORMS = 10  # tolerance of norms after the first step, as a multiple of that of the first
Measures = dict[str, dict[str, float]]  # relative differences by kind, of TOLERANCES, and name


@dataclass(frozen=True)
class RunDifference:
    """The relative differences of a run from its reference, and the largest that rounding explains."""

    values: Measures
    limits: Measures
    problems: tuple[str, ...]

    @cached_property
    def first(self) -> str | None:
        """The sentence on the first difference above rounding; None: both trained the same model. A NaN differs."""
        for problem in self.problems:
            return problem
        for kind, values in self.values.items():
            limits = self.limits[kind]
            wrong = [name for name, value in values.items() if not value <= limits[name]]
            if wrong:
                return self._sentence(kind, wrong)
        return None

    def worst(self, kind: str) -> str | None:
        """The name with the largest difference, measured by its limit; None if there is none of this kind."""
        return _largest({name: value / self.limits[kind][name] for name, value in self.values[kind].items()})

    def _sentence(self, kind: str, wrong: list[str]) -> str:
        values, first = self.values[kind], wrong[0]
        worst = _largest({name: values[name] for name in wrong}) or first
        sentence = f"the {kind} of {first} differs by {values[first]:.1e} where rounding explains "
        sentence += f"{self.limits[kind][first]:.1e}"
        if len(values) == 1:
            return sentence
        return f"{sentence}; {len(wrong)} of {len(values)} differ, most that of {worst}, by {values[worst]:.1e}"


def compare(found: RunTrace, expected: RunTrace, exact: RunTrace | None = None) -> RunDifference:
    """A run against its reference on one device.

    `exact` is the reference in FP32, where both runs use another precision. Rounding moved the reference away from it
    by a measured distance, and moves `found` as far: so twice the distance is between them at most. All losses, or
    norms, of so few steps may be near their exact values by chance: they have four times the distance of the worst.
    After the first step they are of weights that updates have moved apart; the measured distance has that already.
    """
    apart = expected.update_tolerance / TOLERANCES["update"]
    later = {"loss": 1, "gradient norm": LATER_NORMS}  # tolerances, as multiples of those of the first step
    values = _measure(found, expected, exact or expected)
    rounding = _measure(expected, exact, exact) if exact else {kind: {} for kind in TOLERANCES}
    most = {kind: max(own.values(), default=0.0) for kind, own in rounding.items()}
    limits: Measures = {}
    for kind, tolerance in (TOLERANCES | {"update": expected.update_tolerance}).items():
        # An amax of FP8 is a number of the tensors of which gradients are made, and has no value in FP32: it has their
        # largest limit.
        otherwise = most["gradient"] if kind == "layer state" else most[kind]
        own, factor = ({}, 4) if kind in later else (rounding[kind], 2)
        limits[kind] = {}
        for name in values[kind]:
            wider, times = (apart, later[kind]) if kind in later and name != "step 1" else (1, 1)
            limits[kind][name] = wider * (times * tolerance + factor * own.get(name, otherwise))
    return RunDifference(values, limits, found.problems)


def _measure(found: RunTrace, expected: RunTrace, exact: RunTrace) -> Measures:
    """‖a − b‖ / ‖exact‖ of everything that both runs have."""
    skipped = found.first - expected.first
    steps = range(found.first, found.first + len(found.losses))
    numbers = [
        {f"step {step}": float(abs(a / b - 1)) for step, a, b in zip(steps, own, others[skipped:], strict=True)}
        for own, others in ((found.losses, expected.losses), (found.norms, expected.norms))
    ]
    states = zip(steps, found.states, expected.states[skipped:], exact.states[skipped:], strict=True)
    is_rounding = {name: _is_rounding(gradient) for name, gradient in expected.gradients.items()}
    a, b, c = (_update(trace, expected.weights[0], is_rounding) for trace in (found, expected, exact))
    counted = [name for name in expected.gradients if _counts(exact.gradients, name)]
    return {
        "gradient": _relative(found.gradients, expected.gradients, exact.gradients, found.gradients, SMALL),
        "layer state": {
            f"{name} after step {step}": value
            for step, own, others, true in states
            for name, value in _relative(own, others, others | true, [n for n in own if n in others]).items()
        },
        "update": _relative(a, b, c, counted),
        "loss": numbers[0],
        "gradient norm": numbers[1],
    }


def _update(trace: RunTrace, initial: Arrays, is_rounding: Arrays) -> Arrays:
    """What a run added to each weight, and zeros where its gradient is rounding."""
    return {
        name: np.where(is_rounding[name], 0, weight.astype(np.float64) - initial[name])
        for name, weight in trace.weights[1].items()
    }


def _is_rounding(gradient: np.ndarray) -> np.ndarray:
    """Where the true gradient is zero, such as that of a key's bias where rotary positions turn a part of a head.

    AdamW and Lion make a step of any sign of such a number.
    """
    size = np.abs(gradient)
    return (size > 0) & (size < ROUNDING * np.sqrt(np.mean(np.square(size))))


def _relative(
    found: Arrays, expected: Arrays, exact: Arrays, names: Iterable[str], least: float = 0.0
) -> dict[str, float]:
    """‖a − b‖ / ‖exact‖ by name; instead of a smaller ‖exact‖ `least` of the norm of all."""
    smallest, out = least * _norm(exact.values()), {}
    for name in names:
        scale, distance = max(_norm([exact[name]]), smallest), _norm([found[name].astype(np.float64) - expected[name]])
        out[name] = distance / scale if scale else distance
    return out


def _counts(gradients: Arrays, name: str) -> bool:
    """Whether a gradient is larger than the rounding of the others."""
    return _norm([gradients[name]]) > NEGLIGIBLE * _norm(gradients.values())


def _norm(arrays: Iterable[np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in arrays))


def _largest(values: Mapping[str, float]) -> str | None:
    return max(values, key=lambda name: math.inf if math.isnan(values[name]) else values[name], default=None)
