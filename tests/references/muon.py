"""Muon in plain NumPy, matrix by matrix in float64, and the optimizer of a mesh run on given gradients.

Restated from Jordan et al. 2024, Liu et al. 2025 (Moonlight) and Amsel et al. 2025; only the parameters' names tell
what a matrix is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from mesh_models import LATENT_MODELS, MIXED_MODELS, MIXTRAL, MODELS, all_meshes, expert_meshes, latent_meshes
from single_device import first_state, make_config, stored, weights_of

from megajax.config.checks import check_mesh
from megajax.mesh import AXES, build_mesh
from megajax.optim import matrix_exchange
from megajax.tools.verify.runs import canonical
from megajax.training.step import TrainProgram, directions_of

# Names whose matrices [in, out] are [D, heads · width], or [heads · width, D]; with three more for each expert.
INTO_HEADS, OUT_OF_HEADS = ("query", "key", "value"), ("output",)
PLAIN = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down", "query_down", "key_value_down", "rotary_key")
POLAR_EXPRESS = np.array(
    [
        [8.28721201814563, -23.595886519098837, 17.300387312530933],
        [4.107059111542203, -2.9478499167379106, 0.5448431082926601],
        [3.9486908534822946, -2.908902115962949, 0.5518191394370137],
        [3.3184196573706015, -2.488488024314874, 0.51004894012372],
        [2.300652019954817, -1.6689039845747493, 0.4188073119525673],
    ]
) / [1.01, 1.01**3, 1.01**5]


def is_matrix(name: str) -> bool:
    """Whether Muon updates the parameter."""
    last = name.split(".")[-1]
    return name.startswith("blocks.") and last in (*INTO_HEADS, *OUT_OF_HEADS, *PLAIN)


def matrices(name: str, array: np.ndarray, per_head: bool = False) -> np.ndarray:
    """A canonical array `[L, ...]` as matrices `[L, ..., in, out]`."""
    last = name.split(".")[-1]
    if last in INTO_HEADS:
        if per_head:
            return array.transpose(0, 2, 1, 3)
        return array.reshape(*array.shape[:2], -1)
    return array.reshape(len(array), -1, array.shape[-1]) if last in OUT_OF_HEADS else array


def array_of(name: str, found: np.ndarray, like: np.ndarray, per_head: bool = False) -> np.ndarray:
    """The inverse of `matrices`."""
    if per_head and name.split(".")[-1] in INTO_HEADS:
        return found.transpose(0, 2, 1, 3)
    return found.reshape(like.shape)


def orthogonal(matrix: np.ndarray, coefficients: str = "quintic", steps: int = 5) -> np.ndarray:
    """Newton–Schulz of one matrix."""
    x, table = matrix / np.linalg.norm(matrix), [(3.4445, -4.7750, 2.0315)] * steps
    if coefficients == "polar_express":
        x, table = x / 1.01, POLAR_EXPRESS[:steps]
    for a, b, c in table:
        square = x @ x.T
        x = a * x + b * square @ x + c * square @ square @ x
    return x


class Muon:
    """The weights of one parameter, `[L, ...]`, under Muon, or AdamW with the same weight decay."""

    def __init__(self, name: str, weight: np.ndarray, muon: Mapping, decay: float, betas=(0.9, 0.95)):
        self.name, self.weight, self.muon, self.decay, self.betas = name, weight.astype(np.float64), muon, decay, betas
        self.momentum, self.second = np.zeros_like(self.weight), np.zeros_like(self.weight)

    def step(self, gradient: np.ndarray, rate: float, t: int) -> None:
        """One update with the learning rate of its group."""
        if not is_matrix(self.name):
            beta1, beta2 = self.betas
            self.momentum = beta1 * self.momentum + (1 - beta1) * gradient
            self.second = beta2 * self.second + (1 - beta2) * gradient**2
            update = self.momentum / (1 - beta1**t) / (np.sqrt(self.second / (1 - beta2**t)) + 1e-8)
            self.weight -= rate * self.muon.get("adamw_rate", 1.0) * (update + self.decay * self.weight)
            return
        beta, per_head = self.muon.get("momentum", 0.95), self.muon.get("per_head", False)
        self.momentum = beta * self.momentum + gradient
        direction = gradient + beta * self.momentum if self.muon.get("nesterov", True) else self.momentum
        found = matrices(self.name, direction, per_head)
        *_, inputs, outputs = found.shape
        scale = 0.2 * max(inputs, outputs) ** 0.5
        if self.muon.get("scale") == "spectral":
            scale = max(1.0, outputs / inputs) ** 0.5
        update = np.empty_like(found)
        for index in np.ndindex(found.shape[:-2]):
            update[index] = scale * orthogonal(found[index], self.muon.get("coefficients", "quintic"))
        update = array_of(self.name, update, self.weight, per_head)
        self.weight -= rate * (update + self.decay * self.weight)


def random_gradients(weights: Mapping[str, np.ndarray], seed: int, decades: float = 3) -> dict[str, np.ndarray]:
    """Gradients whose matrices have singular values that span some powers of ten."""
    rng, out = np.random.default_rng(seed), {}
    for name, weight in weights.items():
        gradient = rng.standard_normal(weight.shape)
        if is_matrix(name):
            found = matrices(name, gradient)
            u, s, v = np.linalg.svd(found, full_matrices=False)
            gradient = array_of(name, (u * np.logspace(0, -decades, s.shape[-1])) @ v, gradient)
        out[name] = gradient.astype(np.float32)
    return out


def run_optimizer(
    program: TrainProgram, weights: Mapping[str, np.ndarray], gradients: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Canonical weights after the program's optimizer has taken a step with each of the canonical gradients."""
    state, places = first_state(program, weights), program.placements

    @jax.jit
    def step(state, stored_gradients):
        rate, directions, optimizer = directions_of(program, state, stored_gradients, jnp.float32(0))
        params = {name: w - rate * directions[name] for name, w in state.params.items()}
        return replace(state, params=params, optimizer=optimizer, step=state.step + 1)

    for each in gradients:
        own = {n: jax.device_put(stored(g, places[n], g.dtype), state.params[n].sharding) for n, g in each.items()}
        state = step(state, own)
    return canonical(program, state.params)


def reference(
    weights: Mapping[str, np.ndarray], gradients: Sequence[Mapping[str, np.ndarray]], rates: Sequence[float], muon
) -> dict[str, np.ndarray]:
    """The same weights by NumPy; weight decay 0.1 of all but norms and biases."""

    def decay(name: str) -> float:
        return 0.0 if name.split(".")[-1].endswith(("norm", "bias")) else 0.1

    by_name = {name: Muon(name, weight, muon, decay(name)) for name, weight in weights.items()}
    for t, (each, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        for name, one in by_name.items():
            one.step(each[name], rate, t)
    return {name: one.weight for name, one in by_name.items()}


class Case(NamedTuple):
    """A row of the table of meshes."""

    model: str
    mesh: dict[str, Any]
    muon: dict[str, Any]  # settings
    sections: dict[str, Any]  # of the config, besides these
    chunk: int | None  # elements that a device computes at once; None: as in training

    def make(self, steps: int) -> TrainProgram:
        """The program on the first virtual devices."""
        settings = {"kind": "muon", "weight_decay": 0.1, "clip_norm": 0.0, "muon": self.muon}
        schedule = {"kind": "constant", "learning_rate": RATE}
        config = make_config(
            MUON_MODELS[self.model], self.mesh, steps=steps, optimizer=settings, schedule=schedule, **self.sections
        )
        count = math.prod(getattr(config.mesh, axis) for axis in AXES)
        return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))

    def difference(self, steps: int) -> float:
        """The largest difference of a weight from NumPy's after `steps` steps, over the root mean square of its array.

        Only the optimizer runs, on given gradients.
        """
        with mock.patch.object(matrix_exchange, "CHUNK", self.chunk or matrix_exchange.CHUNK):
            program = self.make(steps)
            weights = weights_of(program.config)
            gradients = [random_gradients(weights, step) for step in range(steps)]
            found = run_optimizer(program, weights, gradients)
        expected = reference(weights, gradients, [RATE] * steps, self.muon)
        assert found.keys() == expected.keys()
        return max(np.abs(found[n] - w).max() / np.sqrt(np.mean(w**2)) for n, w in expected.items())


RATE = 1e-2
MUON_MODELS = {
    "llama": MODELS["llama"],
    "gpt2": MODELS["gpt2"],
    "five layers": MODELS["llama"] | {"num_layers": 5},
    "mixtral": MIXTRAL,
    "first dense": MIXED_MODELS["first dense"],
    "latent": LATENT_MODELS["v3"] | {"mtp_layers": 1},
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"per_head": True, "scale": "spectral"},
    {"coefficients": "polar_express", "adamw_rate": 0.3},
    {"nesterov": False, "momentum": 0.9},
)


def muon_cases() -> list[Case]:
    """Every axis and storage with padding, uneven pipelines, experts over other axes, latent attention, modules."""
    thirds: dict[str, Any] = {"batch": {"global_size": 42}}
    staged: dict[str, Any] = {"batch": {"num_microbatches": 4}}
    uneven = staged | {"pipeline": {"layout": (2, 3)}}
    rounds = staged | {"pipeline": {"layout": (2, 1, 1, 1), "virtual_stages": 2}}
    rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("llama", mesh, {}) for mesh in all_meshes()]
    padded = ({"fsdp": 3}, {"fsdp": 7}, {"data": 3, "tensor": 2}, {"context": 2, "fsdp": 3})
    rows += [("llama", mesh, thirds) for mesh in padded]
    rows += [("gpt2", mesh, {}) for mesh in ({"fsdp": 2, "tensor": 2, "context": 2}, {"context": 8})]
    pipelines = ({"pipeline": 2, "fsdp": 2, "tensor": 2}, {"pipeline": 2, "data": 4}, {"pipeline": 2, "context": 2})
    rows += [("five layers", mesh, sections) for mesh in pipelines for sections in (uneven, rounds)]
    rows += [("mixtral", mesh, staged if "pipeline" in mesh else {}) for mesh in expert_meshes()[::2]]
    rows += [("first dense", mesh, staged) for mesh in ({"pipeline": 4}, {"pipeline": 2, "expert": 2, "fsdp": 2})]
    rows += [
        ("latent", mesh, staged if "pipeline" in mesh else {})
        for mesh in [*latent_meshes()[::3], {"pipeline": 2, "tensor": 2}]
    ]
    return [Case(*row[:2], OPTIONS[i % 4], row[2], (None, 1)[i // 4 % 2]) for i, row in enumerate(rows)]
