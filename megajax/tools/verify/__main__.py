"""Does a mesh train the same model as one device? Compares both on virtual CPU devices.

    megajax verify CONFIG [section.key=value ...] [--mesh tensor=4,pipeline=2] [--mesh ...]

The config is made small first: it keeps the structure and the options of the model; sizes are reduced. FP8 is kept;
everything else is computed in FP32, also where the config uses BF16, so that any difference above rounding is an error.
The exit status is 0 if all meshes agree with one device, 1 if one differs, 2 for a mistake in the input.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megajax.command_parser import CommandParser
from megajax.config import AXES, Config, load_config
from megajax.config.checks import check_mesh
from megajax.config.mesh_checks import read_mesh
from megajax.console import user_errors
from megajax.errors import ConfigError, InputError
from megajax.options.registered import ENCODER_KIND, NO_ENCODER
from megajax.runtime import CPU_DEVICES, accept_missing_cuda, threads_of
from megajax.schema.model import LAYERS

DEVICES = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = CommandParser(
        "megajax.tools.verify.__main__", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--mesh", action="append", help="mesh to compare; default: the config's, sizes reduced to 2")
    parser.add_argument("--steps", type=int, default=3, help="number of steps (default: 3)")
    parser.add_argument("--checkpoint", action="store_true", help="also resume on the other mesh halfway")
    help_of_precision = "linear layers in FP8, or all in one format (default: fp8 if the config has it, else float32)"
    parser.add_argument("--precision", choices=("fp8", "float32", "bfloat16"), help=help_of_precision)
    with user_errors():
        options = parser.parse_intermixed_args(arguments)
        # jax reads its environment when it is imported, so modules that import it are imported below.
        os.environ["JAX_PLATFORMS"] = "cpu"
        accept_missing_cuda()
        # Of two the last counts: a number of the user's, for other commands, may be too small for a mesh.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CPU_DEVICES}={DEVICES}"
        os.environ |= threads_of(DEVICES) | os.environ
        if options.steps < 1:
            raise InputError(f"--steps={options.steps} is below 1: give 1 or more.")
        config = load_config(options.config, options.overrides)
        if config.model.encoder.kind not in (NO_ENCODER, LAYERS):
            problem = f"verify has no batches for a registered encoder ({config.where(ENCODER_KIND)})"
            raise ConfigError(f"{problem}: compare its meshes in a test of your own, as docs/examples does.")
        if options.checkpoint:
            check_checkpoint(config, options.steps)
        precision = options.precision or ("fp8" if config.precision.fp8.chosen.is_on else "float32")
        if precision == "fp8" and not config.precision.fp8.chosen.is_on:
            where = config.where("precision.fp8.recipe")
            raise ConfigError(
                f"--precision=fp8, but precision.fp8.recipe=none ({where}): set it to current or delayed."
            )
        if not options.mesh:
            meshes = [own_mesh(config)]
        else:
            given = {text: dict.fromkeys(AXES, 1) | read_mesh(text, "--mesh") for text in options.mesh}
            meshes = [limited(sizes, f"--mesh={text}", "make it smaller") for text, sizes in given.items()]
        for sizes in meshes:
            with_mesh = config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})
            check_mesh(with_mesh, math.prod(sizes.values()))
        from megajax.tools.verify.report import report

        return report(config, meshes, options.steps, precision, options.checkpoint)


def check_checkpoint(config: Config, steps: int) -> None:
    """Raises ConfigError or InputError if no step can follow a checkpoint."""
    if steps < 2:
        raise InputError(f"--checkpoint saves between steps, and --steps={steps}: use 2 or more.")
    if not config.checkpoint.save_optimizer:
        where = config.where("checkpoint.save_optimizer")
        raise ConfigError(
            f"checkpoint.save_optimizer=false ({where}) saves weights only, so --checkpoint has nothing to continue: "
            "add checkpoint.save_optimizer=true to the command."
        )


def own_mesh(config: Config) -> dict[str, int]:
    """The config's mesh with 2 in place of -1 and larger sizes; stages of a `pipeline.layout` keep their number."""
    sizes: dict[str, int] = {axis: 1 if getattr(config.mesh, axis) == 1 else 2 for axis in AXES}
    if config.pipeline.layout:
        sizes["pipeline"] = config.mesh.pipeline
    if math.prod(sizes.values()) == 1:
        raise InputError("the config's mesh is one device: give a mesh to compare, such as --mesh tensor=2,fsdp=2.")
    return limited(sizes, "the config's mesh, with sizes of 2,", "give a smaller one with --mesh")


def limited(sizes: dict[str, int], name: str, cure: str) -> dict[str, int]:
    """The sizes, if DEVICES are enough for them. Raises ConfigError."""
    count = math.prod(sizes.values())
    if count > DEVICES:
        raise ConfigError(f"{name} needs {count} devices; verify has {DEVICES} virtual ones: {cure}.")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
