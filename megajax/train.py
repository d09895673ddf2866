"""`python -m megajax.train CONFIG.yaml [section.key=value ...]`: parse → start → train."""

import contextlib
import signal
import sys
from collections.abc import Iterator

from megajax.config.cli import parse_command_line
from megajax.console import user_errors
from megajax.runtime import prepare_environment, process_start_time


def main(argv: list[str]) -> int:
    """Train as the command line says; the exit status."""
    with user_errors(), _interrupts_end_the_process():
        config = parse_command_line(argv, "megajax.train")
        flags = prepare_environment(config)

        # jax reads its environment when it starts: everything that imports it comes after.
        from megajax.mesh import start_processes
        from megajax.training.loop import Trainer

        start_processes()
        return Trainer(config, flags=flags, start_time=process_start_time()).run()


@contextlib.contextmanager
def _interrupts_end_the_process() -> Iterator[None]:
    """Ctrl-C ends the process wherever it is, in a compilation too, except while the trainer saves and stops."""
    before = None
    with contextlib.suppress(ValueError):  # signals belong to the main thread
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
