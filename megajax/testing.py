"""Checks of an extension, for its own tests; they need 8 devices, virtual ones will do.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m pytest test_my_sublayer.py
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config import Config
from megajax.estimate.shapes import Shards
from megajax.estimate.traces import LayerForm, traces
from megajax.inference.generation import Generator
from megajax.inference.language_model import LanguageModel
from megajax.inference.sampling import Sampling
from megajax.layout.kinds import KINDS
from megajax.mesh import AXES, build_mesh
from megajax.model import Sublayer, Transformer, init_parameters, register_block
from megajax.model.block import layer_state
from megajax.options.remat import NONE
from megajax.runtime import threads_of, virtual_devices
from megajax.tools.verify.differences import compare
from megajax.tools.verify.runs import Run, batches
from megajax.training.batches import to_global

LENGTH, STEPS = 16, 2
PACKED = {"data": {"reset_attention": True}}


def check_sublayer(sublayer: type[Sublayer], model: Mapping[str, Any] | None = None) -> list[str]:
    """Check a sublayer in all that its class declares; prints and returns a line for each comparison.

    A small Llama in which it is every second layer trains two steps on meshes of each axis that it supports and with
    each kind of recomputation: loss, gradients and updates must be those of one device. No token may depend on a later
    one or, with "documents", on another document. With "decoding", tokens one by one must be those of whole sequences.
    The planner must find its cost. `model` has other settings of the section model. Raises AssertionError with what
    differs.
    """
    needed = max(math.prod(mesh.values()) for _, runs in _runs(sublayer) for mesh, _ in runs)
    for name, value in threads_of(virtual_devices()).items():  # read when jax starts its devices, here or before
        os.environ.setdefault(name, value)
    assert needed <= jax.device_count(), (
        f"{sublayer.__name__}: its meshes need {needed} devices, and here are {jax.device_count()}: set "
        f"JAX_PLATFORMS=cpu and XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax starts"
    )
    kind = _kind(sublayer)
    KINDS.pop(kind, None)
    register_block(kind, sublayer)
    try:
        lines = []
        for line in _checks(sublayer, {"block_pattern": ["dense", kind], **(model or {})}):
            print(line, flush=True)  # each takes a while
            lines.append(line)
        return lines
    finally:
        KINDS.pop(kind)


def _kind(sublayer: type[Sublayer]) -> str:
    return f"checked_{sublayer.__name__}"


def _checks(sublayer: type[Sublayer], model: Mapping[str, Any]) -> Iterator[str]:
    able, plain = sublayer.SUPPORTS, _config(model, {})
    one: dict[str, int] = dict.fromkeys(AXES, 1)
    _check_cost(sublayer, plain)
    yield "cost: found without a mesh"
    half = LENGTH // 2
    _check_dependence(sublayer, plain, slice(half), slice(half, None), "a later token")
    yield "no token depends on a later one"
    if "documents" in able:
        _check_dependence(sublayer, _config(model, PACKED), slice(half, None), slice(half), "another document")
        yield "no token depends on another document"
    if "decoding" in able:
        _check_decoding(sublayer, plain)
        yield "token by token: as whole sequences"
    for sections, runs in _runs(sublayer):
        expected = Run(_config(model, sections), one).train()
        for mesh, changed in runs:
            named = ", ".join([*(f"{axis} {size}" for axis, size in mesh.items()), *_settings(sections | changed)])
            difference = compare(Run(_config(model, sections | changed), one | mesh).train(), expected).first
            assert difference is None, f"{sublayer.__name__} on {named}: {difference}"
            yield f"{named}: as on one device"


def _runs(sublayer: type[Sublayer]) -> Iterator[tuple[dict[str, Any], list[tuple[dict[str, int], dict[str, Any]]]]]:
    """(sections of the config, pairs of a mesh and other sections to compare with them on one device)."""
    able = sublayer.SUPPORTS
    meshes = [dict.fromkeys([*(axis for axis in ("tensor", "context") if axis in able), "fsdp"], 2)]
    meshes += [{"expert": 2}] if sublayer.HAS_EXPERTS else []
    recomputed = [({}, {"remat": {"policy": policy}}) for policy in ("full", "save_matmuls")]
    yield {}, [*((mesh, {}) for mesh in meshes), *recomputed]
    staged = [({"pipeline": 2}, {})]
    sections = {"batch": {"num_microbatches": 2}} | ({"model": {"num_layers": 3}} if "empty_slots" in able else {})
    if "documents" in able:  # both with the same run on one device
        sections, staged = sections | PACKED, [*staged, ({"context": 2} if "context" in able else {"fsdp": 2}, {})]
    yield sections, staged


def _settings(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{section}.{key}={value}" for section, values in sections.items() for key, value in values.items()]


def _config(model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> Config:
    settings: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "model": {
            "vocab_size": 250,
            "num_layers": 4,
            "hidden_size": 32,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_hidden_size": 64,
            "init_std": 0.1,
            **model,
        },
        "precision": {"compute": "float32"},
        "batch": {"global_size": 8, "sequence_length": LENGTH},
        "data": {"kind": "synthetic"},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "logging": {"norms_interval": 0},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return Config.model_validate(settings)


def _check_dependence(sublayer: type[Sublayer], config: Config, counted: slice, changed: slice, what: str) -> None:
    """The loss of the tokens `counted` must not depend on the tokens `changed`; a document is half of a sequence."""
    program = Run(config, dict.fromkeys(AXES, 1)).program
    state, losses, fields = program.random_state(), [], next(batches(config, seed=0))
    mask, index = np.zeros_like(fields["loss_mask"]), np.broadcast_to(np.arange(LENGTH), fields["tokens"].shape)
    mask[:, counted] = True
    if "segment_ids" in fields:  # positions do not begin again: a document's start is not known by them
        fields |= {"segment_ids": index // (LENGTH // 2), "positions": index}
    for shift in (0, 1):
        tokens = fields["tokens"].copy()
        tokens[:, changed] = (tokens[:, changed] + shift) % config.model.vocab_size
        batch = to_global(program, fields | {"tokens": tokens, "loss_mask": mask})
        losses.append(float(program.eval_step(state.weights, state.layer_state, batch)[0]["loss"]))
    assert losses[0] == losses[1], f"{sublayer.__name__}: a token depends on {what}: losses {losses}"


def _check_decoding(sublayer: type[Sublayer], config: Config, count: int = 5) -> None:
    """Greedy tokens after two prompts of different lengths."""
    weights = init_parameters(Transformer(config.model), 0, config.model.init_std)
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layer_state(config.model))
    model = LanguageModel(config, weights, state, build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    *_, found = Generator(model, Sampling(temperature=0.0)).tokens(prompts, count)
    for prompt, tokens in zip(prompts, found, strict=True):
        text = list(prompt)
        for _ in range(count):
            padded = np.array([text + [0] * (LENGTH - len(text))])
            text.append(int(jnp.argmax(model(padded)[0, len(text) - 1])))
        expected = text[len(prompt) :]
        assert tokens == expected, f"{sublayer.__name__} token by token: {tokens} instead of {expected}"


def _check_cost(sublayer: type[Sublayer], config: Config) -> None:
    """Its cost is that of its matmuls, as one device and two that share it trace them."""
    found = traces(config.model, config.lora, LENGTH, config.precision.compute)
    for tensor in (1, 2) if "tensor" in sublayer.SUPPORTS else (1,):
        trace = found.of(_kind(sublayer), LayerForm(Shards(tensor)))
        counted = trace.parts[sublayer.NAME].multiplications, trace.saved(NONE, copied=True)
        assert all(counted), f"{sublayer.__name__} multiplies by no weight, or keeps nothing: {counted}"
