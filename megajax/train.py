"""`python -m megajax.train CONFIG.yaml [section.key=value ...]`: parse → start → train."""

import signal
import sys
import warnings

from megajax.config.cli import parse_command_line, user_errors
from megajax.runtime import prepare_environment, process_start_time


def main(argv: list[str]) -> int:
    """Train as the command line says; the exit status."""
    with user_errors():
        config = parse_command_line(argv, "megajax.train")
        flags = prepare_environment(config)

        # jax reads its environment when it starts: everything that imports it comes after.
        from megajax.mesh import start_processes
        from megajax.training.loop import Trainer

        start_processes()
        return Trainer(config, flags=flags, start_time=process_start_time()).run()


def _warn_in_a_line(message: Warning | str, *_: object, **__: object) -> None:
    print(f"megajax: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback, except while it trains
    warnings.showwarning = _warn_in_a_line
    sys.exit(main(sys.argv[1:]))
