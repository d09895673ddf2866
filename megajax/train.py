"""`python -m megajax.train CONFIG.yaml [section.key=value ...]`: parse → start → train."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from megajax import threads
from megajax.config import Config
from megajax.config.cli import parse_command_line
from megajax.console import INTERRUPTED, STOPPED, described, user_errors
from megajax.runtime import keep_compiled, prepare_environment, process_start_time
from megajax.training.ending import Ending
from megajax.training.leftovers import Leftovers
from megajax.training.requests import STOP_SIGNALS, read_by_a_thread


def main(argv: list[str]) -> int:
    """Train with the config of the command line; returns the exit status."""
    with user_errors():
        config = parse_command_line(argv, "megajax.train")
        leftovers, ending = Leftovers(config.run.dir), Ending(config)
        with _signals_end_the_process(ending, leftovers.remove):
            return _train(config, leftovers, ending)


def _train(config: Config, leftovers: Leftovers, ending: Ending) -> int:
    """Train; returns the exit status."""
    flags = prepare_environment(config)
    keep_compiled(config)

    # jax reads its environment when it starts, so modules that import it are imported here.
    from megajax.mesh import start_processes
    from megajax.start_checks import check_processes
    from megajax.training.watch import Watch

    start_processes(peer_timeout=config.run.peer_timeout_seconds)
    check_processes(config)  # before the watch, which reports a lost peer: here all end with the same error
    with Watch(config, ending) as watch, leftovers, user_errors():
        from megajax.training.loop import Trainer

        watch.status = Trainer(config, flags=flags, start_time=process_start_time(), watch=watch).run()
    return watch.status


@contextlib.contextmanager
def _signals_end_the_process(ending: Ending, clean_up: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and requests to stop end the process immediately, even in a compilation, except while the trainer runs.

    Python runs a handler only between two steps of the main thread, which waits for XLA. So the signal's number comes
    through a pipe to another thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        while number := os.read(reader, 1):
            if signal.getsignal(number[0]) is not read_by_a_thread:  # the trainer has it
                continue
            ending.begin()
            text, status = "stopped on request before the first step: there is nothing to save.", STOPPED
            if number[0] == signal.SIGINT:
                text, status = described(KeyboardInterrupt())
            shown = f"\nmegajax: error: {text}" if status == INTERRUPTED else f"megajax: {text}"
            print(shown, file=sys.stderr, flush=True)
            try:
                ending.tell("end", text, status)
                clean_up()
            finally:
                os._exit(status)
        os.close(reader)

    try:
        before = {number: signal.signal(number, read_by_a_thread) for number in (signal.SIGINT, *STOP_SIGNALS)}
    except ValueError:  # only the main thread may set signal handlers
        os.close(reader)
        os.close(writer)
        yield
        return
    wakeup = signal.set_wakeup_fd(writer)
    threads.start("the wait for signals", wait)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writer)  # ends the thread


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
