"""Starts the processes of a run on one host, and starts them again after a crash.

    megajax launch [--max-restarts N] [--processes P] CONFIG.yaml [section.key=value ...]

A restart resumes from the newest checkpoint. If devices are gone, it uses the largest number of the others that fits
the config, which needs an axis of -1 in `mesh`; `batch.global_size` stays the same.
"""

import argparse
import contextlib
import ctypes
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from megajax.command_parser import CommandParser
from megajax.config import Config, load_config
from megajax.config.checks import check_mesh
from megajax.console import BAD_NUMBERS, DONE, INTERRUPTED, LOST, MISTAKE, STOPPED, user_errors
from megajax.errors import ConfigError, InputError, counted
from megajax.files import is_number, read_text, whole_number
from megajax.restart_sign import RestartSign
from megajax.runtime import CPU_DEVICES, virtual_devices
from megajax.training.ending import Ending

FINAL = (DONE, MISTAKE, BAD_NUMBERS, INTERRUPTED)  # never restarted
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
OF_A_CLUSTER = {"JAX_NUM_PROCESSES": 0, "SLURM_NTASKS": 1, "OMPI_COMM_WORLD_SIZE": 1}  # the largest value without one
PR_SET_PDEATHSIG = 1


class Waits(NamedTuple):
    """Seconds."""

    crash: float = 5  # for the other processes to end, after the first crashed
    mistake: float = 60  # the same after a mistake
    drain: float = 5  # for the rest of their output
    longest_pause: float = 60  # before a restart: 1, 2, 4, ... up to this


WAITS = Waits()


def working_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """This host's devices: UUIDs of the GPUs that answer, out of CUDA_VISIBLE_DEVICES; else numbers of CPU devices."""
    platforms = environment.get("JAX_PLATFORMS") or "cuda"
    if shutil.which("nvidia-smi") and {"cuda", "gpu"} & set(platforms.split(",")):
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        gpus = re.findall(r"^GPU (\d+): .*\(UUID: (GPU-[\w-]+)\)", listed.stdout, re.M)
        chosen = environment.get("CUDA_VISIBLE_DEVICES")
        if chosen is None:
            return [uuid for _, uuid in gpus]
        wanted = [entry.strip() for entry in chosen.split(",")]
        return [uuid for entry in wanted for number, uuid in gpus if entry == number or _is_start(entry, uuid)]
    return [str(number) for number in range(virtual_devices(environment) or 1)]


def _is_start(entry: str, uuid: str) -> bool:
    return len(entry) > len("GPU-") and uuid.startswith(entry)


def usable_devices(config: Config, devices: list[str], processes: int) -> list[str]:
    """The first of `devices`, as many as fit the config. Raises ConfigError if no number of them does."""
    refused = None
    for count in range(len(devices), 0, -1):
        try:
            check_mesh(config, count, number_of_processes(count, processes))
            return devices[:count]
        except ConfigError as error:
            refused = refused or error
    raise refused or ConfigError("no device of this host is left: look at nvidia-smi.")


def number_of_processes(devices: int, wanted: int) -> int:
    """The largest number of processes up to `wanted` (0: one per device) that share `devices` evenly."""
    return max(n for n in range(1, min(wanted or devices, devices) + 1) if devices % n == 0)


def child_environments(devices: list[str], processes: int) -> list[dict[str, str]]:
    """The variables that each process has besides the launcher's: its devices, and how it finds the others."""
    each = len(devices) // processes
    shared: dict[str, str] = {}
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        # By default the coordinator accepts connections from other hosts too.
        shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": address}
    if devices[0].startswith("GPU-"):
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    else:
        other_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(CPU_DEVICES)]
        shared["XLA_FLAGS"] = " ".join([*other_flags, f"{CPU_DEVICES}={each}"])
    if processes == 1:
        return [shared]
    return [
        shared
        | {
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(index),
            "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(index * each, (index + 1) * each))),
        }
        for index in range(processes)
    ]


class Child:
    """One process of the run, the leader of a process group that its data workers belong to."""

    def __init__(self, index: int, command: list[str], environment: dict[str, str], prefixed: bool):
        """`prefixed`: its output goes through this process, which writes its number before each line."""
        self.index = index
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE if prefixed else None,
            stderr=subprocess.PIPE if prefixed else None,
            start_new_session=True,  # Ctrl-C reaches the launcher only, which forwards it
        )

    def has_ended(self) -> bool:
        """Whether it has ended; then its workers are ended too."""
        if self.process.returncode is None:
            # The group is ended before its leader is reaped: until then no other process can have its number.
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self._kill_group()
            self.process.wait()
        return True

    def kill(self) -> None:
        """End it and its workers at once, if it still runs."""
        if not self.has_ended():
            self._kill_group()
            self.process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Output:
    """The output of several children, line by line, each line after the number of its process."""

    def __init__(self, children: list[Child]):
        self._selector, self._begun = selectors.DefaultSelector(), {}
        for child in children:
            for pipe, target in ((child.process.stdout, sys.stdout), (child.process.stderr, sys.stderr)):
                if pipe is not None:
                    self._selector.register(pipe, selectors.EVENT_READ, (child.index, target))
                    self._begun[pipe] = b""

    def copy(self, seconds: float) -> None:
        """Copy lines as soon as some come, or nothing after `seconds`."""
        for key, _ in self._selector.select(seconds):
            assert not isinstance(key.fileobj, int)
            read = os.read(key.fd, 2**16)
            *lines, rest = (self._begun[key.fileobj] + read).split(b"\n")
            if not read:
                lines, rest = [rest] if rest else [], b""
                self._selector.unregister(key.fileobj)
            self._begun[key.fileobj] = rest
            index, target = key.data
            self._write(index, target, lines)

    def close(self, seconds: float) -> None:
        """Copy the rest, for at most `seconds`: a foreign process may have inherited the pipes."""
        end = time.monotonic() + seconds
        while self._selector.get_map() and time.monotonic() < end:
            self.copy(0.1)
        self._selector.close()

    def _write(self, index: int, target: IO[str], lines: list[bytes]) -> None:
        for line in lines:
            target.write(f"[{index}] {line.decode(errors='replace')}\n")
        target.flush()


class Launcher:
    """A run's processes on this host: `run` starts them until the run ends."""

    def __init__(self, config: Config, arguments: list[str], processes: int, max_restarts: int, waits: Waits = WAITS):
        """`arguments` of `megajax.train`; `processes`: 0 for one per device; `max_restarts` without a new checkpoint.

        Raises InputError if the processes cannot share the devices evenly.
        """
        self.config, self.arguments = config, arguments
        self.processes, self.max_restarts, self.waits = processes, max_restarts, waits
        self.devices = working_devices()
        if not self.devices:
            raise InputError("no GPU of this host answers: look at nvidia-smi, or set JAX_PLATFORMS=cpu.")
        if processes and len(self.devices) % processes:
            raise InputError(
                f"--processes={processes} does not divide the {counted(len(self.devices), 'device')} of this host: "
                "choose another number, or devices with CUDA_VISIBLE_DEVICES; on CPUs make "
                f"them with XLA_FLAGS=--xla_force_host_platform_device_count={processes}."
            )
        self._received: list[int] = []  # signals that are not forwarded yet
        self._asked: set[int] = set()
        self._sign = RestartSign(config.run.dir)

    def run(self) -> int:
        """Start the processes, and again after each crash; the exit status of the last start."""
        failures, newest = 0, self._newest_step()
        with self._signals(), self._sign:
            while True:
                status = self._start()
                if self._ends_with(status):
                    return self._passed_on(status)
                try:
                    step = self._newest_step()
                except InputError as error:  # a bucket that does not answer may do so again at the restart
                    _say(str(error))
                    step = newest
                # A stop on request, even before the first checkpoint, is no failure: somebody needed the host.
                failures, newest = (failures if step == newest else 0) + (status != STOPPED), step
                if failures > self.max_restarts:
                    since = "without a checkpoint" if step is None else f"since the checkpoint of step {step}"
                    starts = counted(failures, "start")
                    _say(f"giving up: {starts} ended early {since} (--max-restarts={self.max_restarts})")
                    return _shell_status(status)
                try:
                    self.devices = self._devices_left()
                except ConfigError as error:
                    _say(f"no restart, because too few devices are left: {error}")
                    return _shell_status(status)
                pause = min(2 ** max(failures - 1, 0), self.waits.longest_pause)
                newest_is = "there is no checkpoint yet" if step is None else f"the newest checkpoint is of step {step}"
                _say(f"restart in {pause} s on {counted(len(self.devices), 'device')}; {newest_is}")
                end = time.monotonic() + pause
                self._sign.give()
                while time.monotonic() < end and not self._received:
                    self._sign.renew()
                    time.sleep(0.05)
                if self._received:
                    return INTERRUPTED if signal.SIGINT in self._received else STOPPED

    def _ends_with(self, status: int) -> bool:
        """Whether the launcher ends after this status of the run, in place of a restart."""
        over = status == STOPPED and self.config.run.max_minutes is not None
        return status in FINAL or bool(self._asked) or over

    def command(self) -> list[str]:
        """The command of a process."""
        return [sys.executable, "-m", "megajax.launch", "--child", str(os.getpid()), "--", *self.arguments]

    def _start(self) -> int:
        """Run all processes to their end; the status of the first one that failed, or 0."""
        count = number_of_processes(len(self.devices), self.processes)
        children: list[Child] = []
        try:
            for index, environment in enumerate(child_environments(self.devices, count)):
                children.append(Child(index, self.command(), environment, prefixed=count > 1))
            output = Output(children)
            first = self._wait(children, output)
        finally:
            for child in children:
                child.kill()
        output.close(self.waits.drain)
        if first is None:
            return DONE
        self._tell(children, first)
        return first.process.returncode

    def _tell(self, children: list[Child], first: Child) -> None:
        """Send the event that process 0, or process 1 if that one is lost, could not send before a signal ended it."""
        statuses, ending = [child.process.returncode for child in children], Ending(self.config)
        if statuses[0] < 0 and LOST not in statuses[:2] and -first.process.returncode not in self._asked:
            ending.speaks = True
            text = f"process {first.index} {_ending(first.process.returncode)}."
            ending.tell("lost", text, _shell_status(first.process.returncode))

    def _wait(self, children: list[Child], output: Output) -> Child | None:
        """Wait for all processes, after a failure for a short time; the first one that failed."""
        first, end = None, float("inf")
        running = list(children)
        while running and time.monotonic() < end:
            output.copy(0.05)
            self._sign.renew()
            self._forward(running)
            ended = [child for child in running if child.has_ended()]
            running = [child for child in running if child not in ended]
            # Of processes that end together, one with a mistake is the cause of the others' crash.
            failed = sorted((c for c in ended if c.process.returncode), key=lambda c: c.process.returncode not in FINAL)
            if first is None and failed:
                first = failed[0]
                status = first.process.returncode
                if not self._ends_with(status):
                    self._sign.give()  # the lock may be gone before the other processes are
                if status not in FINAL + (STOPPED,):
                    _say(f"process {first.index} {_ending(status)}")
                if status != STOPPED:
                    end = time.monotonic() + (self.waits.mistake if status in FINAL else self.waits.crash)
        return first

    def _forward(self, running: list[Child]) -> None:
        while self._received:
            number = self._received.pop(0)
            self._asked.add(number)
            for child in running:
                os.kill(child.process.pid, number)  # Popen.send_signal may reap it, and its workers would be left

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {s: signal.signal(s, lambda number, _: self._received.append(number)) for s in FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _passed_on(self, status: int) -> int:
        # A process that has not come to its first step ends at once on a signal, and has nothing to save.
        return STOPPED if -status in self._asked - {signal.SIGINT} else _shell_status(status)

    def _newest_step(self) -> int | None:
        """The step of the newest checkpoint, durable or local."""
        from megajax.checkpoint import complete_steps  # here, because it imports jax
        from megajax.training.local_saves import RUN_ID, tier_name

        run_dir, local_dir = Path(self.config.run.dir).resolve(), self.config.checkpoint.local_dir
        steps = complete_steps(run_dir)
        if local_dir is not None and (run_dir / RUN_ID).is_file():
            saved = Path(local_dir, tier_name(run_dir, read_text(run_dir / RUN_ID))).glob("process-*/*")
            steps += [int(path.name) for path in saved if is_number(path.name)]
        return max(steps, default=None)

    def _devices_left(self) -> list[str]:
        working = working_devices()
        left = [device for device in self.devices if device in working]
        if left == self.devices:
            return left
        gone = len(self.devices) - len(left)
        if left:  # else the error says so
            _say(f"{gone} of {len(self.devices)} devices {'is' if gone == 1 else 'are'} gone")
        return usable_devices(self.config, left, self.processes)


def _ending(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _shell_status(status: int) -> int:
    return 128 - status if status < 0 else status


def _say(text: str) -> None:
    print(f"megajax launch: {text}", file=sys.stderr, flush=True)


def run_child(parent: int, arguments: list[str]) -> int:
    """Train in this process, which ends when its parent, the launcher, ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        return LOST
    from megajax.train import main as train

    return train(arguments)


def main(arguments: list[str]) -> int:
    """Run the launcher; the exit status."""
    parser = CommandParser("megajax.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", metavar="CONFIG [section.key=value ...]", help="as for megajax train")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="N",
        help="give up after N restarts in a row without a newer checkpoint (default: 3)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="P",
        help="processes that share the host's devices evenly, 0: one per device (default: 1)",
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)  # in a process that the launcher started
    with user_errors():
        options = parser.parse_args(arguments)
        if options.child is not None:
            return run_child(options.child, options.run)
        for name in ("max_restarts", "processes"):
            if getattr(options, name) < 0:
                raise InputError(f"--{name.replace('_', '-')}={getattr(options, name)} is negative: give 0 or more.")
        for name, largest in OF_A_CLUSTER.items():
            if whole_number(os.environ, name, 0) > largest:
                raise InputError(
                    f"{name}={os.environ[name]}: this command starts the processes of one host; with several hosts "
                    "use scripts/slurm/train.sbatch, and on one host unset the variable."
                )
        with warnings.catch_warnings(action="ignore"):  # the processes print them
            config = load_config(Path(options.run[0]), options.run[1:])
        return Launcher(config, options.run, options.processes, options.max_restarts).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
