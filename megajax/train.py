"""`megajax train CONFIG.yaml [section.key=value ...]`: parse → start → train.

The loop over the steps is `Trainer.run` in `training/loop.py`.
"""

import gc
import sys
import warnings

from megajax.cluster.environment import is_first_process
from megajax.config import Config
from megajax.config.cli import parse_command_line
from megajax.console import user_errors
from megajax.runtime import keep_compiled, prepare_environment, process_start_time
from megajax.training.ending import Ending, signals_end_the_process
from megajax.training.run_lock import Leftovers


def main(argv: list[str]) -> int:
    """Train with the config of the command line; returns the exit status."""
    with user_errors():
        with warnings.catch_warnings():
            if not is_first_process():
                warnings.simplefilter("ignore")  # about the config, which is the same in all processes
            config = parse_command_line(argv)
        leftovers, ending = Leftovers(config.run.dir), Ending(config)
        with signals_end_the_process(ending, leftovers.remove):
            return _train(config, leftovers, ending)


def _train(config: Config, leftovers: Leftovers, ending: Ending) -> int:
    """Train; returns the exit status."""
    flags = prepare_environment(config)
    keep_compiled(config)

    gc.disable()  # imports leave no garbage, and looking for it takes a fifth of their time
    # jax reads its environment when it starts, so modules that import it are imported here.
    from megajax.cluster.joining import start_processes
    from megajax.cluster.start_checks import check_processes
    from megajax.training.watch import Watch

    start_processes(peer_timeout=config.run.peer_timeout_seconds)
    check_processes(config)  # before the watch, which reports a lost peer: here all end with the same error
    with Watch(config, ending) as watch, leftovers, user_errors():
        from megajax.training.loop import Trainer

        gc.freeze()
        gc.enable()
        watch.status = Trainer(config, flags=flags, start_time=process_start_time(), watch=watch).run()
    return watch.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
