"""Folders in Hugging Face's format that a training run writes from its checkpoints: `checkpoint.export_hf`."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from megajax import cluster, threads
from megajax.checkpoint import reason
from megajax.config import Config
from megajax.config.sentences import located
from megajax.errors import InputError, UserError
from megajax.model import Transformer, parameters
from megajax.training.hooks import Hook, RunView


class Exports(Hook):
    """Process 0 writes a folder at a time, in a thread that reads the complete checkpoint from the disk.

    So training does not wait, on any mesh, except before a checkpoint may be removed. A failure is a warning; training
    continues.
    """

    def __init__(self, config: Config, say: Callable[[str, bool], None]):
        """`say(line, whether it is a warning)` tells the user.

        Raises InputError if no family of models has the config's model, or if it cannot be quantised so.
        """
        from megajax.hf.convert import check_export  # here, because it needs safetensors

        self.config, self._say = config, say
        self._settings = config.checkpoint.export_hf
        assert self._settings.dir is not None
        self._directory = Path(self._settings.dir)
        self._key = located(config, "checkpoint.export_hf.dir")
        try:
            names = parameters(Transformer(config.model, objective=config.objective)).keys()
            check_export(config.model, names, self._settings.quantization)
        except InputError as error:
            raise InputError(f"{self._key}: {error}") from None
        self._thread: Thread | None = None
        self._result = ("", False)

    def check_directory(self) -> None:
        """Make the directory of the folders, and remove those that a killed process left unfinished.

        Raises InputError if it cannot be written.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for partial in self._directory.glob(".step-*.partial-*"):
                shutil.rmtree(partial)
        except OSError as error:
            raise InputError(
                f"{self._key} cannot be written ({error.strerror}): choose a directory that you may write to."
            ) from None

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of `step` becomes a folder."""
        every = self._settings.every or self.config.run.checkpoint_interval
        return step == self.config.run.steps or bool(every) and step % every == 0

    def on_save(self, run: RunView, step: int) -> None:
        """Start writing the folder of a complete checkpoint, if it is due, after the last one is complete."""
        if cluster.current().is_first and self.is_due(step):
            self._report(wait=True)
            self._thread = threads.start("the export", self._write, step)

    def on_step(self, run: RunView) -> None:
        self._report(wait=run.is_ending)

    def before_removal(self, run: RunView) -> None:
        self._report(wait=True)

    def _report(self, wait: bool) -> None:
        """Report the result of a folder that has been written since; `wait` for one that is being written."""
        if self._thread is not None and (wait or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
            self._say(*self._result)

    def _write(self, step: int) -> None:
        from megajax.hf.exporting import export_step

        folder, start = self._directory / f"step-{step}", time.perf_counter()
        try:
            export_step(
                Path(self.config.run.dir), step, self.config, folder, self._settings.dtype, self._settings.quantization
            )
        except UserError as error:
            self._result = str(error).rstrip("."), True
        except Exception as error:  # such as a lack of memory: the checkpoint is complete, so it must not end the run
            self._result = f"{folder} could not be written ({reason(error)})", True
        else:
            self._result = f"wrote {folder} ({time.perf_counter() - start:.1f} s)", False
