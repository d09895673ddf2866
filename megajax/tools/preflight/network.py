"""The network that NCCL chose between hosts, in its own words: TCP sockets instead of RDMA are a mistake."""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
CURE = (
    "give the pods or tasks their RDMA devices (in a container also IPC_LOCK), and name them in NCCL_IB_HCA, as in "
    "scripts/kubernetes/train.yaml"
)


def listen() -> Path | None:
    """Make NCCL write its choice to a file; before jax starts. None if the user has set NCCL_DEBUG_FILE."""
    if "NCCL_DEBUG_FILE" in os.environ:
        return None
    path = Path(tempfile.mkdtemp(prefix="megajax-nccl-")) / "log"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    os.environ.update(SETTINGS, NCCL_DEBUG_FILE=str(path))
    return path


def chosen(path: Path | None) -> str:
    """The network that NCCL wrote to the file of `listen`, such as IB or Socket; empty if it wrote none."""
    if path is None or not path.exists():
        return ""
    found = re.findall(r"Using network (\S+)", path.read_text(encoding="utf-8", errors="replace"))
    return found[-1] if found else ""


def report(networks: Sequence[str], hosts: int) -> tuple[str, list[str]]:
    """(a line about the networks of all processes, the problems); both empty on one host or without NCCL."""
    used = sorted(set(filter(None, networks)))
    if hosts < 2 or not used:
        return "", []
    slow = [f"NCCL uses TCP sockets between hosts, not RDMA: {CURE}"] if "Socket" in used else []
    return f"NCCL's network between hosts: {', '.join(used)}", slow
