"""Train programs of equal settings share what jax has traced and compiled for them, within a test process.

A test that continues a run, or restores its checkpoint, builds the same program again and again: traced each time, it
takes about a second. The random numbers of first weights, whose program takes longer than a small train step's, are
drawn once for each model, on one device: other meshes get them from there. A test that replaces what a program may
have traced has programs of its own.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from single_device import stored

from megajax.model import init_parameters

KEPT = 64  # functions, each holds its compiled program, or weights
# A test that replaces something here has steps of its own, of DRAWN first states too.
DRAWN = ("config", "layout", "mesh", "model", "optim", "options", "schema", "sharding")
DRAWN = ("jax", "optax", *(f"megajax.{name}" for name in DRAWN))
TRACED = tuple(f"megajax.{name}" for name in ("ops", "parallel", "step", "step_plan", "training.step", "weights"))
TRACED += DRAWN


class ReusedPrograms:
    """Replaces the jitted functions of `TrainProgram`: steps are shared while `active`, first states while `draws`."""

    def __init__(self, kind: type):
        self.active = self.draws = False
        self._known: OrderedDict[str, Any] = OrderedDict()
        for name in ("train_step", "eval_step"):
            self._share(kind, name)
        own = kind._first

        def first(program, params: bool, teacher: bool):
            if not self.draws:
                return own(program, params, teacher)
            if not params or program.plan.teacher is not None:
                return self._of(program, f"init {params} {teacher}", lambda p: own(p, params, teacher))
            make = self._of(program, "init", lambda p: jax.jit(p._first_state, out_shardings=p.state_shardings))
            weights, places = self._weights(program), program.placements
            return lambda: make({n: stored(w, places[n], np.dtype(np.float32)) for n, w in weights.items()})

        kind._first = first
        monkey_patch: Any = pytest.MonkeyPatch
        replace = monkey_patch.setattr

        def setattr_alone(patch, target, *args, **options):
            self.active &= not is_in(module_of(target), TRACED)
            self.draws &= not is_in(module_of(target), DRAWN)
            return replace(patch, target, *args, **options)

        monkey_patch.setattr = setattr_alone

    def _share(self, kind: type, name: str) -> None:
        own = vars(kind)[name].func
        shared = cached_property(lambda program: self._of(program, name, own) if self.active else own(program))
        shared.__set_name__(kind, name)
        setattr(kind, name, shared)

    def _of(self, program: Any, name: str, make: Callable) -> Any:
        key = json.dumps([name, settings_of(program.config), str(program.mesh), str(program.mesh.devices.flatten())])
        return self._kept(key, lambda: make(program))

    def _weights(self, program: Any) -> dict[str, np.ndarray]:
        """The first weights of a program's model in their canonical shapes."""
        config = program.config
        settings = config.model_dump(mode="json", include={"model", "lora"})

        def draw() -> dict[str, np.ndarray]:
            drawn = jax.jit(lambda: init_parameters(program.model, config.run.seed, config.model.init_std))()
            return jax.tree.map(np.asarray, drawn)

        return self._kept(json.dumps(["weights", config.run.seed, settings]), draw)

    def _kept(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        self._known.move_to_end(key)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return self._known[key]


def module_of(target: Any) -> str:
    """The module of what `MonkeyPatch.setattr` changes: a module, a class, an object or a dotted path."""
    if isinstance(target, str):
        return target
    return target.__name__ if isinstance(target, ModuleType) else getattr(target, "__module__", "jax")


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    """Whether the module is one of these or in one of them."""
    return f"{module}.".startswith(tuple(f"{name}." for name in packages))


def settings_of(config: Any) -> dict[str, Any]:
    """What the jitted functions depend on: not the run's directory, its length or its texts."""
    settings = config.model_dump(mode="json", exclude={"checkpoint", "logging"})
    run, schedule = settings["run"], settings["schedule"]
    kept = ["seed", "deterministic"]
    if schedule["kind"] == "constant":
        del schedule["decay_steps"]  # by default run.steps
    if config.optimizer.ademamix:
        kept.append("steps")
    settings["run"] = {name: run[name] for name in kept}
    settings["data"] = {name: value for name, value in settings["data"].items() if name.startswith("reset_")}
    return settings
