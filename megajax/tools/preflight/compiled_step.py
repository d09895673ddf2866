"""A config's train step compiled for H200s, without a GPU: its figures as one JSON object.

python -m megajax.tools.preflight.compiled_step CONFIG [section.key=value ...] [--gpus N]
"""

import argparse
import json
import resource
import sys
from collections.abc import Sequence

from megajax.config import load_config
from megajax.console import user_errors
from megajax.tools.plan.compile import compile_for_h200
from megajax.training.step import TrainProgram


def measure(config: str, overrides: Sequence[str], gpus: int, device: str = "h200") -> dict:
    """The step of a config, compiled for H200s without a GPU.

    Layers as (loops, layers of the body) of each segment, seconds of tracing and lowering, seconds of XLA, the peak
    memory of this process, and XLA's memory per device by part, in bytes. XLA reads its flags once per process, so each
    config has its own process.
    """
    step = compile_for_h200(TrainProgram.build, load_config(config, overrides), gpus, device=device)
    return {
        "segments": [(segment.loops, segment.unroll) for segment in step.program.graph.layers.segments],
        "lower_seconds": step.trace_seconds + step.lower_seconds,
        "xla_seconds": step.compile_seconds,
        "compiler_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10,
        "device_memory": step.memory,
    }


def main(arguments: list[str]) -> int:
    """Print the figures; the exit status."""
    parser = argparse.ArgumentParser(description="A config's step compiled for H200s, as JSON")
    parser.add_argument("config", help="path of a config")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", default="h200", help="device whose memory the compiler assumes (default: h200)")
    args = parser.parse_intermixed_args(arguments)
    with user_errors():
        print(json.dumps(measure(args.config, args.overrides, args.gpus, args.device)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
