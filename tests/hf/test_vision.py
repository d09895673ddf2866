"""Models that read images against transformers: folders, logits, gradients (data_files/make_vision_references.py)."""

import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from megajax.config import ModelConfig
from megajax.hf.convert import FAMILIES, export, family_for, open_readers, read_model, their_tensors
from megajax.hf.reader import on_devices
from megajax.hf.vision_language import VisionLanguage
from megajax.model import Transformer, bind, parameters

FILES = Path(__file__).parents[1] / "data_files"
NAMES = ["llava", "gemma3", "qwen2_5_vl"]
FIELDS = ("patches", "patch_segments", "patch_positions", "image_index", "rope_positions")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def unpack(tmp_path_factory):
    """Name → its folder."""
    folder = tmp_path_factory.mktemp("vision")
    for name in NAMES:
        with zipfile.ZipFile(FILES / f"images_{name}.zip") as archive:
            archive.extractall(folder / name)
    return folder.joinpath


@pytest.fixture(scope="module")
def stored():
    """By name the outputs of transformers."""
    return {name: np.load(FILES / f"images_{name}.npz") for name in NAMES}


def model_of(folder: Path) -> ModelConfig:
    return ModelConfig.model_validate(read_model(folder) | {"vocab_multiple": 1})


def read(folder: Path, model: ModelConfig) -> dict[str, jax.Array]:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    declared = parameters(Transformer(model)).items()
    shapes = {name: jax.ShapeDtypeStruct(p.shape, np.float32, sharding=device) for name, p in declared}
    with open_readers(folder, model, {n: s.shape for n, s in shapes.items()}, "checkpoint.init_from") as readers:
        return on_devices(readers, shapes, {})[0]


def relative(ours, theirs) -> float:
    return float(np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs))


def published(name: str, tensor: str) -> str:
    """A network's name of a tensor → the published one."""
    family = FAMILIES[name]
    assert isinstance(family, VisionLanguage)
    return next(iter(family.stored_names([tensor], Path())))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_all_gradients_are_those_of_transformers(unpack, stored, name):
    model, arrays = model_of(unpack(name)), stored[name]
    expected = json.loads(str(arrays["model"])) | {"vocab_multiple": 1}
    rows = expected["vision"]["patches_per_row"]
    model = model.model_copy(update={"vision": model.vision.model_copy(update={"patches_per_row": rows})})
    assert model == ModelConfig.model_validate(expected)
    network, weights = Transformer(model), read(unpack(name), model)
    fields = {field: jnp.asarray(arrays[field]) for field in FIELDS if field in arrays}
    counted = arrays["targets"] >= 0

    def loss(weights):
        logits = bind(network, weights)(arrays["tokens"], fields=fields)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), arrays["targets"][..., None], axis=-1)[..., 0]
        return -(chosen * counted).sum() / counted.sum(), logits

    (found, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    assert relative(logits, arrays["logits"]) < TOLERANCE and relative(found, arrays["loss"]) < TOLERANCE
    theirs = dict(their_tensors(gradients, family_for(model).tensors(model), model, np.dtype("float32"), {}))
    given = {published(name, key.removeprefix("gradient:")): arrays[key] for key in arrays if "gradient:" in key}
    assert theirs.keys() == given.keys()
    whole = np.sqrt(sum(np.square(gradient).sum() for gradient in given.values()))
    for tensor, gradient in theirs.items():  # a bias of keys has none
        zero = np.linalg.norm(given[tensor]) < 1e-6 * whole
        assert (np.linalg.norm(gradient) < 1e-6 * whole) if zero else relative(gradient, given[tensor]) < TOLERANCE, (
            tensor
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_read_and_written_as_it_was(unpack, tmp_path, name):
    model = model_of(unpack(name))
    weights = read(unpack(name), model)
    export(weights, model, tmp_path, "float32", {})
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (unpack(name), tmp_path))
    named = {published(name, tensor): array for tensor, array in theirs.items()}
    assert ours.keys() <= named.keys() and all((named[tensor] == ours[tensor]).all() for tensor in ours)
    unused = FAMILIES[name].unused(json.loads((unpack(name) / "config.json").read_text()))
    assert all(tensor.startswith(unused) for tensor in named.keys() - ours.keys())
    assert model_of(tmp_path) == model
