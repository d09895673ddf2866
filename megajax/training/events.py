"""`logging.on_event`: a command or a webhook that hears of loss spikes, rollbacks and the end of a run."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import time
import urllib.request
from typing import Any

from megajax.config import Config
from megajax.errors import ConfigError

SECONDS = 20.0  # that a command or a server may take


def check_target(config: Config) -> None:
    """Raise ConfigError if `logging.on_event` names a variable that is not set, or a program that does not exist."""
    if config.logging.on_event is None:
        return
    shown, target = f"logging.on_event ({config.where('logging.on_event')})", _target(config)
    if "$" in target:
        raise ConfigError(f"{shown} has a variable that is not set: export it, or write the command or URL itself.")
    if _is_url(target):
        return
    try:
        program = shlex.split(target)[0]
    except (ValueError, IndexError):
        raise ConfigError(f"{shown} is not a command ({target}): write it as in a shell.") from None
    if shutil.which(program) is None:
        if os.path.isfile(program):
            raise ConfigError(f"{shown} names {program}, which is not executable: chmod +x {shlex.quote(program)}.")
        raise ConfigError(f"{shown} names the program {program}, which is not found: correct its path.")


def has_target(config: Config) -> bool:
    """Whether there is a command or URL that can be told; false where `check_target` is the error that ends the run."""
    try:
        check_target(config)
    except ConfigError:
        return False
    return config.logging.on_event is not None


def event(config: Config, kind: str, step: int | None, text: str, status: int | None = None) -> dict[str, Any]:
    """The JSON object of an event: "spike", "rollback", or with an exit status "hang", "lost" (a process) or "end"."""
    run = {"run": config.run.name, "run_dir": os.path.abspath(config.run.dir), "host": socket.gethostname()}
    found = {"event": kind, **run, "step": step, "time": round(time.time(), 3), "text": text}
    return found if status is None else found | {"status": status}


def deliver(config: Config, found: dict[str, Any]) -> None:
    """POST an event to the URL, or run the command with it as input; raises an exception if that fails."""
    target, text = _target(config), f"{json.dumps(found)}\n".encode()
    if _is_url(target):
        request = urllib.request.Request(target, text, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=SECONDS).close()
        return
    done = subprocess.run(
        shlex.split(target), input=text, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr.decode(errors='replace').strip()[-200:]}")


def _target(config: Config) -> str:
    """The command or URL; a variable keeps a secret URL out of the config, which is stored and logged."""
    return os.path.expandvars(config.logging.on_event or "")


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))
