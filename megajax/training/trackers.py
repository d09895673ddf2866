"""What shows the numbers of a run: TensorBoard, Weights & Biases, MLflow, a page for Prometheus; and their names there.

metrics.jsonl keeps its own names, which are fixed; elsewhere a number has a tag, a group and that name.
"""

import os
import re
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from megajax.checkpoint import reason
from megajax.config import Config
from megajax.config.sentences import located
from megajax.errors import ConfigError, InputError
from megajax.extras import require
from megajax.files import replace_text
from megajax.schema.tree import leaves

type Say = Callable[[str], None]


# group: the names of its numbers, without what follows a slash (a layer, a parameter, an evaluation set)
GROUPS = {
    "throughput": (
        *("step_seconds", "tokens_per_second_per_device", "tflops_per_second_per_device", "mfu"),
        *("slowest_process", "slowest_own_seconds", "others_own_seconds", "attention_imbalance"),
        *("work_imbalance", "work_imbalance_sequential", "context_groups"),
        *(f"{name}_tokens_per_second_per_device" for name in ("image", "text")),
    ),
    "memory": ("peak_memory_gib",),
    "moe": (
        *("aux_loss", "global_loss", "sequence_loss", "router_z_loss", "router_entropy"),
        *("expert_load_max", "idle_experts_max", "dropped_tokens_max", "dropped_tokens_mean"),
    ),
    "rollback": ("rollback", "bad_step", "bad_loss", "loss_median", "left_out_samples"),
    "norms": ("grad_norm", "weight_norm", "update_ratio"),  # by parameter or layer; that of all is in "train"
}
# prefix of a name: the prefix of its tag
PREFIXES = {"eval_": "eval/", "ema_eval_": "eval/ema_", "checkpoint_": "checkpoint/"}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def tag(name: str) -> str:
    """The tag of a number of metrics.jsonl; numbers that no table names are in the group "train"."""
    for prefix, of_tag in PREFIXES.items():
        if name.startswith(prefix):
            return of_tag + name.removeprefix(prefix)
    whole, slash, _ = name.partition("/")
    group = _GROUP_OF.get(whole, "train")
    return f"{'train' if group == 'norms' and not slash else group}/{name}"


class Tracker(Protocol):
    """A service, started before anything is compiled."""

    name: str

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a step, by tag."""
        ...

    def close(self, failed: bool) -> None: ...


def check_trackers(config: Config) -> None:
    """Raise ConfigError if the package of a configured service is not installed."""
    for key, value, off in (("wandb", config.logging.wandb, "false"), ("mlflow", config.logging.mlflow, "null")):
        if value:
            require(key, located(config, f"logging.{key}"), f"set logging.{key}={off}", ConfigError)


def start_trackers(config: Config, say: Say) -> Iterator[Tracker]:
    """Start what `logging` names; `say` tells where it is found. Raises InputError if one cannot start."""
    kinds = (("wandb", WandbRun), ("mlflow", MlflowRun), ("prometheus_port", PrometheusPage))
    for key, kind in kinds:
        if not getattr(config.logging, key):
            continue
        try:
            yield kind(config, say)
        except Unreachable as error:
            say(f"megajax: warning: {error}; the run goes on without it")


class Unreachable(Exception):
    """A service does not answer a run that resumes: this must not keep it from training."""


class WandbRun:
    """A run in Weights & Biases; offline without an API key, or if the server does not answer."""

    name = "W&B"

    def __init__(self, config: Config, say: Say):
        wandb = require("wandb", "logging.wandb=true")
        self._teardown = wandb.teardown
        run_dir = Path(config.run.dir)
        id_file = run_dir / "wandb_id"  # the same one after a restart: else W&B would show another run
        if not id_file.exists():
            replace_text(id_file, uuid4().hex[:8])

        def start(mode: str | None) -> Any:
            return wandb.init(
                id=id_file.read_text(encoding="utf-8"),
                project=config.logging.wandb_project,
                name=config.run.name,
                dir=run_dir,
                config=config.model_dump(mode="json"),
                resume="allow",
                mode=mode,
                settings=wandb.Settings(silent=True, console="off"),
            )

        chosen = bool(os.environ.get("WANDB_MODE"))
        try:
            mode = None if chosen or wandb.login(prompt=False, verify=False) else "offline"
            self._run = start(mode)
        except Exception as error:
            say(f"megajax: warning: W&B could not start online ({reason(error)}): it logs offline")
            try:
                self._run = start("offline")
            except Exception as error:
                problem = f"{located(config, 'logging.wandb')}: W&B could not start ({reason(error)})"
                raise InputError(f"{problem}: correct this, or set logging.wandb=false.") from None
        # A rollback or a resume comes back to earlier steps, which W&B's own count of steps would leave out.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            why = "" if chosen else "; with WANDB_API_KEY set, or after `wandb login`, the next start logs online"
            upload = shlex.join(["wandb", "sync", str(Path(self._run.dir).parent)])
            say(f"W&B logs offline (upload it with `{upload}`){why}")
        elif self._run.url:
            say(f"W&B: {self._run.url}")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._teardown()  # waits until W&B's own process has written everything


class MlflowRun:
    """A run on an MLflow server, or in a directory: `logging.mlflow`."""

    name = "MLflow"

    def __init__(self, config: Config, say: Say):
        uri = str(config.logging.mlflow)
        if not uri.startswith("http"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 prefers databases
        # By default MLflow repeats a request for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        mlflow = require("mlflow", f"logging.mlflow={uri}")
        self._entities = mlflow.entities
        id_file = Path(config.run.dir) / "mlflow_id"
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            if id_file.exists():
                self._id = id_file.read_text(encoding="utf-8")
                self._client.update_run(self._id, status="RUNNING")
            else:
                self._id = self._new_run(config)
                replace_text(id_file, self._id)
        except Exception as error:
            problem = f"{located(config, 'logging.mlflow')} cannot be used ({reason(error)})"
            if id_file.exists():
                raise Unreachable(problem) from None
            raise InputError(f"{problem}: start its server, correct it, or set logging.mlflow=null.") from None
        say(f"MLflow: run {self._id} in {uri}")

    def _new_run(self, config: Config) -> str:
        name = config.logging.mlflow_experiment or "Default"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        new = self._client.create_run(experiment, run_name=config.run.name).info.run_id
        values = leaves(config.model_dump(mode="json"))
        settings = [self._entities.Param(key, str(value)[:500]) for key, value in values if value != {}]
        for start in range(0, len(settings), 100):  # the most in one request
            self._client.log_batch(new, params=settings[start : start + 100])
        return new

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        values = [metric(name, float(number), now, step) for name, number in numbers.items()]
        for start in range(0, len(values), 1000):  # the most in one request
            self._client.log_batch(self._id, metrics=values[start : start + 1000])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class PrometheusPage:
    """The newest numbers at http://HOST:PORT/metrics, in Prometheus's text format."""

    name = "the page for Prometheus"

    def __init__(self, config: Config, say: Say):
        import prometheus_client as prometheus

        self._gauge, self._registry = prometheus.Gauge, prometheus.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._run, host, port = config.run.name, config.logging.prometheus_host, config.logging.prometheus_port
        assert port is not None
        try:
            self._server, _ = prometheus.start_http_server(port, host, self._registry)
        except OSError as error:
            problem = f"{located(config, 'logging.prometheus_port')} cannot be opened on {host} ({error.strerror})"
            raise InputError(f"{problem}: choose another port, or another logging.prometheus_host.") from None
        say(f"Prometheus: http://{host}:{port}/metrics")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in {"step": step, "logged_timestamp_seconds": time.time(), **numbers}.items():
            name = "megajax_" + re.sub(r"\W", "_", name)
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, name, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(number)

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()


class TensorBoardLog:
    """Scalars for TensorBoard, written in this thread: tensorboardX's own thread hangs the run if the disk is full."""

    def __init__(self, directory: Path, start_step: int, config: str):
        """`config` is shown as text."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
        from tensorboardX.summary import text

        directory.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"))
        # TensorBoard then ignores the steps that an interrupted run logged after its last checkpoint.
        self._call("write_event", Event(step=start_step + 1, file_version="brain.Event:2"))
        self._call("write_event", Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))
        indented = "".join(f"    {line}\n" for line in config.splitlines())  # code, in Markdown
        self._call("write_event", Event(wall_time=time.time(), step=start_step, summary=text("config", indented)))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step, by tag."""
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboardX.summary import scalar

        for name, number in numbers.items():
            self._call("write_event", Event(wall_time=time.time(), step=step, summary=scalar(name, number)))
        self._call("flush")

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        """A failed write is the last, since it may have left half a record."""
        try:
            if self._writer is not None:
                getattr(self._writer, method)(*arguments)
        except OSError as error:
            self._writer = None
            warnings.warn(f"TensorBoard files can't be written any more ({error.strerror}).", stacklevel=2)
