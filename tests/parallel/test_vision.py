"""Vision towers and image embeddings among tokens, on meshes against megajax/reference.py."""

from functools import cache

import jax
import numpy as np
import pytest
from image_rows import random_rows, with_images

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError, InputError
from megajax.estimate.costs import flops_per_token
from megajax.mesh import build_mesh
from megajax.model.lora import is_adapter
from megajax.model.trained import part_of
from megajax.schema.config import KernelsConfig
from megajax.schema.model import ModelConfig
from megajax.schema.vision import VisionConfig
from megajax.step.nodes import plus
from megajax.step_plan import StepPlan
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

ROWS, LENGTH, IMAGE = 6, 24, 49
TEXT = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "ffn_hidden_size": 20,
    "vocab_size": 50,
    "vocab_multiple": 4,
    "init_std": 0.2,
}
TOWER = {"image_token": IMAGE, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 24}
TOWER |= {"patch_size": 2, "merge": 2}
# As Qwen2.5-VL's: windows, images of several sizes, positions of time, row and column. As Qwen3-VL's: a table stretched
# over images, features that are added after two of three layers, positions that take turns
WINDOWS = {"window": 4, "global_layers": [1], "norm": "rmsnorm", "patches_per_row": 48, "temporal_patch_size": 2}
WINDOWS |= {"grid": 3, "interpolate": True, "deepstack_layers": [0, 1]}
SECTIONS = {"rope_sections": [1, 1, 1], "rope_interleaved": True, "num_layers": 3, "block_pattern": ["attention"]}
# As Gemma 3's: learned positions, averages, attention to both sides within an image, also in windows
AVERAGE = {"grid": 4, "projector": "average", "bidirectional": True, "patches_per_row": 48}
MODELS = {
    "windows": TEXT | SECTIONS | {"vision": TOWER | WINDOWS},
    "average": TEXT | {"sliding_window": 5, "layer_pattern": ["local", "global"], "vision": TOWER | AVERAGE},
}
SIZES = {"windows": [[(6, 4), (2, 4)], [(2, 6)], [], [(4, 2), (2, 2), (2, 2)]], "average": [[(4, 4)] * 2, [(4, 4)]] * 2}
PACKED = {"data": {"reset_attention": True}}


def make(table, name: str, mesh, microbatches=1, vision=None, **sections) -> Config:
    batch = {"global_size": ROWS, "sequence_length": LENGTH}
    model = MODELS[name] | {"vision": MODELS[name]["vision"] | (vision or {})}
    sections = {"optimizer": "sgd", "microbatches": microbatches, "steps": 1, "batch": batch} | sections
    return table.make_config(model, mesh, **sections)


def fields(name: str) -> dict[str, np.ndarray]:
    """Sequences with several images, one, or none, and rows of patches with padding; two documents each."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, IMAGE, (ROWS, LENGTH + 1))
    rows = random_rows([SIZES[name][i % 4] for i in range(ROWS)], MODELS[name]["vision"], rng)
    index = with_images(tokens[:, :-1], rows, IMAGE)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "image_index": index}
    batch["loss_mask"] = (batch["targets"] != IMAGE).astype(np.float32)
    batch["positions"] = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    batch["segment_ids"] = np.broadcast_to(np.arange(LENGTH) >= LENGTH - 3, (ROWS, LENGTH)).astype(int)
    batch |= {field: np.stack([row[field] for row in rows]) for field in rows[0]}
    if "rope_sections" in MODELS[name]:
        batch["rope_positions"] = rng.integers(0, LENGTH, (ROWS, LENGTH, 3))
    return batch


@pytest.fixture(scope="module")
def expected(table):
    """Model → (loss, gradients) by megajax/reference.py."""

    @cache
    def of(name: str):
        config = make(table, name, {}, **PACKED)
        losses, gradients = table.expected_gradients(config, table.weights_of(config), fields(name))
        return losses["loss"], gradients

    return of


def groups(*parameters: list[str]) -> dict:
    """`optimizer.groups` of which the last has the learning rate 0."""
    *trained, last = ({"parameters": names} for names in parameters)
    return {"optimizer": {"groups": [*trained, last | {"learning_rate": 0.0}]}}


ALL = ("language model", "vision tower", "projector")
CASES = [
    # Of three microbatches the second stage computes the tower of one.
    ("windows", {"pipeline": 2, "context": 2}, {"microbatches": 3}, ALL),
    pytest.param("windows", {"fsdp": 2, "tensor": 2}, {}, ALL, marks=pytest.mark.long),  # one pass over all layers
    pytest.param(
        *("average", {"context": 2, "tensor": 2}, groups(["vision.projector.*"], ["vision.*"]), (ALL[0], ALL[2])),
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("name", "mesh", "changes", "parts"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_the_reference(table, expected, name, mesh, changes, parts):
    config, (loss, gradients) = make(table, name, mesh, **changes, **PACKED), expected(name)
    count = int(np.prod([*mesh.values()]))
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    state, batch = table.first_state(program, table.weights_of(config)), to_global(program, fields(name))
    assert all(np.linalg.norm(gradients[f"vision.{n}"]) > 0 for n in ("patch", "blocks.dense.attention.query"))
    before = {n: np.asarray(w) for n, w in state.params.items()}
    trained = {name: gradient for name, gradient in gradients.items() if part_of(name) in parts}
    after = table.check_first_step(program, state, batch, float(loss), trained)
    assert all((before[name] == np.asarray(w)).all() == (name not in trained) for name, w in after.params.items())


FROZEN = {
    "tower": (groups(["vision.projector.*"], ["vision.*"]), lambda name: part_of(name) in (ALL[0], ALL[2])),
    "adapters": ({"lora": {"rank": 2, "targets": ["query"]}, "checkpoint": {"init_from": "base"}}, is_adapter),
}


@pytest.mark.parametrize("case", FROZEN)
def test_a_frozen_tower_has_weights_alone(table, case):
    """The step can be traced; its numbers are the long test's."""
    sections, is_trained = FROZEN[case]
    config = make(table, "average", {}, **sections)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    state, names = program.abstract_state, program.placements.keys()
    trained = {name for name in names if is_trained(name)}
    assert trained and program.plan.trained.keys() == trained
    assert {*state.params, *state.frozen} == names and state.params.keys() >= trained
    assert {*program.update.slots.placements} == trained
    assert len(program.graph.frozen) == 1
    jax.eval_shape(program.train_step, state, program.abstract_batch)


def test_the_gradients_of_a_stream_from_the_layers_and_the_embedding_are_added():
    """As those of image embeddings with DeepStack; the long test of one pass has them in a step."""
    assert plus({"images": 3, "hidden": 5}, {"images": 4, "bias": 6}) == {"images": 7, "hidden": 5, "bias": 6}


def test_an_empty_slot_has_no_number_of_a_layer_that_adds_features(table):
    """Of five layers four add features. The second of four stages has one, beside the slot of the third's second."""
    tower = MODELS["windows"]["vision"] | {"num_layers": 4, "deepstack_layers": [0, 1, 2, 3]}
    model, stages = MODELS["windows"] | {"num_layers": 5, "vision": tower}, {"layout": [1, 1, 2, 1]}
    config = table.make_config(model, {"pipeline": 4}, microbatches=4, pipeline=stages)
    plan = StepPlan.of(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    assert plan.image_slots == range(2)
    assert plan.first_layers.tolist() == [[[-1, 0]], [[1, -1]], [[2, 3]], [[4, -1]]]
    without = StepPlan.make(table.make_config(TEXT | {"num_layers": 5}, pipeline=stages), plan.sizes, plan.hardware)
    assert without.first_layers.tolist() == [[-1], [1], [2], [4]]  # here the first slot of the first stage is empty


def test_heads_of_a_tower_without_rotary_positions_have_any_width(table):
    config = make(table, "average", {}, vision={"num_heads": 8})  # of width 2
    assert check_mesh(config, 1)["tensor"] == 1


def test_the_layers_of_a_tower_have_every_setting_that_a_model_has_too():
    """Except `embedding_norm`, which is of the patches, and no layer's."""
    own = {"num_layers": 3, "hidden_size": 8, "num_heads": 2, "ffn_hidden_size": 12, "norm": "rmsnorm"}
    own |= {"norm_epsilon": 0.5, "activation": "swiglu", "rope_theta": 7.0}
    assert own.keys() == (VisionConfig.model_fields.keys() & ModelConfig.model_fields.keys()) - {"embedding_norm"}
    vision = {"image_token": IMAGE, "patches_per_row": 4, **own}
    layers = ModelConfig.model_validate(TEXT | {"vision": vision}).of_vision
    assert {name: getattr(layers, name) for name in own} == own


def test_the_layers_of_a_tower_choose_attention_where_cudnn_takes_no_documents(table):
    config = make(table, "average", {})
    for chosen, expected in (("cudnn", "auto"), ("reference", "reference")):
        tower = config.model_copy(update={"kernels": KernelsConfig(attention=chosen)}).of_vision
        assert tower is not None and tower.kernels.attention == expected


@pytest.mark.parametrize(
    ("name", "limits"), [("windows", {"image_index": 12}), ("average", {"image_index": 12, "patch_positions": 4})]
)
def test_numbers_beyond_a_row_of_images_or_a_table_are_refused(table, name, limits):
    """48 patches are 12 embeddings; the table of positions has 4 rows and columns."""
    config = make(table, name, {}, **PACKED)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    for field, limit in limits.items():
        for wrong in (limit, -2):
            batch = fields(name)
            batch[field] = np.full_like(batch[field], wrong)
            with pytest.raises(InputError, match=f"holds {wrong} in {field}: give numbers below {limit}"):
                to_global(program, batch)


def test_flops_are_those_of_the_tower_too(table):
    """By hand, per token: a patch of 12 numbers attends to the 16 of its image; a block becomes one embedding."""
    D, F, S, V, rows, pair = 16, 24, LENGTH, 52, 48, 2 * 16
    layers = 2 * rows * (4 * D * D + 2 * D * F + 16 * pair)
    patches, projector = rows * 12 * D, rows / 4 * D * D
    local, whole = 5 - 25 / (2 * S), S / 2
    N, K, G, of_text = 4 * 6, 2 * 6, 20, 2 * 4 * 6  # heads of 6, two of them with keys and values
    text = 2 * (2 * D * N + 2 * D * K + 3 * D * G) + (local + whole) * of_text + D * V

    def of(*parameters: list[str]) -> float:
        return flops_per_token(make(table, "average", {}, **(groups(*parameters) if parameters else {})))

    assert of() == pytest.approx(6 * (layers + patches + projector) / S + 6 * text)
    tower_frozen = of(["vision.projector.*"], ["vision.*"])
    assert tower_frozen == pytest.approx((2 * (layers + patches) + 6 * projector) / S + 6 * text)
    projector_frozen = of(["vision.projector.*"])  # gradients pass through it
    assert projector_frozen == pytest.approx((6 * (layers + patches) + 4 * projector) / S + 6 * text)
    attended = 2 * (local + whole) * of_text  # as of adapters' bases, attention counts whole
    text_frozen = of(["vision.*"], ["*"])
    assert text_frozen == pytest.approx(6 * (layers + patches + projector) / S + 4 * text + attended)
    whole = flops_per_token(make(table, "windows", {}, vision={"window": None, "global_layers": []}))
    in_windows = 2 * (8 - 8**2 / (2 * rows))  # a window of 4 x 4 patches counts as 8 on both sides
    assert whole - flops_per_token(make(table, "windows", {})) == pytest.approx(
        6 * rows / S * (rows - in_windows) * pair
    )


@pytest.mark.parametrize(
    ("name", "mesh", "vision", "sections", "sentence"),
    [
        ("windows", {}, {"patches_per_row": 50}, {}, "is not a multiple of the 4 patches of an embedding"),
        ("windows", {}, {"window": 3}, {}, "model.vision.window=3 is not a multiple of model.vision.merge=2"),
        ("windows", {}, {"global_layers": [2]}, {}, "names a layer that the tower does not have .*: use 0 to 1"),
        ("windows", {}, {"deepstack_layers": [1, 0]}, {}, "is not in increasing order"),
        ("windows", {}, {"deepstack_layers": [0, 0]}, {}, "is not in increasing order .*: sort it, each layer once"),
        ("windows", {}, {"num_layers": 4, "deepstack_layers": [0, 1, 2, 3]}, {}, "num_layers=3 .*: remove some"),
        (
            "windows",
            {"context": 4},
            {"num_heads": 2},
            {"communication": {"context": "all_to_all"}},
            "mesh.context=4, which does not divide the 2 of a device .*: use communication.context=",
        ),
        ("windows", {}, {"grid": None}, {}, "model.vision.interpolate=true needs learned positions"),
        ("windows", {}, {}, {"remat": {"group": 3}}, "features are read and added after single layers"),
        (
            "average",
            {},
            {"num_layers": 3},
            {"remat": {"policy": "full", "group": 2}},
            "remat.group=2 does not divide the 3 .* of model.vision.num_layers=3 .*: use 1",
        ),
        ("windows", {}, {"image_token": 50}, {}, "image_token=50 is not below model.vocab_size=50"),
        ("windows", {}, {"num_heads": 8}, {}, "is not a multiple of 4, as rotary positions by row and column need"),
        ("average", {}, {"class_token": True}, {}, "because a class entry is in no block"),
        (
            "average",
            {"context": 4},
            {"patches_per_row": 36},
            {},
            "mesh.context=4 x .* into parts of whole image embeddings",
        ),
        (
            "average",
            {"tensor": 2},
            {"patches_per_row": 36},
            {},
            "tensor=2 does not divide .* whole image embeddings",
        ),
        ("average", {"tensor": 2}, {"ffn_hidden_size": 21}, {}, "does not divide model.vision.ffn_hidden_size=21"),
        ("average", {}, {}, {"precision": {"fp8": {"recipe": "current"}}}, "the tower's layers are not quantised"),
    ],
)
def test_what_cannot_run_is_a_sentence(table, name, mesh, vision, sections, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_mesh(make(table, name, mesh, vision=vision, **sections), int(np.prod([*mesh.values()])))
