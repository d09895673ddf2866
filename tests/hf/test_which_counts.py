"""Folders that offer two of a thing: what counts is what transformers 5.24 takes, as seen by loading such folders."""

import json
import warnings
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megajax.config import ModelConfig
from megajax.errors import InputError
from megajax.hf import is_hf_folder
from megajax.hf.convert import load, read_folder, read_model
from megajax.hf.folder import HEADS, INDEX, SINGLE, FolderTensors, read_config, text_names
from megajax.model import Transformer, parameters

FILES = Path(__file__).parents[1] / "data_files"
FOLDERS = sorted(path.stem for path in FILES.glob("tiny_*.zip"))
EMBEDDING, HEAD = "model.embed_tokens.weight", HEADS[0]
TWO_FILES = {"one.safetensors": 0, "two.safetensors": 1}


@pytest.fixture
def unpacked(unpack):
    """(folder, its tensors) by name."""

    def unpacked(name: str) -> tuple[Path, dict[str, np.ndarray]]:
        return (folder := unpack(name)), load_file(folder / SINGLE)

    return unpacked


def read(folder: Path) -> dict[str, jax.Array]:
    """The folder's parameters by the model of its config.json; warnings are errors, unless a test expects them."""
    model = ModelConfig.model_validate(read_model(folder) | {"vocab_multiple": 1})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    declared = parameters(Transformer(model)).items()
    shapes = {name: jax.ShapeDtypeStruct(p.shape, np.float32, sharding=device) for name, p in declared}
    return load(folder, shapes, {}, model, "folder")[0]


def plus(tensors: dict[str, np.ndarray], number: float) -> dict[str, np.ndarray]:
    return {name: array + np.float32(number) for name, array in tensors.items()}


def write_index(folder: Path, files: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def error_of(folder: Path) -> str:
    with pytest.raises(InputError) as error:
        read(folder)
    assert str(folder) in str(error.value)
    return str(error.value)


# Files


@pytest.mark.parametrize("content", ["{}", '{"weight_map": ["w"]}', '{"weight_map": {"w": 1}}'])
def test_an_index_without_names_of_files_is_damaged(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(InputError, match=f"{INDEX} is damaged .it has no weight_map of file names.: copy it again"):
        FolderTensors(tmp_path)


@pytest.mark.smoke
def test_model_safetensors_counts_alone_beside_other_files(unpacked):
    folder, tensors = unpacked("tiny_llama")
    for stray in ("zz.safetensors", "consolidated.safetensors", "adapter_model.safetensors", "a.safetensors"):
        save_file(plus(tensors, 1) | {"more": tensors[HEAD]}, folder / stray)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    with warnings.catch_warnings(action="error"):
        np.testing.assert_array_equal(read(folder)["embedding.tokens"], tensors[EMBEDDING])
    write_index(folder, dict.fromkeys(tensors, "zz.safetensors"))
    with pytest.warns(UserWarning, match=f"{SINGLE} is read, and not the files of {INDEX}: remove one"):
        np.testing.assert_array_equal(read(folder)["embedding.tokens"], tensors[EMBEDDING])
    (folder / SINGLE).unlink()
    (folder / INDEX).unlink()
    assert f"has a.safetensors, but neither {SINGLE} nor {INDEX}" in error_of(folder)


@pytest.mark.smoke
def test_an_index_s_files_count_beside_other_files(unpacked):
    folder, tensors = unpacked("tiny_llama")
    (folder / SINGLE).unlink()
    names = [*tensors]
    files = {name: "two.safetensors" if names.index(name) % 2 else "one.safetensors" for name in names}
    for file in TWO_FILES:
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    save_file(plus(tensors, 1), folder / "zz.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    write_index(folder, files)
    with FolderTensors(folder) as weights:
        assert weights.files == files
    np.testing.assert_array_equal(read(folder)["embedding.tokens"], tensors[EMBEDDING])
    # transformers takes the last file, against the index
    save_file({EMBEDDING: tensors[EMBEDDING] + 1, **load_file(folder / "two.safetensors")}, folder / "two.safetensors")
    save_file({EMBEDDING: tensors[EMBEDDING], **load_file(folder / "one.safetensors")}, folder / "one.safetensors")
    assert f"{EMBEDDING} is in one.safetensors and in two.safetensors" in error_of(folder)


@pytest.mark.smoke
def test_adapters_beside_a_model_and_a_named_file_are_refused(unpacked):
    folder, _ = unpacked("tiny_llama")
    change_config(folder, transformers_weights="b.safetensors")
    assert f"transformers_weights=b.safetensors is not {SINGLE}: rename" in error_of(folder)
    (folder / "adapter_config.json").write_text("{}")  # whether they count depends on what is installed
    assert "adapters are in this folder" in error_of(folder)


def test_adapters_alone_are_refused_with_the_folder_of_their_base(tmp_path, monkeypatch):
    """The name in adapter_config.json is looked up in the working directory first, as transformers does."""
    adapters, work = tmp_path / "all" / "adapters", tmp_path / "elsewhere" / "work"
    for folder in (adapters, work):
        folder.mkdir(parents=True)
    monkeypatch.chdir(work)
    name = "../base"
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    assert is_hf_folder(adapters)
    neither = error_of(adapters)
    assert "base_model_name_or_path=../base is no folder of a model here, neither from the working" in neither
    for base, where in ((adapters.parent / "base", "from this folder"), (work.parent / "base", "from the working dir")):
        base.mkdir()
        (base / "config.json").write_text("{}")
        assert f"(../base {where}" in (error := error_of(adapters))
        assert Path(error.partition("base model alone, ")[2].partition(" (")[0]).resolve() == base


# Tensors


@pytest.mark.smoke
def test_the_head_of_a_tied_model_counts_if_it_differs(unpacked):
    folder, tensors = unpacked("tiny_llama_tied")
    assert HEAD not in tensors
    save_file(tensors | {HEAD: tensors[EMBEDDING]}, folder / SINGLE)
    with warnings.catch_warnings(action="error"):
        assert "head" not in read(folder)
    own = tensors[EMBEDDING].copy()
    own[-1, -1] += 1
    save_file(tensors | {HEAD: own}, folder / SINGLE)
    with pytest.warns(UserWarning, match=f"tie_word_embeddings=true in config.json, but {HEAD} and {EMBEDDING} differ"):
        found = read(folder)
    np.testing.assert_array_equal(found["head"], own.T)
    np.testing.assert_array_equal(found["embedding.tokens"], tensors[EMBEDDING])
    save_file({n: a for n, a in tensors.items() if n != EMBEDDING} | {HEAD: own}, folder / SINGLE)
    found = read(folder)
    np.testing.assert_array_equal(found["embedding.tokens"], own)
    assert "head" not in found
    change_config(folder, tie_word_embeddings=False)
    assert f"has no tensor {EMBEDDING}" in error_of(folder)
    save_file(tensors, folder / SINGLE)
    assert f"has no tensor {HEAD}" in error_of(folder)  # transformers makes a random one


def test_the_head_of_each_family_is_found_by_its_name(tmp_path):
    for path in sorted(FILES.glob("tiny_*.zip")):
        with zipfile.ZipFile(path) as archive:
            (tmp_path / "config.json").write_bytes(archive.read("config.json"))
        family, section, _ = read_folder(tmp_path)
        untied = ModelConfig.model_validate(section | {"tie_embeddings": False})
        assert [tensor.theirs for tensor in family.tensors(untied) if tensor.ours == "head"][0] in HEADS, path


@pytest.mark.smoke
@pytest.mark.parametrize("name", FOLDERS)
def test_names_of_a_model_without_its_head_are_read(unpacked, name):
    """As transformers' base classes save them, and GPT-2 was published."""
    folder, tensors = unpacked(name)
    prefix = "transformer." if name == "tiny_gpt2" else "model."
    save_file({tensor.removeprefix(prefix): array for tensor, array in tensors.items()}, folder / SINGLE)
    names = text_names(tensors, folder)
    with FolderTensors(folder) as weights:
        assert weights.files.keys() == names.keys()
        for tensor, stored in names.items():
            found = weights.read(tensor, tuple(slice(0, size) for size in tensors[stored].shape))
            np.testing.assert_array_equal(found, tensors[stored])


MASKS = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.uint8), "h.0.attn.masked_bias": np.float32([-1e4])}
SCALES = {f"layers.1.self_attn.{name}_scale": np.float32([0.02]) for name in ("q", "k", "v")}
SCALES["layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)


@pytest.mark.parametrize(("name", "others"), [("tiny_gpt2", MASKS), ("tiny_llama", SCALES)])
def test_masks_of_older_files_and_the_scales_of_engines_are_passed(unpacked, name, others):
    folder, tensors = unpacked(name)
    prefix = "transformer." if name == "tiny_gpt2" else "model."
    save_file(tensors | {prefix + tensor: array for tensor, array in others.items()}, folder / SINGLE)
    for name, weight in read(folder).items():
        assert np.isfinite(weight).all() and weight.size, name


@pytest.mark.parametrize(("dtype", "size"), [(np.float32, 4), (np.float16, 2), (ml_dtypes.bfloat16, 2)])
def test_tensors_are_read_in_each_dtype_and_have_its_bytes(tmp_path, dtype, size):
    stored = np.arange(12).reshape(3, 4).astype(dtype)
    save_file({"w": stored}, tmp_path / SINGLE)
    with FolderTensors(tmp_path) as weights:
        assert (weights.shape("w"), weights.itemsize("w")) == ((3, 4), size)
        np.testing.assert_array_equal(weights.read("w", (slice(1, 3), slice(0, 4))), stored[1:])


@pytest.mark.smoke
def test_both_names_of_a_tensor_are_refused(unpacked):
    folder, tensors = unpacked("tiny_llama")  # transformers takes one of GPT-2's and the other of Llama's
    save_file(tensors | {"embed_tokens.weight": tensors[EMBEDDING]}, folder / SINGLE)
    assert f"has the tensors embed_tokens.weight and {EMBEDDING}" in error_of(folder)


# Keys of config.json


@pytest.mark.smoke
def test_of_a_model_with_images_the_language_model_s_keys_count(tmp_path):
    def model_of(text: dict, **config) -> ModelConfig:
        whole = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"} | text, **config}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        return ModelConfig.model_validate(read_model(tmp_path))

    alone = model_of({})
    assert alone.hidden_size == 2304 and alone.tie_embeddings
    # of the part for images, or of nothing
    assert model_of({}, hidden_size=77, sliding_window=9, rope_theta=5.0, head_dim=3) == alone
    untied = alone.model_copy(update={"tie_embeddings": False})
    assert model_of({}, tie_word_embeddings=False) == model_of({"tie_word_embeddings": False}) == untied
    with pytest.raises(InputError, match=r"config.json: tie_word_embeddings is true and false"):
        model_of({"tie_word_embeddings": False}, tie_word_embeddings=True)
    both = {"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    both |= {"transformers_weights": SINGLE, "tie_word_embeddings": True}  # of the whole file, image tower or not
    whole = both | {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_config(tmp_path) == both | {"model_type": "gemma3_text"}
