"""`hf compare`: the tensors of a Hugging Face folder and the weights of a run, difference by difference."""

import importlib
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from megajax.checkpoint import restore_model
from megajax.checkpoint.manager import find_checkpoint
from megajax.checkpoint.storage import SUBDIRECTORY
from megajax.checkpoint.weights import open_model, run_config
from megajax.config import ModelConfig
from megajax.console import command
from megajax.errors import InputError, counted
from megajax.hf.convert import in_order, open_readers
from megajax.model import Transformer, bind, parameters
from megajax.model.block import layer_state

PART = 2**18  # numbers that are compared at a time, in the processor's cache


@dataclass
class TensorDifference:
    """One tensor's differences."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the folder
    absolute: float = 0.0  # the largest |run - folder|
    relative: float = 0.0  # the largest |run - folder| / |folder|, where the folder's number is not 0
    unequal: int = 0  # numbers that differ after rounding the run's to the folder's dtype

    def add(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Count a block of the run, and the same block of the folder in its dtype."""
        ours, theirs = (np.ascontiguousarray(array).reshape(-1) for array in (ours, theirs))
        for start in range(0, ours.size, PART):
            self._add(ours[start : start + PART], theirs[start : start + PART])

    def _add(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        rounded, expected = ours.astype(theirs.dtype), theirs.astype(np.float32)
        if np.array_equal(ours, expected):
            return
        both_nan = np.isnan(ours) & np.isnan(expected)
        self.unequal += int(((rounded != theirs) & ~both_nan).sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = np.where(both_nan | (ours == expected), 0, np.abs(ours - expected))
            ratio = np.where((expected != 0) & (apart != 0), apart / np.abs(expected), 0)  # 0 / NaN is NaN
        self.absolute, self.relative = max(self.absolute, _largest(apart)), max(self.relative, _largest(ratio))

    def line(self) -> str:
        """One line of the report."""
        shape = "x".join(map(str, self.shape)) or "1"
        mark = f"  {counted(self.unequal, 'unequal number')}" if self.unequal else ""
        return f"{self.name}  [{shape}] {self.dtype}  {self.absolute:.3g}  {self.relative:.3g}{mark}"


def compare(folder: Path, run: str) -> list[TensorDifference]:
    """The differences of each tensor of `folder` from the newest checkpoint of a run, or from `RUN/checkpoints/STEP`.

    Reads in pieces. Raises InputError if the folder or the run is not readable, or if they are of other models.
    """
    run_dir, step = find_checkpoint(run, "RUN_DIR")
    config = run_config(run_dir, "RUN_DIR")
    model = config.model
    if config.lora.rank is not None:
        raise InputError(
            f"RUN_DIR={run} has adapters only (lora.rank={config.lora.rank}), and the tensors of a folder are merged: "
            "to check an export, compare the losses of both on the same texts, "
            f"{command('evaluate', run, '--data', 'FILE')} and {command('evaluate', folder, '--data', 'FILE')}."
        )
    checkpoint = run_dir / SUBDIRECTORY / str(step)
    params, layer_state = open_model(checkpoint, model)
    ours = params | layer_state
    found: dict[str, TensorDifference] = {}
    with open_readers(folder, model, {name: a.shape for name, a in ours.items()}, "HF_FOLDER") as readers:
        for name, reader in readers.items():
            for tensor, index, block in reader.blocks():
                if tensor not in found:
                    found[tensor] = TensorDifference(tensor, reader.weights.shape(tensor), block.dtype.name)
                numbers = ours[name][index].reshape(block.shape)
                found[tensor].add(reader.tensor.as_in_folder(numbers, block), block)
    return sorted(found.values(), key=lambda difference: in_order(difference.name))


def _largest(numbers: np.ndarray) -> float:
    """The largest number; infinite if one is NaN."""
    return float(np.where(np.isnan(numbers), np.inf, numbers).max(initial=0))


def summary(differences: list[TensorDifference], folder: Path, run: str) -> str:
    """The last line of the report."""
    worst = max(differences, key=lambda d: d.absolute)
    unequal = [d for d in differences if d.unequal]
    largest = f"largest difference {worst.absolute:.3g}" + (f", of {worst.name}" if worst.absolute else "")
    if not unequal:
        return f"{len(differences)} tensors of {folder} and {run} are the same in the folder's dtype; {largest}"
    return (
        f"{len(unequal)} of {len(differences)} tensors of {folder} and {run} differ by more than the rounding to the "
        f"folder's dtype; {largest}"
    )


def compare_logits(folder: Path, run: str, count: int = 32) -> str:
    """One line: the difference of both models' logits, in FP32 on the CPU, on `count` random tokens.

    Both models are in memory at the same time.
    """
    run_dir, step = find_checkpoint(run, "RUN_DIR")
    model = run_config(run_dir, "RUN_DIR").model
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (1, count))
    theirs = _their_logits(folder, tokens)
    ours = run_logits(run_dir / SUBDIRECTORY / str(step), model, tokens)
    apart = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    agree = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return (
        f"logits of {count} tokens: ||run - folder|| / ||folder|| = {apart:.3g}, largest difference "
        f"{np.abs(ours - theirs).max():.3g}, the same likeliest token for {agree} of {count}"
    )


def run_logits(checkpoint: Path, model: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits `[B, S, V]`, FP32, of a checkpoint's weights on tokens `[B, S]`."""
    # Without a capacity, because a few tokens say little about the load of experts.
    router = model.router.model_copy(update={"capacity_factor": None})
    network = Transformer(model.model_copy(update={"router": router}))
    device = SingleDeviceSharding(jax.devices()[0])

    def abstract(arrays):
        return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device) for name, a in arrays.items()}

    layer_states = {kind: abstract(states) for kind, states in layer_state(model).items()}
    params, state = restore_model(str(checkpoint), abstract(parameters(network)), layer_states, model, "RUN_DIR")
    return np.asarray(jax.jit(lambda p, s, t: bind(network, p)(t, state=s))(params, state, tokens))


def check_reference() -> None:
    """Raise InputError if `compare_logits` cannot import what it needs."""
    try:
        importlib.import_module("torch")
        importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"--logits needs torch and transformers ({error}): install both, or leave --logits out."
        ) from None


def _their_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        return model(torch.from_numpy(tokens)).logits.numpy()
