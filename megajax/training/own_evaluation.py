"""Sets of data evaluated by the objective of a run, outside the run: `megajax evaluate RUN`."""

import json
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from megajax.config import Config, MeshConfig
from megajax.config.checks import check_mesh
from megajax.data.loader import open_split
from megajax.data.whole import WholeSet
from megajax.errors import InputError
from megajax.inference.load import check_dtype, uncapped
from megajax.inference.scored_sets import holds_pairs
from megajax.inference.scoring import TOKENS_PER_BATCH
from megajax.mesh import build_mesh, mesh_sizes
from megajax.options.fp8_recipes import NONE
from megajax.options.registered import replaces_head, taken_together
from megajax.schema.checkpoint import CheckpointConfig
from megajax.schema.config import (
    BatchConfig,
    CommunicationConfig,
    KernelsConfig,
    PipelineConfig,
    RematConfig,
)
from megajax.schema.data import ValidationSet
from megajax.schema.optimizer import OptimizerConfig
from megajax.sources import RunSource, above_or_here, tokenizer_of
from megajax.training.batches import check_own_fields
from megajax.training.evaluation import means
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram


def sets_of_objective(source: RunSource, sets: Mapping[str, str], are_own: bool) -> dict[str, str]:
    """Those of the sets that a run's own objective evaluates: all if its model has no logits, else the pairs.

    If the sets `are_own`, of the run's config, all if the objective is one of segments.
    """
    config = source.config()
    kind, data = config.objective.kind, config.data
    if replaces_head(kind) or (are_own and taken_together(kind)):
        return dict(sets)
    return {name: path for name, path in sets.items() if data.reads_pairs and holds_pairs(path)}


def evaluate_by_objective(
    source: RunSource,
    sets: Mapping[str, str],
    mesh: Mesh | None = None,
    dtype: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    limit: int | None = None,
    locations: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """The figures of each set: its samples, what they are, and the means of the loss and of the objective's METRICS.

    A pair is one sample, and each is read once, with `limit` only the first ones. Weights and batches are laid out for
    `mesh` (None: the first device), whatever mesh trained them. Raises UserError as a start of the run does;
    `locations` are those of keys that options stand for.
    """
    mesh = mesh or build_mesh({}, jax.devices()[:1])
    with tempfile.TemporaryDirectory() as cache:
        config = _config(source, sets, dtype, {**(template_arguments or {})}, cache)
        config._locations = {**config._locations, **(locations or {})}
        together = taken_together(config.objective.kind) or 1
        opened = {name: _opened(config, name, None if limit is None else limit * together) for name in sets}
        config = _on_mesh(config, mesh, together, max(map(len, opened.values())))
        program = TrainProgram.build(config, mesh)
        check_own_fields(program)
        saver = StateSaver(program)
        state = saver.first_state()
        if config.lora.rank is not None:
            state = saver.with_trained(state, source)
        scored = "pairs" if config.data.reads_pairs else "samples"
        return {
            name: {"samples": len(samples) // together, "scored": scored}
            | means(program, f"valid/{name}", samples, state.weights, state.layer_state, jax.block_until_ready)
            for name, samples in opened.items()
        }


def _opened(config: Config, name: str, count: int | None) -> WholeSet:
    whole = open_split(config, f"valid/{name}")
    assert isinstance(whole, WholeSet)
    return whole if count is None else whole.first(count)


def _config(
    source: RunSource, sets: Mapping[str, str], dtype: str | None, template_arguments: dict[str, Any], cache: str
) -> Config:
    """The run's config with these evaluation sets, and the weights of its checkpoint as the first ones.

    Nothing in it belongs to a mesh or to training.
    """
    config = source.config()
    if config.data.kind == "synthetic":
        problem = f"{source.shown} has data.kind=synthetic, so it does not say how to make rows of a file"
        raise InputError(f"{problem}: evaluate in the program that makes its batches, by TrainProgram.eval_step.")
    run_dir = source.checkpoint.parent.parent
    check_dtype(dtype or config.precision.compute)

    def resolved(path: str | None) -> str | None:
        return path and str(above_or_here(path, run_dir) or path)

    data, template = config.data, run_dir / "chat_template.jinja"
    of_data = {
        "valid": None,
        "split": None,
        "stages": None,
        "valid_sets": tuple(ValidationSet(name=name, prefix=path) for name, path in sets.items()),
        "tokenizer": data.tokenizer and tokenizer_of(config, run_dir),
        "chat_template": data.chat_template and str(template if template.exists() else resolved(data.chat_template)),
        "index_cache": cache,
    }
    if template_arguments:
        of_data["chat_template_args"] = json.dumps(data.template_arguments | template_arguments)
    weights = str(source.checkpoint) if config.lora.rank is None else resolved(config.checkpoint.init_from)
    fp8 = config.precision.fp8.model_copy(update={"recipe": NONE.name})
    precision = {"compute": dtype or config.precision.compute, "fp8": fp8}
    teacher = config.teacher.model
    of_teacher = {"source": resolved(config.teacher.source), "model": teacher and uncapped(teacher)}
    changes = {
        "run": config.run.model_copy(update={"eval_steps": "all"}),
        "data": data.model_copy(update=of_data),
        "model": uncapped(config.model),
        "precision": config.precision.model_copy(update=precision),
        "checkpoint": CheckpointConfig(init_from=weights, allow_changes=config.checkpoint.allow_changes),
        "teacher": config.teacher.model_copy(update=of_teacher),
        "optimizer": OptimizerConfig(kind="sgd"),
        "pipeline": PipelineConfig(),
        "remat": RematConfig(),
        "communication": CommunicationConfig(),
        "kernels": KernelsConfig(),
    }
    return config.model_copy(update=changes)


def _on_mesh(config: Config, mesh: Mesh, together: int, most: int) -> Config:
    """The config with batches for a mesh, of at most `most` samples and those that fill it up."""
    sizes = mesh_sizes(mesh)
    length, shards = config.batch.sequence_length, config.batch_shards(sizes) * sizes["pipeline"]
    each = max(1, min(TOKENS_PER_BATCH // (together * length), -(-most // (together * shards))))
    batch = BatchConfig(
        global_size=each * together * shards, num_microbatches=sizes["pipeline"], sequence_length=length
    )
    config = config.model_copy(update={"batch": batch, "mesh": MeshConfig().model_copy(update=sizes)})
    check_mesh(config, mesh.size, platform=jax.default_backend())
    return config
