"""Measures a machine before a run: `megajax preflight [CONFIG [section.key=value ...]]`.

It measures the matmul rate of every device, the bandwidth of collectives within hosts, between hosts and along the axes
of the config's mesh, and the disk of the run directory. Start it like `megajax train`, with the same number of
processes. A device, link or disk below `--threshold` times the median of its equals is marked, and the exit status is
1; of CPU devices only the disks are compared.
Between hosts NCCL says which network it uses: TCP sockets instead of RDMA make the status 1 too.
`--rates FILE` then measures the rates that `megajax plan --rates FILE` reads.
"""

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megajax.command_parser import CommandParser
from megajax.config import Config, load_config
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.files import check_new_file
from megajax.runtime import accept_missing_cuda, prepare_environment
from megajax.tools.preflight import network
from megajax.tools.preflight.measurements import Sample, disk_rates, groups, link_rates, matmul_rates, report

VIRTUAL = "CPU devices share the cores of their host, so their rates are not compared and say nothing about GPUs"


def preflight(config: Config | None, options: argparse.Namespace, nccl_log: Path | None) -> int:
    """Measure in all processes and print the report on the first one; the exit status."""
    import jax

    from megajax import cluster
    from megajax.cluster.joining import start_processes
    from megajax.cluster.start_checks import check_processes
    from megajax.config.checks import check_mesh
    from megajax.mesh import build_mesh

    start_processes()
    here = cluster.current()
    if options.rates is not None:
        here.first_decides(lambda: check_new_file("--rates", options.rates))
    if config is not None:
        check_processes(config)
    host, hosts = socket.gethostname(), here.hosts
    on_gpu = jax.default_backend() == "gpu"
    sizes = None if config is None else check_mesh(config, jax.device_count(), here.size)
    mesh = None if sizes is None else build_mesh(sizes)
    disks = []
    if hosts.index(host) == here.rank:  # first, because a directory may be one that cannot be written
        directory = Path(options.directory or ("runs" if config is None else config.run.dir))
        disks = disk_rates(host, directory, options.disk_megabytes)
    samples = matmul_rates(host, options.matrix or (8192 if on_gpu else 512))
    samples += link_rates(groups(jax.devices(), hosts, mesh), options.megabytes or (256 if on_gpu else 4)) + disks

    def judge(found: list[Any]) -> int:
        table, outliers = report([Sample(*s) for each in found for s in each["samples"]], options.threshold, not on_gpu)
        line, problems = network.report([each["network"] for each in found], len(set(hosts)))
        outliers += problems
        print(table, *filter(None, [line, "" if on_gpu else VIRTUAL]), sep="\n")
        print("\n".join(["", *outliers]) if outliers else f"\nnothing is below {options.threshold:g} of its median")
        return int(bool(outliers))

    status = here.agree({"samples": samples, "network": network.chosen(nccl_log)}, judge)
    if options.rates is not None:
        measure_rates(options.rates, hosts)
    return status


def config_of_rates() -> Config:
    """A config whose XLA flags the measurements need: with a `tensor` axis, permutations are copies."""
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8}
    batch = {"global_size": 1, "sequence_length": 8}
    values = {"model": model, "batch": batch, "data": {"kind": "synthetic"}, "mesh": {"data": 1, "tensor": -1}}
    return Config.model_validate(values)


def measure_rates(path: Path, hosts: Sequence[str]) -> None:
    """Measure the rates in all processes; the first one writes the file and prints the report."""
    import jax

    from megajax import cluster
    from megajax.tools.preflight import rates

    machine = rates.Machine(jax.devices()[0].device_kind, jax.device_count(), len(set(hosts)))

    def finish(found: list[Any]) -> None:
        answers = [rates.Answer([rates.Timing(*each) for each in timings], memory) for timings, memory in found]
        print(rates.finish(path, machine, answers))

    cluster.current().agree(rates.measure(hosts), finish)


def main(arguments: list[str]) -> int:
    """Measure and report; the exit status: 1 if something is slow."""
    parser = CommandParser(
        "megajax.tools.preflight.__main__", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", nargs="*", metavar="CONFIG [section.key=value ...]", help="as for megajax train")
    parser.add_argument("--threshold", type=float, default=0.8, help="least share of the median (default: 0.8)")
    parser.add_argument("--megabytes", type=int, help="MB per device in collectives (default: 256; CPUs: 4)")
    parser.add_argument("--matrix", type=int, help="rows and columns of the matrices (default: 8192; CPUs: 512)")
    parser.add_argument("--disk-megabytes", type=int, default=1024, help="MB written to the disk (default: 1024)")
    parser.add_argument("--directory", help="where they are written (default: the config's run.dir, or runs)")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="also write the measured rates for megajax plan")
    with user_errors():
        options = parser.parse_intermixed_args(arguments)
        for name in ("threshold", "megabytes", "matrix", "disk_megabytes"):
            if (value := getattr(options, name)) is not None and value <= 0:
                raise InputError(f"--{name.replace('_', '-')}={value} is not positive: give a larger number.")
        if options.threshold > 1:
            raise InputError(f"--threshold={options.threshold:g} is above 1: give a share of the median, such as 0.8.")
        config = load_config(options.run[0], options.run[1:]) if options.run else None
        nccl_log = network.listen()
        if options.rates is not None:
            if config is not None:
                raise InputError(f"--rates={options.rates} needs no config: leave {options.run[0]} out.")
            prepare_environment(config_of_rates())
        elif config is None:
            accept_missing_cuda()
        else:
            prepare_environment(config)
        return preflight(config, options, nccl_log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
