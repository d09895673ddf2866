"""Train programs of equal settings share what jax has traced and compiled for them, within a test process.

A test that continues a run, or restores its checkpoint, builds the same program again and again: traced each time, it
takes about a second. The random numbers of first weights, whose program takes longer than a small train step's, are
drawn by programs of all models, once for each: meshes get them from there. A test that replaces what a program may have
traced has programs of its own.
"""

import json
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from single_device import stored

from megajax.model.parameters import _initial, parameters
from megajax.training import summary

KEPT = 80  # functions, each holds its compiled program, weights, or estimates
# A test that replaces something here has steps of its own, of DRAWN first states too.
DRAWN = ("config", "layout", "mesh", "model", "optim", "options", "schema", "sharding")
DRAWN = ("jax", "optax", *(f"megajax.{name}" for name in DRAWN))
TRACED = ("estimate", "inference", "ops", "parallel", "step", "step_plan", "training.step", "training.summary")
TRACED += ("weights",)
TRACED = tuple(f"megajax.{name}" for name in TRACED)
TRACED += DRAWN


class ReusedPrograms:
    """Replaces the jitted functions of `TrainProgram`: steps are shared while `active`, first states while `draws`."""

    def __init__(self, kind: type):
        self.active = self.draws = False
        self._known: OrderedDict[str, Any] = OrderedDict()
        for name in ("step_program", "eval_step"):
            self._share(kind, name)
        self._share_estimates()
        own = kind._first

        def first(program, params: bool, teacher: bool):
            if not self.draws:
                return own(program, params, teacher)
            if not params or program.plan.teacher is not None:
                return self._of(program, f"init {params} {teacher}", lambda p: own(p, params, teacher))
            name = f"init {shapes_of(program)}"
            make = self._of(program, name, self._first_state)
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

    def _share_estimates(self) -> None:
        """Of the memory that a start prints, which is traced: a tenth of a short run."""
        own = summary.estimate_memory

        def shared(plan: Any) -> Any:
            if not self.active:
                return own(plan)
            facts = repr((plan.sizes, plan.hardware, plan.kernels, plan.edges))
            key = json.dumps(["memory", settings_of(plan.config), facts])
            return self.kept(key, lambda: own(plan))

        summary.estimate_memory = shared

    def _of(self, program: Any, name: str, make: Callable) -> Any:
        key = json.dumps([name, settings_of(program.config), str(program.mesh), str(program.mesh.devices.flatten())])
        return self.kept(key, lambda: make(program))

    def _first_state(self, program: Any) -> Callable:
        """Jitted first weights → the first state: programs of other settings compute it alike."""
        shapes = {n: jax.ShapeDtypeStruct(p.stored_shape, np.float32) for n, p in program.placements.items()}
        traced, shardings = jax.make_jaxpr(program._first_state)(shapes), program.state_shardings
        constants = [np.asarray(constant).tolist() for constant in traced.consts]
        key = json.dumps(["first", str(traced), constants, str(shardings), str(program.mesh.devices.flatten())])
        return self.kept(key, lambda: jax.jit(program._first_state, out_shardings=shardings))

    def _weights(self, program: Any) -> dict[str, np.ndarray]:
        """The first weights of a program's model in their canonical shapes."""
        config = program.config
        settings = config.model_dump(mode="json", include={"model", "lora"})
        key = json.dumps(["weights", config.run.seed, settings, shapes_of(program)])
        return self.kept(key, lambda: first_weights(program.model, config.run.seed, config.model.init_std))

    def kept(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` gave for this key."""
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


def shapes_of(program: Any) -> str:
    """Blocks of tests may have one name and other parameters."""
    return str({name: placement.shape for name, placement in program.placements.items()})


def first_weights(model: Any, seed: int, init_std: float) -> dict[str, np.ndarray]:
    """The numbers of `init_parameters`, bit for bit, by programs that all models share.

    A random number depends on its key and its place in the flat array, so a longer array begins with the same ones.
    """
    found, others = {}, {}
    for name, parameter in parameters(model).items():
        shape, layers = parameter.shape, parameter.layers if parameter.axes[0] == "layers" else None
        if parameter.initial is not None:
            others[name] = partial(_initial, parameter, name, seed, init_std, layers)
        elif parameter.role in ("norm", "bias"):
            found[name] = np.full(shape, parameter.scale if parameter.role == "norm" else 0, np.float32)
        else:
            rows = [None] if layers is None else [np.uint32(layer) for layer in layers]
            count, number = math.prod(shape) // len(rows), np.uint32(zlib.crc32(name.encode()))
            size = 2 ** max(12, (count - 1).bit_length())
            std = np.float32(init_std * parameter.scale)
            drawn = [np.asarray(_normal(np.uint32(seed), number, row, std, size))[:count] for row in rows]
            found[name] = np.stack(drawn).reshape(shape)
    return found | (_values(others) if others else {})


def _values(functions: dict[str, Callable]) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, jax.jit(lambda: {name: function() for name, function in functions.items()})())


@partial(jax.jit, static_argnames="size")
def _normal(seed: Any, name: Any, layer: Any, std: Any, size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), name)
    key = key if layer is None else jax.random.fold_in(key, layer)
    return std * jax.random.normal(key, (size,), jax.numpy.float32)


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
    if config.optimizer.kind == "ademamix":
        kept.append("steps")
    settings["run"] = {name: run[name] for name in kept}
    settings["data"] = {name: value for name, value in settings["data"].items() if name.startswith("reset_")}
    return settings
