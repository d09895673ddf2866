"""`python -m megajax.train CONFIG.yaml [section.key=value ...]`: parse → start → train."""

import contextlib
import signal
import sys
from collections.abc import Iterator

from megajax.config.cli import parse_command_line
from megajax.console import user_errors
from megajax.runtime import keep_compiled, prepare_environment, process_start_time


def main(argv: list[str]) -> int:
    """Train with the config of the command line; returns the exit status."""
    with user_errors(), _interrupts_end_the_process():
        config = parse_command_line(argv, "megajax.train")
        flags = prepare_environment(config)
        keep_compiled(config)

        # jax reads its environment when it starts, so modules that import it are imported here.
        from megajax.mesh import start_processes
        from megajax.start_checks import check_processes
        from megajax.training.watch import Watch

        start_processes(peer_timeout=config.run.peer_timeout_seconds)
        check_processes(config)  # before the watch, which reports a lost peer: here all end with the same error
        with Watch(config) as watch, user_errors():
            from megajax.training.loop import Trainer

            watch.status = Trainer(config, flags=flags, start_time=process_start_time(), watch=watch).run()
        return watch.status


@contextlib.contextmanager
def _interrupts_end_the_process() -> Iterator[None]:
    """Ctrl-C ends the process immediately, even in a compilation, except while the trainer handles it."""
    before = None
    with contextlib.suppress(ValueError):  # only the main thread may set signal handlers
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
