"""An optimizer, and a form of moments, from outside the package train on meshes as on one device, and resume."""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mesh_models import MODELS
from single_device import make_config, train, weights_of

from megajax.config import load_config
from megajax.config.checks import check
from megajax.config.extensions import import_extensions
from megajax.errors import ConfigError
from megajax.kernel_choice import Hardware
from megajax.mesh import build_mesh
from megajax.optim import (
    COUNT,
    Form,
    MatrixOptimizer,
    MomentForm,
    OptaxOptimizer,
    Optimizer,
    OptimizerKind,
    Slot,
    StateArray,
    register_form,
    register_optimizer,
    slots,
)
from megajax.optim.muon import Muon
from megajax.optim.sgd import Sgd
from megajax.optim.update import Update
from megajax.options import optimizers as declared
from megajax.schema.fields import AXES
from megajax.sharding import place
from megajax.step_plan import StepPlan
from megajax.tools.verify.runs import Run

ONE = dict.fromkeys(AXES, 1)
PAGE = Path(__file__).parents[2] / "docs/extensions.md"
MODEL = MODELS["llama"] | {"num_layers": 2}


class Float16(Form):
    def arrays(self, placement, non_negative, sizes):
        return StateArray(placement, jnp.float16)

    def encode(self, x, placement, non_negative, bits):
        return x.astype(jnp.float16)

    def decode(self, kept, placement, non_negative):
        return kept.astype(jnp.float32)


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory):
    """The examples of the docs, and a form of moments."""
    path = tmp_path_factory.mktemp("extension") / "my_optimizer.py"
    (source,) = re.findall(r"```python\n(# my_optimizer\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    path.write_text(source)
    import_extensions([str(path), "docs/examples/adafactor.py"])
    register_form(MomentForm("test_float16"), Float16)
    yield
    for options in (declared.OPTIMIZERS, slots.OPTIMIZER_CLASSES):
        options.pop("laprop")
        options.pop("adafactor")
    for options in (declared.FORMS, slots.FORM_CLASSES):
        options.pop("test_float16")


def make(mesh, **sections):
    optimizer = {"kind": "laprop", "settings": {"power": 0.5}, "state": "test_float16", "clip_norm": 0.0}
    sections["schedule"] = {"kind": "constant", "learning_rate": 3e-3}
    return make_config(MODEL, mesh, optimizer=optimizer, steps=4, **sections)


def test_the_moments_are_kept_in_the_form():
    def moments(state):
        config = make({})
        config = make_config(MODEL, {}, optimizer=config.optimizer.model_dump() | {"state": state})
        mesh, placement = build_mesh(ONE, jax.devices()[:1]), place((2, 6, 16), ("layers", "embed", "mlp"), ONE)
        parameter = SimpleNamespace(axes=placement.axes, role="matrix")
        update = Update.build(StepPlan.of(config, mesh), {"w": parameter}, {"w": placement}, mesh)
        gradient = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)
        zeros = {"w": jnp.zeros(gradient.shape)}
        _, kept = jax.jit(update.directions)({"w": gradient}, update.first(zeros).optimizer, zeros)
        return {slot: x["w"] for slot, x in kept.slots["laprop"].items() if isinstance(x, dict)}

    found, exact = moments("test_float16"), moments("float32")
    assert found.keys() == exact.keys() and exact
    for slot, x in exact.items():
        np.testing.assert_array_equal(found[slot], np.asarray(x).astype(np.float16), strict=True)


@pytest.mark.long
def test_they_train_on_meshes_as_on_one_device_and_resume(tmp_path):
    one = make({})
    weights = weights_of(one)
    config = make({"pipeline": 2, "tensor": 2}, batch={"num_microbatches": 2})
    np.testing.assert_allclose(train(config, weights).losses, train(one, weights).losses, rtol=1e-5)
    run = Run(config, ONE | {"pipeline": 2, "tensor": 2})
    whole = run.train(tmp_path)
    assert not whole.problems and {str(x.dtype) for n, x in run.saved.items() if ".mean." in n} == {"float16"}
    resumed = run.resume(tmp_path, run.saved)
    assert not resumed.problems
    np.testing.assert_array_equal(resumed.losses, whole.losses[run.saved_step :])


def test_the_first_updates_are_those_of_numpy():
    """Without weight decay, in FP32, from a gradient of ones and then twos."""
    config = make_config(MODEL, {}, optimizer={"kind": "laprop", "beta1": 0.9, "beta2": 0.99})
    plan = StepPlan.make(config, dict.fromkeys(AXES, 1), Hardware("cpu"))
    optimizer = slots.OPTIMIZER_CLASSES["laprop"](plan, slots.OPTIMIZER_CLASSES["laprop"].Settings())
    state = {"count": np.int32(0), "mean": {"w": np.zeros(3, np.float32)}, "square": {"w": np.zeros(3, np.float32)}}
    direction = jax.jit(optimizer.direction)
    square = mean = 0.0
    for t, g in ((1, 1.0), (2, 2.0)):
        square = 0.99 * square + 0.01 * g * g
        mean = 0.9 * mean + 0.1 * g / (np.sqrt(square / (1 - 0.99**t)) + 1e-8)
        directions, state = direction({"w": np.full(3, g, np.float32)}, state)
        np.testing.assert_allclose(directions["w"], mean / (1 - 0.9**t), rtol=1e-5)


def test_factored_moments_are_those_of_optax():
    plan = StepPlan.make(make_config(MODEL, {}), dict.fromkeys(AXES, 1), Hardware("cpu"))
    optimizer = slots.OPTIMIZER_CLASSES["adafactor"](plan, slots.OPTIMIZER_CLASSES["adafactor"].Settings())
    reference = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=1), optax.clip_by_block_rms(1.0))
    matrix = np.zeros((4, 6), np.float32)
    expected, state = jax.jit(reference.init)(matrix), {"count": np.int32(0)}
    state |= {slot.name: np.zeros((1, *slot.shape), np.float32) for slot in optimizer.slots_of_matrices(4, 6)}
    assert {name: x.shape for name, x in state.items()} == {
        "count": (), "row_means": (1, 4, 1), "column_means": (1, 1, 6)
    }  # fmt: skip
    of_matrices, of_optax, direction = map(jax.jit, (optimizer.of_matrices, reference.update, optimizer.direction))
    for seed in range(3):
        gradient = np.random.default_rng(seed).normal(size=(4, 6)).astype(np.float32)
        _, state = direction({}, state)
        directions, after = of_matrices(gradient[None], state)
        state |= after
        update, expected = of_optax(gradient, expected, matrix)
        np.testing.assert_allclose(np.asarray(directions)[0], update, rtol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"kind": "laprop", "settings": {"powr": 1}}, ("optimizer.settings.powr", "LaProp", "power")),
        ({"kind": "laprop", "settings": {"power": "half"}}, ("optimizer.settings.power=half", "correct it")),
        (
            {"kind": "adamw", "settings": {"power": 1}},
            ("optimizer.settings", "optimizer.kind=adamw", "or remove optimizer.settings"),
        ),
    ],
)
def test_wrong_settings_are_a_sentence(optimizer, words):
    with pytest.raises(ConfigError) as error:
        check(make_config(MODEL, {}, optimizer=optimizer))
    assert all(word in str(error.value) for word in words)


def test_keys_of_adamw_have_an_effect_beside_matrices(monkeypatch):
    for optimizer, expected in ((Sgd, ["optimizer.epsilon"]), (type("Own", (Muon,), {}), [])):
        for options in (declared.OPTIMIZERS, slots.OPTIMIZER_CLASSES):
            monkeypatch.setitem(options, "own", None)
            options.pop("own")
        register_optimizer(OptimizerKind("own", reads=("beta1", "beta2")), optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_config("llama3_8b", ["optimizer.kind=own", "optimizer.epsilon=1e-3", "optimizer.beta2=0.9"])
        found = [str(each.message).partition("=")[0] for each in caught]
        assert [key for key in found if key.startswith("optimizer.")] == expected


def test_a_name_that_is_taken_is_a_sentence():
    with pytest.raises(ConfigError, match="the optimizer adamw exists already"):
        register_optimizer(OptimizerKind("adamw"), Sgd)
    for name in ("int8", "bfloat16"):  # the second with the built-in one's declaration
        with pytest.raises(ConfigError, match=f"the form of moments {name} exists already"):
            register_form(MomentForm(name), Float16)
    register_form(MomentForm("test_float16"), type("Float16", (Float16,), {}))  # again, as in a notebook
    register_form(MomentForm("test_float16"), Float16)
    with pytest.raises(ConfigError, match="test_float16 exists already"):
        register_form(MomentForm("test_float16"), type("AnotherForm", (Float16,), {}))


class Odd(Optimizer):
    SLOTS = (COUNT, Slot("mean"))
    change: Any = None  # (gradients, slots) → what `direction` returns

    def direction(self, gradients, slots):
        return self.change(gradients, slots)


class OddMatrices(MatrixOptimizer):
    SLOTS = (COUNT,)

    def slots_of_matrices(self, rows, columns):
        return (Slot("size", (rows, 1)),)


def trace(monkeypatch, optimizer):
    """The update of a matrix [2, 6] by an optimizer."""
    monkeypatch.setitem(declared.OPTIMIZERS, "odd", OptimizerKind("odd", made=optimizer))
    monkeypatch.setitem(slots.OPTIMIZER_CLASSES, "odd", optimizer)
    mesh, placement = build_mesh(ONE, jax.devices()[:1]), place((2, 6), ("embed", "mlp"), ONE)
    plan = StepPlan.of(make_config(MODEL, {}, optimizer={"kind": "odd"}), mesh)
    parameter = SimpleNamespace(axes=placement.axes, role="matrix", muon=True)
    update, weights = Update.build(plan, {"w": parameter}, {"w": placement}, mesh), {"w": jnp.zeros((2, 6))}
    jax.eval_shape(update.directions, weights, update.first(weights).optimizer, weights)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda g, s: s, "Odd.direction returns dict: return the directions and the new slots"),
        (lambda g, s: ({n: x.sum() for n, x in g.items()}, s), r"returns \[\] as the direction w: return \[2, 6\]"),
        (lambda g, s: ({}, s), "Odd.direction does not return the direction w: "),
        (
            lambda g, s: (g, s | {"mean": {"w": jnp.zeros(())}}),
            r"float32\[\] as the slot mean.w: return float32\[2, 6\]",
        ),
        (lambda g, s: (g, s | {"mean": g["w"]}), r"nothing as the slot mean.w: return float32\[2, 6\]"),
        (lambda g, s: (g, s | {"count": s["count"] + 1.0}), r"float32\[\] as the slot count: return int32\[\]"),
        (lambda g, s: (g, {"mean": s["mean"]}), "does not return the slot count: return all of count, mean"),
        (lambda g, s: (g, (s["count"], s["mean"])), "returns its slots as tuple: return a dictionary with count, mean"),
        (lambda g, s: (g, s["variance"]), "Odd.direction reads 'variance', but its slots are .*mean.*SLOTS"),
        (lambda g, s: (g, s | {"more": s["count"]}), "returns the slot more too: return only count, mean"),
    ],
)
def test_directions_of_another_form_are_a_sentence(monkeypatch, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        trace(monkeypatch, type("Odd", (Odd,), {"change": staticmethod(change)}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m, s: m, "OddMatrices.of_matrices returns .*: return the directions and the new slots"),
        (lambda m, s: (m[0], {"size": s["size"]}), r"float32\[2, 6\] as directions: return float32\[1, 2, 6\]"),
        (lambda m, s: (m, {}), "of_matrices does not return the slot size: return all of size"),
        (lambda m, s: (m, s), "of_matrices returns the slot count too: return only size"),
        (lambda m, s: (m, {"size": s["size"] + m}), r"32\[1, 2, 6\] as the slot size: return float32\[1, 2, 1\]"),
        (lambda m, s: (m, {"size": s["size"].astype("bfloat16")}), r"bfloat16\[1, 2, 1\] as the slot size: "),
        (lambda m, s: (m, {"size": s["sizes"]}), "of_matrices reads 'sizes', but its slots are count, size"),
    ],
)
def test_matrices_of_another_form_are_a_sentence(monkeypatch, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        trace(monkeypatch, type("OddMatrices", (OddMatrices,), {"of_matrices": lambda self, *given: change(*given)}))


@pytest.mark.parametrize(
    ("base", "own", "sentence"),
    [
        (
            Odd,
            {"slots": (Slot("size", (2, 1)),)},
            r"Odd.SLOTS has the slot size of the shape \(2, 1\): .*slots_of_matrices",
        ),
        (OddMatrices, {"slots_of_matrices": (COUNT,)}, "Odd has the slot count twice: rename one"),
        (OddMatrices, {"slots_of_matrices": (Slot("mean"),)}, "slots_of_matrices has the slot mean .* like: .* SLOTS"),
        (
            OddMatrices,
            {"slots_of_matrices": Slot("size", (2, 1))},
            r"slots_of_matrices returns Slot\(.*: .* tuple of Slots",
        ),
        (OddMatrices, {"turns": True}, "Odd has turns or per_head, and slots_of_matrices, .*: leave out"),
        (OddMatrices, {"per_head": True}, "Odd has turns or per_head, and slots_of_matrices, .*: leave out"),
    ],
)
def test_slots_of_another_kind_are_a_sentence(monkeypatch, base, own, sentence):
    own = {name: x if x is True else lambda self, *sizes, x=x: x for name, x in own.items()}
    with pytest.raises(ConfigError, match=sentence):
        trace(monkeypatch, type("Odd", (base,), own))


def test_an_optimizer_is_checked_when_it_is_registered():
    class Lacking(Optimizer):
        SLOTS = (COUNT,)

    class LackingMatrices(MatrixOptimizer):
        pass

    class Twice(Sgd):
        SLOTS = (Slot("mean"), Slot("mean"))

    class Bare(OptaxOptimizer):
        SLOTS = (Slot("mu"),)

    class NoState(Bare):
        def transformation(self):
            return optax.scale_by_lion()

    class OtherSlots(NoState):
        STATE = optax.ScaleByLionState

    class SlotsOfSettings(OtherSlots):
        def slots(self):
            return (COUNT, Slot("mean"))

    for optimizer, sentence in (
        (Bare, "Bare does not define transformation: see megajax.optim.OptaxOptimizer"),
        (NoState, "NoState.STATE=None is no NamedTuple"),
        (OtherSlots, "OtherSlots has the slots mu, .*STATE ScaleByLionState has the fields count, mu: .*SLOTS"),
        (Lacking, "Lacking does not define direction"),
        (LackingMatrices, "LackingMatrices does not define of_matrices"),
        (type("Names", (Sgd,), {"SLOTS": ("mean",)}), r"Names.SLOTS is \('mean',\), .*Slot: .*Optimizer"),
        (Twice, "Twice has the slot mean twice: rename one"),
        (
            type("Sized", (Sgd,), {"SLOTS": (Slot("size", (2, 1)),)}),
            r"Sized.SLOTS has the slot size .*\(2, 1\): .*like",
        ),
        (
            type("Few", (Sgd,), {"direction": lambda self, gradients: None}),
            r"Few.direction .*\(self, gradients, slots\)",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            register_optimizer(OptimizerKind("test_odd"), optimizer)
    for keys, sentence in (
        ({"reads": ("beta1", "beta3")}, "test_odd reads beta3: use beta1, beta2, epsilon"),
        ({"decides_arrays": ("settings.size",)}, "test_odd depend on settings.size, .*: name one, such as settings"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            register_optimizer(OptimizerKind("test_odd", **keys), Sgd)
    assert "test_odd" not in declared.OPTIMIZERS
    for shape in ("row", ("rows", 1), (4,), (4, 0), [4, 1]):
        with pytest.raises(ConfigError, match="the slot size has the shape .*: use like, scalar, or two sizes"):
            Slot("size", shape)
    with pytest.raises(ConfigError, match="SlotsOfSettings has the slots count, mean, .* fields count, mu"):
        SlotsOfSettings(None).direction({}, {"count": None, "mean": {}})
