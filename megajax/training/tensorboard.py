"""TensorBoard files."""

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class TensorBoardLog:
    """Scalars for TensorBoard, written in this thread: tensorboardX's own thread hangs the run if the disk is full."""

    def __init__(self, directory: Path, start_step: int, config: str):
        """`config` is shown as text."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
        from tensorboardX.summary import text

        directory.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"))
        # TensorBoard then ignores the steps that an interrupted run logged after its last checkpoint.
        self._add(Event(step=start_step + 1, file_version="brain.Event:2"))
        self._add(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))
        indented = "".join(f"    {line}\n" for line in config.splitlines())  # code, in Markdown
        self._add(Event(wall_time=time.time(), step=start_step, summary=text("config", indented)))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step, by tag."""
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboardX.summary import scalar

        for name, number in numbers.items():
            self._add(Event(wall_time=time.time(), step=step, summary=scalar(name, number)))
        with self._warning():
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        with self._warning():
            if self._writer is not None:
                self._writer.close()

    def _add(self, event: Any) -> None:
        with self._warning():
            if self._writer is not None:
                self._writer.write_event(event)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Around each write: a failed write is the last, since it may have left half a record."""
        try:
            yield
        except OSError as error:
            self._writer = None
            warnings.warn(f"TensorBoard files can't be written any more ({error.strerror}).", stacklevel=2)
