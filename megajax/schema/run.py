"""The keys of the section `run`."""

from typing import Annotated

from pydantic import Field

from megajax.options.registered import HOOKS
from megajax.schema.fields import (
    UNKNOWN_STEPS,
    AboveOne,
    Batches,
    Count,
    CountOrZero,
    EachOnce,
    Positive,
    Seconds,
    Section,
    Seed,
    SettingsByName,
    Steps,
    Text,
    derived,
)
from megajax.schema.rules import Excludes, Needs, ReadIf

SET_STEPS, NO_ROLLBACKS = "set run.steps instead", "or set run.max_rollbacks=0"


class RunConfig(Section):
    """The run: its name, directory, length, and the intervals of logs, evaluations and checkpoints."""

    name: Text = Field(default="run", description="Name of the run, and of its directory in runs/ without run.dir.")
    dir: Text = derived(
        lambda run: f"runs/{run['name']}",
        "runs/<name>",
        "Directory of logs and checkpoints; the same command resumes the run found there.",
    )
    seed: Seed = Field(default=1234, description="Seed of the initial weights, the data order and dropout.")
    epochs: Annotated[
        Positive | None,
        Excludes("data.kind", "synthetic", because="synthetic data has no end", cure=SET_STEPS),
        Excludes(
            "data.order",
            "megatron",
            because="that order is made for a number of samples",
            cure=f"{SET_STEPS}, or use shuffled or sequential",
        ),
        Excludes("data.stages", because="it counts passes over data.train", cure=f"{SET_STEPS}, or remove data.stages"),
    ] = Field(
        default=None,
        description="Number of passes over data.train, instead of run.steps, which follows once the data is open.",
    )
    steps: Steps = derived(
        lambda run: 1000 if run["epochs"] is None else UNKNOWN_STEPS, "1000", "Number of optimizer steps."
    )
    log_interval: Count = Field(default=10, description="Steps between logged lines.")
    eval_interval: Annotated[CountOrZero, ReadIf("eval_steps", bool)] = Field(
        default=0, description="Steps between evaluations; 0: only at the end."
    )
    eval_steps: Annotated[
        Batches,
        Excludes(
            "data.kind", "synthetic", of="all", because="synthetic data has no end", cure="give run.eval_steps a number"
        ),
    ] = Field(
        default=10,
        description="Batches in an evaluation; all: each sample of the evaluation data once; 0: never evaluate.",
    )
    checkpoint_interval: CountOrZero = Field(default=0, description="Steps between checkpoints; 0: only at the end.")
    deterministic: bool = Field(
        default=False, description="Repeated runs on the same mesh give the same numbers, bit for bit."
    )
    compilation_cache: Text = derived(
        lambda run: f"{run['dir']}/compilation_cache",
        "<run.dir>/compilation_cache",
        "Directory of compiled programs, which a restart reads instead of compiling; none: no cache. The environment's"
        " JAX_COMPILATION_CACHE_DIR has precedence.",
    )
    max_minutes: Positive | None = Field(
        default=None,
        description="Time limit, from the start of the process: the run then stops as on SIGTERM, so leave time for the"
        " last save below the limit of the cluster; null: none.",
    )
    peer_timeout_seconds: Seconds = Field(
        default=60.0,
        description="After the loss of a process (killed, stopped, host gone) the others end within this time, with"
        " exit status 4.",
    )
    hang_factor: AboveOne | None = Field(
        default=20.0,
        description="A step that takes this multiple of the median of recent steps, and at least hang_min_seconds,"
        " ends the run with exit status 4 and writes hang-PROCESS.txt; null: never.",
    )
    hang_min_seconds: Annotated[Seconds, ReadIf("hang_factor", bool)] = Field(
        default=300.0,
        description="Shortest time after which a step counts as hung; compilation, an evaluation and a save have 12"
        " times as long.",
    )
    max_nonfinite_steps: Count = Field(
        default=20,
        description="Stop after more than this many skipped steps in a row (loss or gradient not finite).",
    )
    spike_factor: AboveOne | None = Field(
        default=None,
        description="A loss above this multiple of the median of the last spike_window steps is a spike: it is reported"
        " and counted. null: no loss is.",
    )
    spike_window: Annotated[Count, ReadIf("spike_factor")] = Field(
        default=128, description="Number of losses in the median for spike_factor."
    )
    max_rollbacks: Annotated[
        CountOrZero,
        Needs(
            "checkpoint_interval",
            what="checkpoints",
            cure=f"set run.checkpoint_interval, {NO_ROLLBACKS}",
        ),
        Needs(
            "checkpoint.save_optimizer",
            True,
            what="checkpoints with optimizer state",
            cure=f"remove checkpoint.save_optimizer, {NO_ROLLBACKS}",
        ),
        Excludes(
            "data.order",
            "megatron",
            because="that order is made for a fixed number of samples, and a rollback leaves out batches",
            cure=f"use shuffled or sequential, {NO_ROLLBACKS}",
        ),
        Excludes(
            "data.stages",
            because="stages begin at fixed samples, and a rollback leaves out batches",
            cure=f"remove data.stages, {NO_ROLLBACKS}",
        ),
    ] = Field(
        default=0,
        description="Number of times that the run goes back to a checkpoint after a spike, or after more than"
        " max_nonfinite_steps steps, and leaves out the batches up to that step; 0: never.",
    )
    extensions: tuple[Text, ...] = Field(
        default=(),
        strict=False,
        description="Modules by name, or .py files by path, that are imported before the config is checked, by every"
        " command that reads it: they register blocks of your own.",
    )
    hooks: Annotated[tuple[Annotated[str, HOOKS], ...], EachOnce] = Field(
        default=(),
        strict=False,
        description="Hooks, by the names under which run.extensions register them: what else happens beside the steps.",
    )
    hook_settings: SettingsByName = Field(
        default={}, validate_default=True, description="Settings of registered hooks, by the hook's name."
    )
    replica_check_interval: CountOrZero = Field(
        default=0,
        description="Steps between checks that all copies of replicated state are equal, bit for bit; also before each"
        " checkpoint; 0: no checks.",
    )
