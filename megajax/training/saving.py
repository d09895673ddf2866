"""The train state's canonical form, and its conversion to and from checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax import cluster
from megajax.checkpoint import Checkpoints, host_memory
from megajax.checkpoint.description import (
    SettingDifference,
    config_allows,
    differences,
    has_optimizer_state,
    refuse_changes,
)
from megajax.checkpoint.manager import loaded_layer_state, saved_layer_state
from megajax.config.sentences import fail, located
from megajax.data.contents import data_contents
from megajax.errors import InputError, reading
from megajax.mesh import mesh_sizes
from megajax.optim.offload import HOST, on_device, on_host
from megajax.schema.batch_schedule import Position, samples_before
from megajax.sharding import OBJECTIVE, TEACHER, Placement, to_canonical, to_stored, unpadded_spec
from megajax.sources import INIT_FROM, LayerState, Weights, WeightSource, find_source, initial_weights, read_weights
from megajax.training.agreement import MUST_AGREE, check_order, compared_settings, warn_of_longer_sequences
from megajax.training.step import TrainProgram, TrainState
from megajax.weights.scaling import FP8, Scaling

ORDER_BY_SIZE = ("data.stages", "data.train_samples")  # they follow the size of the batch


class StateSaver:
    """Saves and restores a program's state; canonical shapes on disk, stored shapes on the devices."""

    def __init__(self, program: TrainProgram, contents: Mapping[str, Any] | None = None):
        """`contents`: of the data (`data_contents`), if its files are not to be read."""
        self.program, self._given_contents = program, contents
        placements = (array.placement for array in jax.tree.leaves(program.stored))
        self.converts = not all(placement is None or placement.is_canonical for placement in placements)
        self.base_checksum: int | None = None  # of the frozen weights, if there are any

    def description(self, step: int, samples: int | None = None) -> dict[str, Any]:
        """A checkpoint's description; its MUST_AGREE entries must equal those of the run that restores it.

        `samples` were read before the step.
        """
        config = self.program.config
        return {
            "format": 1,
            "step": step,
            "samples_consumed": samples,
            **compared_settings(config, step, self._contents),
            "precision": {"compute": config.precision.compute},
            "schedule": config.schedule.model_dump(mode="json"),
            "base": self.base_checksum,
            "fp8_history": _history_length(self._canonical_abstract.layer_state),
            "optimizer_state": config.checkpoint.save_optimizer,
            "ema": config.optimizer.ema_decay is not None,
            "saved_on": {  # information only
                "mesh": {axis: size for axis, size in mesh_sizes(self.program.mesh).items() if size > 1},
                "devices": self.program.mesh.size,
                "processes": cluster.current().size,
            },
        }

    @cached_property
    def _contents(self) -> Mapping[str, Any]:
        """As process 0 finds them: thousands would read the same files."""
        if self._given_contents is not None:
            return self._given_contents
        return cluster.current().first_decides(lambda: data_contents(self.program.config), "contents")

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        state: TrainState,
        samples: int | None = None,
        **more: Any,
    ) -> None:
        """Start writing the state as the checkpoint of `step`, before which `samples` were read (default: config's).

        `more` are further entries of its description.
        """
        canonical = self._to_canonical(self._joined(replace(self.program.with_files(state), frozen={})))
        samples = samples_before(self.program.config, step) if samples is None else samples
        checkpoints.save(step, self._as_tree(canonical), self.description(step, samples) | more)

    def reserve_host_memory(self) -> None:
        """Allocate the pinned host memory that a `save` beside training needs; it needs no state yet."""
        if not self.program.config.run.checkpoint_interval:
            return
        saved = replace(self._canonical_abstract, frozen={})
        host_memory.reserve(saved if self.program.config.checkpoint.save_optimizer else replace(saved, optimizer=None))

    def require_optimizer_state(self, checkpoints: Checkpoints, step: int) -> None:
        """Raise InputError if a checkpoint has weights only, before any array is read."""
        if has_optimizer_state(checkpoints.describe(step)):
            return
        path = checkpoints.directory / str(step)
        older = [good for good in checkpoints.complete_steps() if good < step]
        whole = next((good for good in reversed(older) if has_optimizer_state(checkpoints.describe(good))), None)
        back = "" if whole is None else f", or set checkpoint.resume_step={whole}, the newest one that has it"
        raise InputError(
            f"the checkpoint {path} has no optimizer state (checkpoint.save_optimizer=false), so the run can't be "
            f"resumed from it bit for bit: set checkpoint.init_from={path} and another run.dir to start from its "
            f"weights{back}."
        )

    def compare(self, description: Mapping[str, Any], name: str) -> tuple[Position, list[SettingDifference]]:
        """The position of a checkpoint, and the settings that changed since and that `checkpoint.allow_changes` names.

        `description` is the checkpoint's, `name` its name in errors. Raises InputError with all other changes of
        MUST_AGREE, before any array is read.
        """
        config, step = self.program.config, description["step"]
        with reading(name, "choose another one, or another run.dir"):  # a section may be missing
            batch = {key: value for key, value in description["batch"].items() if key != "global_size"}  # may change
            saved = {"lora": {}, "objective": {}, **description, "batch": batch}
            found = differences(saved, self.description(step), MUST_AGREE)
            position = Position(step, saved["samples_consumed"])
        others = [each for each in found if each.key not in ORDER_BY_SIZE and not config_allows(config, each)]
        if not others and position.samples != samples_before(config, step):
            check_order(config, position, saved["data"].get("samples"), name)
        refuse_changes(found, config, name)
        if description.get("ema") and config.optimizer.ema_decay is None:
            raise InputError(
                f"{name} has averages of the weights, but {located(config, 'optimizer.ema_decay')}: set it, or choose "
                "another run.dir."
            )
        return position, found

    def compare_base(self, saved: Mapping[str, Any], name: str) -> None:
        """Raise InputError if the frozen weights, which `with_weights` has set, differ from those of a checkpoint.

        `saved` is its description, `name` its name in the error.
        """
        config = self.program.config
        if saved["precision"]["compute"] == config.precision.compute and saved["base"] != self.base_checksum:
            raise InputError(
                f"{located(config, INIT_FROM)} has other weights than the base of the "
                f"adapters in {name}: set it to the same weights, or choose another run.dir."
            )

    def restore(self, checkpoints: Checkpoints, step: int) -> TrainState:
        """The state of a checkpoint that `compare` accepts, independent of the mesh that wrote it.

        It has no frozen weights.
        """
        self.require_optimizer_state(checkpoints, step)
        saved, mine = checkpoints.describe(step), self.description(step)
        length = saved.get("fp8_history", 0)
        abstract = self._canonical_abstract
        layer_state = _without_history(abstract.layer_state) | self._abstract_history(length)
        abstract = replace(abstract, layer_state=layer_state, frozen={})
        begins = bool(abstract.ema) and not saved.get("ema")  # an average begins here
        abstract = replace(abstract, ema={}) if begins else abstract
        state = self._from_tree(checkpoints.restore(step, self._as_tree(abstract)))
        state = replace(state, ema=self.program.update.first_averages(state.params)) if begins else state
        state = replace(state, layer_state=self._continued_history(state.layer_state))
        if saved["precision"] != mine["precision"]:  # a loss scale is of its compute dtype
            scale, age = self.program.first_loss_scale, jnp.zeros((), jnp.int32)
            scale, age = jax.device_put((scale, age), (state.loss_scale.sharding, state.scale_age.sharding))
            state = replace(state, loss_scale=scale, scale_age=age)
        return self.program.to_files(self._halved(self._to_stored(state)))

    def _abstract_history(self, length: int) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """The amax histories of a checkpoint with `length` steps, as part of the layer state."""
        if not length:
            return {}
        scaling, everywhere = Scaling(self.program.plan), NamedSharding(self.program.mesh, P())
        history = jax.ShapeDtypeStruct((scaling.num_layers, length), jnp.float32, sharding=everywhere)
        return {FP8: dict.fromkeys(scaling.names, history)}

    def _continued_history(self, saved: LayerState) -> LayerState:
        """A checkpoint's layer state, with this run's length of amax histories: the newest steps, none, or zeros.

        So a run may change its FP8 recipe at a checkpoint: from BF16 to FP8 and back.
        """
        mine = self.program.abstract_state.layer_state
        length = _history_length(mine)
        if _history_length(saved) == length:
            return saved
        without_history = _without_history(saved)
        if not length:
            return without_history
        filled = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), mine[FP8])
        for name, history in saved.get(FP8, {}).items():
            newest = np.asarray(history)[:, :length]
            filled[name][:, : newest.shape[1]] = newest
        return without_history | {FP8: jax.device_put(filled, NamedSharding(self.program.mesh, P()))}

    @property
    def canonical_weights(self) -> tuple[Any, Any]:
        """The model's weights, with LoRA the frozen ones, and the layers' state, as abstract canonical arrays."""
        abstract: Any = self._canonical_abstract
        return _base(abstract.frozen) or abstract.params, _without_history(abstract.layer_state)

    def restore_weights(self, path: str) -> Weights:
        """The model of another run's checkpoint, or of a folder in Hugging Face's format, in canonical shapes.

        With LoRA they are the frozen weights, in their dtype, and an objective's. An objective's parameters may be
        absent. Raises InputError if one is not finite: no step would have a gradient that is.
        """
        (wanted, layer_state), config = self.canonical_weights, self.program.config
        trained: Any = self._canonical_abstract.params
        wanted = wanted | {name: leaf for name, leaf in trained.items() if name.startswith(OBJECTIVE)}
        source = initial_weights(config, path)
        warn_of_longer_sequences(config, source, config.model)
        if own := {name for name in wanted if name.startswith(OBJECTIVE)}:
            absent = source.lacks(own, config.model)
            wanted = {name: leaf for name, leaf in wanted.items() if name not in absent}
        return read_weights(source, wanted, layer_state, config.model)

    def restore_teacher(self) -> dict[str, jax.Array]:
        """The frozen teacher's weights of `teacher.source`, as stored on the devices; empty without a teacher.

        Raises InputError as `restore_weights`, and ConfigError if no source is named.
        """
        config, names = self.program.config, [name for name in self.program.placements if name.startswith(TEACHER)]
        if not names:
            return {}
        model, source, key = config.teacher.model, config.teacher.source, "teacher.source"
        assert model is not None
        if source is None:
            cure = "set it to a run directory or a Hugging Face folder"
            fail(config, "teacher.model is set, but teacher.source names no weights", cure, "teacher.model")
        frozen: Any = self._canonical_abstract.frozen
        wanted = {name.removeprefix(TEACHER): frozen[name] for name in names}
        found = find_source(source, key, f" ({config.where(key)})")
        warn_of_longer_sequences(config, found, model)
        weights, _ = read_weights(found, wanted, {}, model)
        return self._in_stored_form({TEACHER + name: w for name, w in weights.items()}, "frozen")

    def first_state(self) -> TrainState:
        """The state of step 0, with the weights of `checkpoint.init_from` and those of the teacher, if there are."""
        init_from = self.program.config.checkpoint.init_from
        state = self.begun(None if init_from is None else self.restore_weights(init_from))
        return self.program.to_files(replace(state, frozen=state.frozen | self.restore_teacher()))

    def begun(self, weights: Weights | None) -> TrainState:
        """The state of step 0 from `weights`, or from random ones; without the teacher's."""
        if weights is None:
            return self.program.random_state(teacher=False)
        state = self.with_weights(self.program.random_state(params=False, teacher=False), weights)
        own = {name: w for name, w in weights[0].items() if name.startswith(OBJECTIVE)}
        if not own or not self.program.config.lora.rank:
            return state
        return self._with_params(state, self._joined(state).params | self._in_stored_form(own, "params"))

    def with_weights(self, state: TrainState, weights: Weights) -> TrainState:
        """`state` with its model replaced by `weights`, which have canonical shapes; with LoRA its frozen weights."""
        params, layer_state = weights
        state = replace(state, layer_state=state.layer_state | layer_state)
        if self.program.config.lora.rank:
            base = {name: w for name, w in params.items() if not name.startswith(OBJECTIVE)}
            base = self._in_stored_form(base, "frozen")
            self.base_checksum = int(_checksum(base))
            return replace(state, frozen=state.frozen | base)
        params = self._in_stored_form(params, "params")
        if absent := [name for name in self.program.state_shardings.params if name not in params]:
            params = self.program.first_weights(absent) | params
        return self._with_params(state, params)

    def with_trained(self, state: TrainState, source: WeightSource) -> TrainState:
        """`state` with the trained parameters of a run of the same config, such as adapters."""
        wanted: Any = self._canonical_abstract
        read = wanted.params, _without_history(wanted.layer_state), self.program.config.model
        params, layer_state = read_weights(source, *read)
        state = replace(state, layer_state=state.layer_state | layer_state)
        return self._with_params(state, self._in_stored_form(params, "params"))

    def _with_params(self, state: TrainState, params: dict[str, jax.Array]) -> TrainState:
        """A first state with these FP32 master weights, from which their moving averages begin."""
        if self.program.config.optimizer.ema_decay:
            state = replace(state, ema=self.program.update.first_averages(params))
        return self._halved(replace(state, params=params))

    def _in_stored_form(self, weights: dict[str, jax.Array], which: str) -> dict[str, jax.Array]:
        """Canonical weights of a part of the state, `params` or `frozen`, as stored on the devices."""
        if not self.converts:
            return weights
        placements, shardings = self.program.placements, getattr(self.program.state_shardings, which)
        return jax.jit(
            lambda weights: {name: self.stored_form(w, placements[name]) for name, w in weights.items()},
            out_shardings={name: shardings[name] for name in weights},
        )(weights)

    def _joined(self, state: TrainState) -> TrainState:
        """The state with FP32 master weights in one piece (`optimizer.master`)."""
        return replace(state, params=self._masters(state), master_low_bits={}) if state.master_low_bits else state

    @cached_property
    def _masters(self) -> Callable[[TrainState], dict[str, jax.Array]]:
        return jax.jit(lambda state: state.masters, out_shardings=self.program.state_shardings.params)

    def _halved(self, state: TrainState) -> TrainState:
        """The inverse of `_joined`."""
        target = self.program.state_shardings
        if not target.master_low_bits:
            return state
        shardings = target.params, target.master_low_bits
        params, low_bits = jax.jit(self.program.update.halves, out_shardings=shardings)(state.params)
        return replace(state, params=params, master_low_bits=low_bits)

    @cached_property
    def _abstract(self) -> TrainState:
        """The program's state with master weights in one piece."""
        state = self.program.abstract_state
        shapes = {name: (w.shape, w.sharding) for name, w in state.params.items()}
        params = {n: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at) for n, (shape, at) in shapes.items()}
        return replace(state, params=params, master_low_bits={})

    @cached_property
    def _canonical_abstract(self) -> TrainState:
        if not self.converts:
            return self._abstract
        mesh = self.program.mesh

        def canonical(leaf: jax.Array, placement: Placement) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, unpadded_spec(placement, mesh_sizes(mesh)))
            sharding = on_host(sharding) if leaf.sharding.memory_kind == HOST else sharding
            return jax.ShapeDtypeStruct(placement.shape, leaf.dtype, sharding=sharding)

        return self._each(self._abstract, canonical)

    @cached_property
    def _to_canonical(self) -> Callable[[TrainState], TrainState]:
        kept = lambda state: state if self.program.config.checkpoint.save_optimizer else replace(state, optimizer=None)  # noqa: E731
        if not self.converts:
            return kept
        target = kept(jax.tree.map(lambda s: s.sharding, replace(self._canonical_abstract, frozen={})))
        return jax.jit(lambda state: kept(self._each(state, self._canonical)), out_shardings=target)

    @cached_property
    def _to_stored(self) -> Callable[[TrainState], TrainState]:
        if not self.converts:
            return lambda state: state
        target = replace(self.program.state_shardings, frozen={}, master_low_bits={})
        return jax.jit(lambda state: self._each(state, self.stored_form), out_shardings=target)

    def _canonical(self, x: jax.Array, placement: Placement) -> jax.Array:
        return to_canonical(self._with_whole_rows(on_device(x), placement), placement)

    def stored_form(self, x: jax.Array, placement: Placement) -> jax.Array:
        """Canonical form → the form that devices hold, inside a jitted function."""
        return self._with_whole_rows(to_stored(on_device(x), placement), placement)

    def _with_whole_rows(self, x: jax.Array, placement: Placement) -> jax.Array:
        """Reorder layers while a device has a share of each; sharded over `pipeline`, every device would gather all."""
        if not placement.reordered:
            return x
        spec = unpadded_spec(placement, mesh_sizes(self.program.mesh))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.program.mesh, spec))

    def _each(self, state: TrainState, change: Callable) -> TrainState:
        """`change(leaf, placement)` for each parameter, in one piece, and slot; other leaves unchanged."""
        stored = replace(self.program.stored, master_low_bits={})
        stored = stored if state.frozen else replace(stored, frozen={})
        return jax.tree.map(lambda s, x: x if s.placement is None else change(x, s.placement), stored, state)

    def _as_tree(self, state: TrainState) -> dict[str, Any]:
        """The state in a checkpoint's form: layer state beside the other fields, named as in `saved_layer_state`."""
        left_out = ("frozen", "master_low_bits", "optimizer", *(() if state.ema else ("ema",)))
        tree = {name: getattr(state, name) for name in TrainState.__dataclass_fields__ if name not in left_out}
        if state.optimizer is not None:
            tree["optimizer"] = self.program.update.slots.on_disk(state.optimizer)
        return saved_layer_state(tree.pop("layer_state")) | tree

    def _from_tree(self, tree: dict[str, Any]) -> TrainState:
        """The inverse of `_as_tree`."""
        fields = {name: tree[name] for name in TrainState.__dataclass_fields__ if name in tree}
        fields["optimizer"] = self.program.update.slots.from_disk(fields["optimizer"])
        layer_state = {name: value for name, value in tree.items() if name not in fields}
        return TrainState(layer_state=loaded_layer_state(layer_state), **fields)


@jax.jit
def _checksum(weights: Mapping[str, jax.Array]) -> jax.Array:
    """The sum of the bits of all weights modulo 2^32; it does not depend on the mesh or on padding."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}
    bits = [jax.lax.bitcast_convert_type(w, unsigned[w.dtype.itemsize]) for w in weights.values()]
    return sum((b.astype(jnp.uint32).sum(dtype=jnp.uint32) for b in bits), jnp.uint32(0))


def _without_history[Leaf](state: Mapping[str, dict[str, Leaf]]) -> dict[str, dict[str, Leaf]]:
    """A layer state without FP8's amax histories."""
    return {kind: arrays for kind, arrays in state.items() if kind != FP8}


def _history_length(state: Any) -> int:
    """Number of steps in the amax histories of a layer state; 0 if there are none."""
    return next((leaf.shape[1] for leaf in state.get(FP8, {}).values()), 0)


def _base(frozen: Mapping[str, Any]) -> dict[str, Any]:
    """The frozen weights without a teacher's: those that adapters are added to."""
    return {name: w for name, w in frozen.items() if not name.startswith(TEACHER)}
