"""`python -m megajax.train CONFIG.yaml [section.key=value ...]`: parse → start → train."""

import sys

from megajax.config.cli import parse_command_line, user_errors
from megajax.runtime import prepare_environment


def main(argv: list[str]) -> int:
    """Train as the command line says; the exit status."""
    with user_errors():
        config = parse_command_line(argv, "megajax.train")
        flags = prepare_environment(config)

        # jax reads its environment when it starts: everything that imports it comes after.
        from megajax.mesh import start_processes
        from megajax.training.loop import Trainer

        start_processes()
        return Trainer(config, flags=flags).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
