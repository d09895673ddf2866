"""Formats of a run's own directory, of plans and of the user's settings."""

import gzip
import json
from pathlib import Path
from typing import Any

from dev.fuzz.data_formats import config_with
from dev.fuzz.subject import Subject, packing_of, write

CONFIG = """
include: base.yaml
run: {name: fuzz, steps: 8, log_interval: 1}
model: {num_layers: 2, hidden_size: 32, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 64, vocab_size: 125}
mesh: {data: 1}
batch: {global_size: 8, sequence_length: 16, num_microbatches: 2, schedule: "0:4, 4:8"}
schedule: {kind: cosine, learning_rate: 3.0e-3, warmup_steps: 2}
checkpoint: {keep: 2, init_from: null}
logging: {tensorboard: false}
"""
BASE = """
data:
  kind: indexed
  train: [{prefix: a, weight: 0.5}, {prefix: b, weight: 0.5}]
  split: "969,30,1"
optimizer: {kind: adamw, groups: [{parameters: ["*.scale"], weight_decay: 0}]}
"""
STEP = {"step": 1, "time": 1.0, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 64, "mfu": None}
STEP |= {"step_seconds": 0.1, "tokens_per_second_per_device": 10.0, "expert_load": [1.0, 2.0], "idle_experts": [0, 0]}
LINES = [STEP, STEP | {"step": 2}, {"step": 2, "eval_loss": 3.0}, {"step": 2, "checkpoint_step": 2, "time": 2.0}]
LINES += [{"step": 2, "rollback": 1, "bad_step": 3}, STEP | {"step": 3, "loss": None}]


def configs(folder: Path) -> Subject:
    """A run's YAML file and one that it includes."""
    from megajax.config import load_config

    files = [write(folder / "config.yaml", CONFIG), write(folder / "base.yaml", BASE)]
    words = (b"include", b"include: config.yaml", b"include: [base.yaml, base.yaml]", b"include: /dev/zero", b"~", b"?")
    return Subject(files, lambda _: load_config(files[0]).to_yaml(), words=words)


def metrics(folder: Path) -> Subject:
    """metrics.jsonl for `plot`, `status`, the picture of experts, and a start that resumes."""
    from megajax.status import lines
    from megajax.tools.plot import read_records
    from megajax.training.expert_load import write_load_map
    from megajax.training.logs import drop_lines_after

    run = folder / "run"
    config = write(run / "config.yaml", CONFIG.replace("include: base.yaml\n", ""))
    lock = write(run / "lock", json.dumps({"host": "a", "process": 1}))
    log = write(run / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in LINES))

    def read(_: Path) -> None:
        lines([run])
        write_load_map(run, [0, 1])
        read_records(run)
        drop_lines_after(log, 2)

    return Subject([log, log, log, config, lock], read)


def plots(folder: Path) -> Subject:
    """metrics.jsonl for the curves of `plot`."""
    from megajax.tools.plot import draw, read_records

    log = write(folder / "run" / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in LINES))
    return Subject([log], lambda _: draw({"run": read_records(log.parent)}))


def rollbacks(folder: Path) -> Subject:
    """rollbacks.json, with the lines of metrics.jsonl about them."""
    from megajax.training.rollbacks import Rollback, Rollbacks

    settings = "data.kind=synthetic", "run.spike_factor=2", "run.max_rollbacks=2", "run.checkpoint_interval=2"
    config = config_with(folder, *settings)
    entries = [Rollback(i, 2 * i, 16, 3, 5.0, None, 8)._asdict() for i in (1, 2)]
    path = write(folder / "run" / "rollbacks.json", json.dumps(entries))

    def read(_: Path) -> None:
        found = Rollbacks(config)
        found.forget_after(2)

    return Subject([path], read)


def locks(folder: Path) -> Subject:
    """The lock of a run directory, of a process of this host that is gone."""
    from megajax.training import run_lock

    mine = run_lock._this_process()
    path = write(folder / "lock", json.dumps({**mine, "process": 2**22 - 1}))
    run_lock.WATCH_SECONDS = 0.0  # for the owner on another host

    def read(_: Path) -> None:
        with run_lock.RunLock(folder):
            pass

    return Subject([path], read)


def rates(folder: Path) -> Subject:
    """Rates of a device for the planner."""
    from megajax.tools.plan.rates import H200, read_rates, write_rates

    write_rates(path := folder / "rates.json", H200, {"date": "today"})
    return Subject([path], lambda _: read_rates(path, H200))


def traces(folder: Path) -> Subject:
    """A profile: the trace, its facts, and the compiled module."""
    import jax

    from megajax.tools.profile import trace

    run, profile = folder / "run", folder / "run" / trace.FOLDER
    config = write(run / "config.yaml", CONFIG.replace("include: base.yaml\n", "data: {kind: synthetic}\n"))
    double = jax.jit(lambda x: x @ x)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    x = jax.numpy.ones((8, 8))
    double(x).block_until_ready()
    with jax.profiler.trace(str(profile), profiler_options=options):
        double(x).block_until_ready()
    text = double.lower(x).compile().as_text()
    module = write(profile / trace.MODULE, gzip.compress((text or "").encode()))
    facts = write(profile / trace.FACTS, json.dumps({"steps": 1, "devices": 1, "device_kind": "cpu"}))
    (space,) = profile.rglob("*.xplane.pb")
    packing = packing_of(Path("a.gz"))
    assert packing is not None
    return Subject([space, space, facts, module, config], lambda _: trace.read(run), {module: packing})


def saved_run(folder: Path) -> Any:
    """A run with one durable checkpoint; its `StateSaver`."""
    import jax
    import numpy as np

    from megajax.checkpoint import Checkpoints
    from megajax.mesh import build_mesh
    from megajax.training.saving import StateSaver
    from megajax.training.step import TrainProgram

    settings = ["model.num_kv_heads=2", "model.ffn_hidden_size=64", "checkpoint.keep=2", "checkpoint.keep_best=1"]
    config = config_with(
        folder, "data.kind=synthetic", "run.steps=8", "run.eval_interval=4", "run.checkpoint_interval=4", *settings
    )
    saver = StateSaver(TrainProgram.build(config, build_mesh({}, jax.devices()[:1])))
    checkpoints = Checkpoints(folder / "run", keep=2, keep_every=None)
    zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), saver.program.abstract_state)
    saver.save(checkpoints, 4, zeros)  # without a program to compile
    checkpoints.wait()
    write(folder / "run" / "config.yaml", config.to_yaml())
    return saver, checkpoints


def checkpoints(folder: Path) -> Subject:
    """Descriptions, checksums and arrays of a durable checkpoint, for `inspect`, for conversions and for a resume."""
    from megajax.checkpoint import checksums, find_checkpoint
    from megajax.checkpoint.inspect import array_lines, row
    from megajax.checkpoint.weights import load_weights, run_config
    from megajax.training.resuming import ResumePoint

    saver, opened = saved_run(folder)
    run = folder / "run"
    step = run / "checkpoints" / "4"
    small = sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size < 2**16)
    best = write(run / "checkpoints" / "evaluations.json", json.dumps({"4": {"eval_loss": 2.5}}))

    def read(path: Path) -> None:
        find_checkpoint(run, "RUN")
        run_config(run, "RUN")
        row(step, verify=True)
        if path == best:
            from megajax.checkpoint.best import BestCheckpoints

            opened_best = BestCheckpoints(best.parent, 1, "lowest eval_loss")
            opened_best.should_preserve([type("Saved", (), {"step": 4})], context=None)
            return
        start = ResumePoint(saver, lambda: opened)
        start.state()
        list(array_lines(step))
        load_weights(run)

    def repair() -> None:
        """Checksums of the damaged files, as somebody else would write them."""
        (step / checksums.NAME).unlink(missing_ok=True)
        checksums.write(step, [checksums.compute(step)])

    files = [step / "description" / "metadata"] * len(small) + small + [best, run / "config.yaml"]
    return Subject(files, read, repair=repair)


def local_checkpoints(folder: Path) -> Subject:
    """A checkpoint of `checkpoint.local_dir`."""
    import jax
    import numpy as np

    from megajax.checkpoint import checksums
    from megajax.checkpoint.local_tier import LocalTier

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = {"a": jax.device_put(np.ones((4, 8), np.float32), sharding), "b": jax.device_put(np.int32(3), sharding)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    tier = LocalTier(str(folder), "run", "layout")
    tier.prepare(None)
    tier.save(4, tree, {"model": {"num_layers": 1}})
    tier.outcome(wait=True)
    step = tier.directory / "4"

    def read(_: Path) -> None:
        found, _why = tier.newest(0, abstract)
        if found is not None:
            found.tree(abstract)

    def repair() -> None:
        (step / checksums.NAME).unlink(missing_ok=True)
        checksums.write(step, [checksums.compute(step)])

    return Subject(sorted(path for path in step.iterdir()), read, repair=repair)


def compiled_plans(folder: Path) -> Subject:
    """The planner's store of compiled programs: a damaged one is compiled again."""
    import jax

    from megajax.tools.plan import compile as planner

    planner.target = str  # of a plugin that may not be installed
    planner.distributions = list  # which takes longer than everything else
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    planner.compiled(lowered, folder / "store")
    (path,) = (folder / "store").glob("*.gz")
    packing = packing_of(path)
    assert packing is not None
    return Subject([path], lambda _: planner.compiled(lowered, folder / "store"), {path: packing})


def environments(folder: Path) -> Subject:
    """Variables of a cluster, one a line."""
    from megajax.cluster.environment import process_index

    slurm = "SLURM_NTASKS=2\nSLURM_PROCID=1\nSLURM_LOCALID=0\nSLURM_JOB_ID=123\nJAX_COORDINATOR_PORT=1234"
    explicit = "JAX_COORDINATOR_ADDRESS=node1:1234\nJAX_NUM_PROCESSES=2\nJAX_PROCESS_ID=1\nJAX_LOCAL_DEVICE_IDS=0,1"
    explicit += "\nJAX_COORDINATOR_BIND_ADDRESS=[::]:1234"
    mpi = "OMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_LOCAL_RANK=1"
    files = [write(folder / name, text) for name, text in (("slurm", slurm), ("explicit", explicit), ("mpi", mpi))]

    def read(path: Path) -> None:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
        process_index({name: value for name, _, value in (line.partition("=") for line in lines)})

    return Subject(files, read, words=(b"=", b":", b"[::1]", b"99999", b"-1"))


def command_lines(folder: Path) -> Subject:
    """Arguments of commands, one a line."""
    from megajax.command_parser import CommandParser
    from megajax.config.cli import parse_command_line
    from megajax.console import add_model_arguments, add_sampling_arguments
    from megajax.inference.prompts import chosen_arguments
    from megajax.inference.sampling import chosen_sampling
    from megajax.mesh import named_mesh

    config = write(folder / "config.yaml", CONFIG.replace("include: base.yaml\n", ""))
    overrides = ["run.steps=9", "mesh.data=1", "data.train=[{prefix: a}]", "optimizer.groups=[]", "model.dropout=0.1"]
    train = write(folder / "train.txt", "\n".join([str(config), *overrides]))
    options = ["RUN", "--mesh", "data=1", "--tokens", "8", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9"]
    options += ["--stop", "x", "--seed", "1", "--chat-template-args", "{enable_thinking: false}"]
    generate = write(folder / "generate.txt", "\n".join(options))

    def read(path: Path) -> None:
        arguments = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
        try:
            if path == train:
                parse_command_line(arguments).to_yaml()
                return
            parser = CommandParser("megajax.generate")
            add_model_arguments(parser)
            add_sampling_arguments(parser, 128)
            chosen = parser.parse_args(arguments)
            chosen_sampling(chosen).check()
            chosen_arguments(chosen)
            if chosen.mesh:
                named_mesh(chosen.mesh, "--mesh")
        except SystemExit as end:  # of --help and --version
            assert end.code == 0, end

    return Subject([train, generate], read, words=(b"--help", b"--print-config", b"--diff", b"--", b"=", b"model.x=1"))
