"""Warnings about this process's GPUs: reduced clocks, memory errors and Xids, as far as NVML reports them.

It needs the optional package nvidia-ml-py (module pynvml); without it a warning says so, and nothing is read.
"""

import socket
import sys
import threading
from typing import Any

import jax

from megajax import cluster, threads
from megajax.cluster.start_checks import cuda_devices, used_devices
from megajax.errors import InputError
from megajax.extras import require
from megajax.training.hooks import Hook, RunView

# The bits of NVML's reasons for lower clocks that are faults or limits. Others, such as an idle GPU, are none.
REASONS = {
    0x04: "its power limit",
    0x08: "the hardware (temperature, power or a fault)",
    0x20: "its temperature (driver)",
    0x40: "its temperature (hardware)",
    0x80: "the power supply (power brake)",
}


class GpuHealth(Hook):
    """Reads NVML in a thread, started at logged steps; prints each new problem once, as a warning."""

    def __init__(self):
        self._started = False
        self._reported: set[tuple[str, Any]] = set()
        self._thread: threading.Thread | None = None
        self._gpus: dict[str, Any] = {}  # NVML's handles by UUID

    def on_start(self, run: RunView) -> None:
        """Find the GPUs; without the package a line says that they are not watched."""
        if self._started:
            return
        self._started = True
        devices = used_devices(cuda_devices(), jax.config.values["jax_cuda_visible_devices"])
        if not devices:
            return
        try:
            pynvml = require("nvml", "the watch over the GPUs' clocks and memory errors")
        except InputError as missing:
            run.note(f"megajax: warning: {missing}")
            return
        try:
            pynvml.nvmlInit()
            self._nvml, self._events = pynvml, pynvml.nvmlEventSetCreate()
            for uuid in devices:
                self._gpus[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:  # no driver, or a GPU that NVML does not show here
            self._gpus = {}

    def on_log(self, run: RunView, step: int, values: dict[str, Any]) -> None:
        """Start to read, unless the last reading still runs."""
        if self._gpus and (self._thread is None or not self._thread.is_alive()):
            self._thread = threads.start("the watch over the GPUs", self._read)

    def _read(self) -> None:
        for uuid, gpu in self._gpus.items():
            for read in (self._clocks, self._memory_errors, self._xids):
                try:
                    read(uuid, gpu)
                except self._nvml.NVMLError:
                    continue  # this GPU or container does not report it

    def _clocks(self, uuid: str, gpu: Any) -> None:
        reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        for name in (name for bit, name in REASONS.items() if reasons & bit):
            clock, most = (
                read(gpu, self._nvml.NVML_CLOCK_SM)
                for read in (self._nvml.nvmlDeviceGetClockInfo, self._nvml.nvmlDeviceGetMaxClockInfo)
            )
            self._warn(uuid, name, f"runs at {clock} of {most} MHz because of {name}")

    def _memory_errors(self, uuid: str, gpu: Any) -> None:
        kinds = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC
        if count := self._nvml.nvmlDeviceGetTotalEccErrors(gpu, *kinds):
            self._warn(
                uuid, ("ECC", count), f"has had {count} uncorrected memory errors (ECC) since the driver started"
            )

    def _xids(self, uuid: str, gpu: Any) -> None:
        if (uuid, "registered") not in self._reported:
            self._reported.add((uuid, "registered"))
            self._nvml.nvmlDeviceRegisterEvents(gpu, self._nvml.nvmlEventTypeXidCriticalError, self._events)
        while True:
            event = self._nvml.nvmlEventSetWait_v2(self._events, 0)  # raises NVMLError if there is none
            source = self._nvml.nvmlDeviceGetUUID(event.device)
            self._warn(source, ("Xid", event.eventData), f"reported Xid {event.eventData}")

    def _warn(self, uuid: str, key: Any, problem: str) -> None:
        if (uuid, key) not in self._reported:
            self._reported.add((uuid, key))
            sentence = f"process {cluster.current().rank} on host {socket.gethostname()}: {uuid} {problem}"
            print(f"megajax: warning: {sentence}", file=sys.stderr, flush=True)
