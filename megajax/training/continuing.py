"""A run that goes on with the training of a checkpoint of another program (`checkpoint.init_state`)."""

import math
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.description import SettingDifference, config_allows, differences, refuse_changes
from megajax.config import Config
from megajax.config.sentences import format_keys
from megajax.errors import InputError
from megajax.hf.reader import on_devices
from megajax.optim import make_schedule
from megajax.optim.optimizer import OptimizerState
from megajax.optim.slots import SlotArray
from megajax.schema.batch_schedule import Position
from megajax.sources import Weights, initial_weights, refuse_not_finite
from megajax.training.agreement import check_order
from megajax.training.saving import StateSaver
from megajax.training.step import TrainState

STATE, KIND = "checkpoint.init_state", "optimizer.kind"
# The arrays of Megatron-LM's optimizers that mean the same as our slots, by `optimizer.kind`
STATES = {
    "adamw": {"mu": "exp_avg", "nu": "exp_avg_sq"},
    "lion": {"mu": "exp_avg"},
    "sgd": {"trace": "momentum_buffer"},
}


class ContinuedTraining:
    """The training of the checkpoint in `checkpoint.init_from`, from which a run without checkpoints goes on.

    position: its step and its position in the data; allowed: the settings that differ and that
    `checkpoint.allow_changes` names.
    """

    def __init__(self, saver: StateSaver):
        """Raises InputError for a training whose data this run would not continue. No array is read."""
        self._saver, self._program, self._config = saver, saver.program, saver.program.config
        self._source = initial_weights(self._config)
        self.saved = self._source.training()
        self.position = Position(self.saved.step, self.saved.samples)
        self.allowed = self._compared()
        self._states = self._states_of_slots() if self._takes_all else {}

    @staticmethod
    def of(saver: StateSaver) -> "ContinuedTraining | None":
        """None if the run begins at step 0."""
        wanted: Config = saver.program.config
        starts = wanted.checkpoint.init_from is None or wanted.checkpoint.init_state == "weights"
        return None if starts else ContinuedTraining(saver)

    @property
    def _takes_all(self) -> bool:
        return self._config.checkpoint.init_state == "all"

    def weights(self) -> Weights:
        """The weights in canonical shapes: with the optimizer's state its FP32 master weights."""
        assert self._config.checkpoint.init_from is not None
        if not self._takes_all:
            return self._saver.restore_weights(self._config.checkpoint.init_from)
        params, layer_state = self._saver.canonical_weights
        with self._opened() as readers:
            weights = on_devices(readers[""], params, layer_state)
        refuse_not_finite(weights, self._source.shown)
        return weights

    def into(self, state: TrainState) -> TrainState:
        """A first state with the weights → the state after the training's step."""
        now = jax.device_put(np.int32(self.saved.step), state.step.sharding)
        state = replace(state, step=now)
        if self._takes_all:
            state = replace(state, optimizer=self._with_slots(state.optimizer))
        self._warn_of_another_rate()
        return state

    def __str__(self) -> str:
        optimizer = f"its optimizer after {self.saved.updates} updates" if self._takes_all else "a new optimizer"
        return f"going on after {self.saved}, with {self.saved.samples} samples read and {optimizer}"

    def _compared(self) -> list[SettingDifference]:
        """The settings that differ and are allowed. Raises InputError for others, and for another order of the data."""
        settings, mine = self.saved.settings, self._saver.description(self.saved.step)
        known = {section: {key: mine[section].get(key) for key in keys} for section, keys in settings.items()}
        found = differences(settings, known, tuple(settings))
        name = f"the checkpoint {self.saved.folder}"
        refuse_changes(found, self._config, name, f"set {STATE}=weights to start at step 0")
        if all(not config_allows(self._config, each) for each in found):
            check_order(self._config, self.position, settings["data"].get("samples"), name)
        return found

    def _states_of_slots(self) -> dict[str, str]:
        """Megatron-LM's name of each slot."""
        members = self._program.update.slots.members
        for member in members:
            if member.kind not in STATES:
                raise InputError(
                    f"{format_keys(self._config, KIND)} keeps other arrays than those that are read from Megatron-LM "
                    f"(of {', '.join(STATES)}): choose the optimizer of {self._source.shown}, or set {STATE}=position "
                    "to begin without its state."
                )
        [member] = members
        return {slot.name: STATES[member.kind][slot.name] for slot in member.optimizer.slots() if slot.shape == "like"}

    def _opened(self) -> Any:
        """The readers of the training's arrays, after their names and shapes are checked."""
        params, _ = self._saver.canonical_weights
        shapes = {name: array.shape for name, array in params.items()}
        optimizer = format_keys(self._config, KIND)
        return self._source.open_training(self._config.model, shapes, [*self._states.values()], optimizer)

    def _with_slots(self, optimizer: Any) -> Any:
        """The optimizer's state with the training's arrays and counts in place of zeros."""
        slots, updates = self._program.update.slots, np.int32(self.saved.updates)
        shardings = self._program.state_shardings.optimizer.slots

        def count(old: jax.Array) -> jax.Array:
            return jax.device_put(updates, old.sharding)

        with self._opened() as readers:

            def read(array: SlotArray, sharding: Any) -> Any:
                zeros = [by[array.slot].get(array.parameter) for by in optimizer.slots.values() if array.slot in by]
                jax.tree.map(lambda x: x.delete(), zeros)  # there is room for one of them; in files there are none
                return self._slot(array, readers[self._states[array.slot]][array.parameter], sharding)

            wanted = {
                kind: {n: shardings[kind][n] if isinstance(own, dict) else count(own) for n, own in by.items()}
                for kind, by in optimizer.slots.items()
            }
            found = slots.each(read, wanted)
        rounded = None if optimizer.rounded is None else count(optimizer.rounded)
        return OptimizerState(rounded, found)

    def _slot(self, array: SlotArray, reader: Any, sharding: Any) -> Any:
        """A slot as stored on the devices, one at a time, so that FP32 numbers of all are never there together."""
        params, _ = self._saver.canonical_weights
        x = reader.on_devices(params[array.parameter].sharding, jnp.float32)
        refuse_not_finite(({f"{array.slot} of {array.parameter}": x}, {}), self._source.shown)
        encode = jax.jit(
            lambda x: array.encode(self._saver.stored_form(x, array.placement), jnp.int32(self.saved.updates)),
            out_shardings=sharding,
        )
        return encode(x)

    def _warn_of_another_rate(self) -> None:
        """Warn if the next step has another learning rate than there."""
        there, step = self.saved.rate, self.saved.step + 1
        here = np.asarray(make_schedule(self._config.schedule)(step)).item()
        if there is None or math.isclose(there, here, rel_tol=1e-3, abs_tol=1e-12):
            return
        warnings.warn(
            f"the learning rate of step {step} is {here:.3g}, but {there:.3g} in {self.saved.folder}: set the section "
            "schedule as in its launch line to keep it, with schedule.delay_steps=1.",
            stacklevel=2,
        )
