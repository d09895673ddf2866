"""Progress of preprocessing on stderr: a bar on a terminal, else a line every 10 seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megajax.errors import counted

LINE_SECONDS = 10.0  # between lines if stderr is not a terminal


def data_size(documents: int, tokens: int) -> str:
    """The size of a data set in words."""
    return f"{counted(documents, 'document')}, {counted(tokens, 'token')}"


class Progress:
    """Counts the work done; `show` gets the bytes done and a text with documents, tokens and tokens per second."""

    def __init__(self, show: Callable[[int, str], None]):
        self._show, self._start = show, time.perf_counter()
        self.stored_bytes = self.documents = self.tokens = 0

    def advance(self, stored_bytes: int, documents: int, tokens: int) -> None:
        """Adds bytes of the input files, and the documents and tokens in them."""
        self.stored_bytes += stored_bytes
        self.documents += documents
        self.tokens += tokens
        speed = self.tokens / max(self.seconds, 1e-9)
        self._show(self.stored_bytes, f"{data_size(self.documents, self.tokens)}, {speed:,.0f} tokens/s")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


@contextmanager
def show_progress(total_bytes: int, line_seconds: float = LINE_SECONDS) -> Iterator[Progress]:
    """The progress of reading files of `total_bytes` in total; call its `advance` after each part."""
    if sys.stderr.isatty():
        with _bar(total_bytes) as show:
            yield Progress(show)
    else:
        yield Progress(_lines(total_bytes, line_seconds))


@contextmanager
def _bar(total_bytes: int) -> Iterator[Callable[[int, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def _lines(total_bytes: int, seconds: float) -> Callable[[int, str], None]:
    start = last = time.perf_counter()

    def show(done: int, text: str) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= seconds:
            last, left = now, (now - start) * (total_bytes / max(done, 1) - 1)
            print(f"{done / max(total_bytes, 1):.0%}: {text}, {left:,.0f} s left", file=sys.stderr, flush=True)

    return show
