"""Hugging Face folders that transformers wrote (tests/data_files/make_transformers_references.py), read and written."""

import json
import warnings
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import megajax
from megajax import sources
from megajax.checkpoint.description import describe_model
from megajax.config import Config, ModelConfig, load_config
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.errors import InputError
from megajax.hf.__main__ import main
from megajax.hf.beside import Beside
from megajax.hf.convert import export, family_for, open_readers, read_model, their_tensors
from megajax.hf.folder import INDEX, SINGLE, FolderTensors, text_names, write_folder
from megajax.hf.gpt_oss import GptOss
from megajax.hf.plan import plan
from megajax.hf.quantising import StoredForm
from megajax.hf.tensors import Tensor
from megajax.mesh import AXES, build_mesh
from megajax.model import Transformer, parameters
from megajax.model.block import layer_state, state_by_name
from megajax.schema.checkpoint import CheckpointConfig
from megajax.training.agreement import warn_of_longer_sequences
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

FILES = Path(__file__).parents[1] / "data_files"
FOLDERS = sorted(path.stem for path in FILES.glob("tiny_*.zip"))
MESHES = {
    "tiny_mixtral": {"expert": 2, "tensor": 2},
    "tiny_gpt_oss": {"expert": 2, "tensor": 2},
    "tiny_qwen3_local": {"pipeline": 2, "fsdp": 2},
    "tiny_deepseek_v3": {"expert": 2, "tensor": 2},
}
# Devices turn their pieces, with a program for each shape. These folders have all 29 kinds of a tensor (pattern,
# selected axes, fused, stacked, factor), one on stages; of the others the host turns whole shards, by the same code.
IN_PIECES = ("gpt2", "gpt_oss", "granitemoehybrid", "falcon_h1", "kimi_linear", "qwen3_5_moe_text", "qwen3_local")
IN_PIECES = tuple(f"tiny_{name}" for name in IN_PIECES)


def config_for(model: dict, mesh: dict | None = None) -> Config:
    return Config.model_validate(
        {
            "model": model | {"vocab_multiple": 64},
            "objective": {"kind": "next_token" if model.get("causal", True) else "masked_tokens"},
            "mesh": {"data": 1} | (mesh or {}),
            "batch": {"global_size": 8, "num_microbatches": 2, "sequence_length": 16},
            "data": {"kind": "synthetic"},
        }
    )


def stored_weights(name: str) -> dict[str, np.ndarray]:
    """The model's parameters as the script converted them, the vocabulary not padded."""
    return dict(np.load(FILES / f"{name}.npz"))


def read(folder: Path, config: Config) -> dict[str, jax.Array]:
    """The parameters of a folder on the mesh of `config`, and the layers' state."""
    count = int(np.prod([size for size in config.mesh.model_dump().values() if isinstance(size, int)]))
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    params, state = StateSaver(program).restore_weights(str(folder))
    return params | state_by_name(state)


@pytest.mark.smoke
@pytest.mark.parametrize("name", FOLDERS)
def test_config_json_describes_the_same_network(unpack, name):
    expected = json.loads(str(stored_weights(name)["model"]))
    if name == "tiny_deepseek_v3":  # how it is trained, which config.json does not say
        expected["router"]["loss_counts"] = "top_scores"
    assert config_for(read_model(unpack(name))).model == config_for(expected).model


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_on_a_mesh_are_those_of_transformers_bit_for_bit(unpack, name, request, monkeypatch):
    """Each shard goes to its own device: the first one has no room for all of them."""
    if name in IN_PIECES:
        request.getfixturevalue("small_pieces")
    # On a mesh each turns pieces or shards of its own, so those of many kinds; of the others the names count.
    mesh = MESHES.get(name, {"fsdp": 2} if name in IN_PIECES else {})
    folder, stored = unpack(name), stored_weights(name)
    # Another test has the check of the numbers, which is one more program of each model.
    monkeypatch.setattr(sources, "_are_finite", lambda arrays: [True] * len(arrays))
    put, device_put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, to=None, **how: put.append(to) or device_put(x, to, **how))
    found = read(folder, config_for(read_model(folder), mesh))
    assert put and None not in put
    for parameter, array in found.items():
        ours, theirs = np.asarray(array), stored[parameter]
        np.testing.assert_array_equal(ours[tuple(map(slice, theirs.shape))], theirs, err_msg=parameter)
        assert np.abs(ours).sum(dtype=np.float64) == pytest.approx(np.abs(theirs).sum(dtype=np.float64)), parameter


def test_weights_come_in_the_dtype_that_is_asked_for(unpack):
    weights = megajax.from_hf(unpack("tiny_llama"), dtype="bfloat16").weights.outer
    dtypes = {name: str(array.dtype) for name, array in weights.items()}
    assert dtypes == {"embedding.tokens": "bfloat16", "final_norm": "float32", "head": "bfloat16"}


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_modernbert"])
def test_the_head_is_not_read_for_an_objective_with_parameters_in_its_place(unpack, name):
    import_extensions(["docs/examples/value_head.py"])
    folder = unpack(name)
    config = config_for(read_model(folder))
    objective = {"kind": "value_head", "settings": {"outputs": 3}}
    found = read(folder, Config.model_validate(config.model_dump(mode="json") | {"objective": objective}))
    expected = read(folder, config)
    assert {each for each in expected if each not in found} == {each for each in expected if each.startswith("head")}
    np.testing.assert_array_equal(found["embedding.tokens"], expected["embedding.tokens"])


@pytest.mark.parametrize("upcycle", [True, False])
def test_experts_begin_as_copies_of_a_dense_folders_mlps(unpack, upcycle):
    folder, stored = unpack("tiny_llama"), stored_weights("tiny_llama")
    config = config_for(read_model(folder) | {"num_experts": 4})
    config = config.model_copy(update={"checkpoint": CheckpointConfig(init_from=str(folder), upcycle=upcycle)})
    if not upcycle:
        with pytest.raises(InputError, match=r"init_from=.*num_experts=4: set checkpoint\.upcycle=true"):
            read(folder, config)
        return
    found = read(folder, config)
    for expert in range(4):
        for name in ("gate", "up", "down"):
            np.testing.assert_array_equal(
                found[f"blocks.moe.moe.{name}"][:, expert], stored[f"blocks.dense.mlp.{name}"]
            )
    for name in ("attention.query", "attention.norm"):
        np.testing.assert_array_equal(found[f"blocks.moe.{name}"], stored[f"blocks.dense.{name}"])
    (read_once,) = plan(config, dict.fromkeys(AXES, 1), folder, 1)
    assert read_once.size == sum(array.nbytes for array in load_file(folder / SINGLE).values())


def test_weights_that_are_not_finite_are_refused_by_name(unpack):
    folder = unpack("tiny_llama")
    weights = load_file(folder / SINGLE)
    weights["model.layers.1.mlp.up_proj.weight"][2, 3] = np.nan
    save_file(weights, folder / SINGLE)
    with pytest.raises(InputError, match=r"init_from=.*tiny_llama.*: blocks.dense.mlp.up has NaN or Inf: give weights"):
        read(folder, config_for(read_model(folder), {"fsdp": 2}))
    with pytest.raises(InputError, match=r"folder=.*tiny_llama: blocks.dense.mlp.up has NaN or Inf: give weights"):
        megajax.from_hf(folder)  # as generate, chat and evaluate do
    weights["model.layers.1.mlp.up_proj.weight"][2, 3] = 1e5
    save_file(weights, folder / SINGLE)
    with pytest.raises(InputError, match=r"folder=.*: blocks.dense.mlp.up has .* bfloat16, .* float16's 65504"):
        megajax.from_hf(folder, dtype="float16")


def test_new_tokens_start_with_the_mean_of_the_others_on_any_mesh(unpack, small_pieces):
    folder = unpack("tiny_llama")
    model = read_model(folder)
    held = model["vocab_size"]
    grown = config_for(model | {"vocab_size": held + 7})
    on_one, stored = read(folder, grown), stored_weights("tiny_llama")
    shapes = {name: parameter.shape for name, parameter in parameters(Transformer(grown.model)).items()}
    mesh = build_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    for name, axis in (("embedding.tokens", 0), ("head", 1)):
        found, theirs = (np.moveaxis(np.asarray(a[name]), axis, 0) for a in (on_one, stored))
        np.testing.assert_array_equal(found[:held], theirs)
        mean = theirs.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(found[held : held + 7], np.broadcast_to(mean, (7, len(mean))), rtol=1e-6, atol=1e-9)
        assert len(found) == grown.model.padded_vocab_size and not found[held + 7 :].any()
        split = NamedSharding(mesh, PartitionSpec(*(("tensor", "fsdp") if axis == 0 else ("fsdp", "tensor"))))
        with open_readers(folder, grown.model, shapes, "checkpoint.init_from") as readers:
            np.testing.assert_array_equal(readers[name].on_devices(split, np.float32), on_one[name], err_msg=name)


@pytest.mark.smoke
def test_a_device_may_hold_padding_only(unpack):
    """The second of two devices begins behind the 99 tokens."""
    folder = unpack("tiny_llama")
    model = ModelConfig.model_validate(read_model(folder) | {"vocab_multiple": 2 * 99})
    shapes = {name: parameter.shape for name, parameter in parameters(Transformer(model)).items()}
    rows = NamedSharding(build_mesh({"fsdp": 2}, jax.devices()[:2]), PartitionSpec("fsdp"))
    with open_readers(folder, model, shapes, "checkpoint.init_from") as readers:
        found = np.asarray(readers["embedding.tokens"].on_devices(rows, np.float32))
    np.testing.assert_array_equal(found[:99], stored_weights("tiny_llama")["embedding.tokens"])
    assert len(found) == 198 and not found[99:].any()


def test_a_folder_with_more_tokens_than_the_run_is_refused(unpack):
    folder = unpack("tiny_llama")
    config = config_for(read_model(folder) | {"vocab_size": 90})
    with pytest.raises(InputError, match="model.vocab_size=[0-9]+, but this run has 90"):
        read(folder, config)


@pytest.mark.smoke
def test_a_replicated_shard_is_read_once(unpack, monkeypatch):
    names, read_block = [], FolderTensors.read
    monkeypatch.setattr(FolderTensors, "read", lambda self, *block: names.append(block[0]) or read_block(self, *block))
    folder = unpack("tiny_llama")
    found = read(folder, config_for(read_model(folder), {"data": 2, "tensor": 2}))
    assert names.count("model.norm.weight") == 1 and len(found["final_norm"].addressable_shards) == 4


@pytest.mark.smoke
@pytest.mark.parametrize("name", FOLDERS)
def test_an_exported_folder_has_the_tensors_of_transformers(unpack, tmp_path, name):
    folder, stored = unpack(name), stored_weights(name)
    model = config_for(read_model(folder)).model
    arrays = parameters(Transformer(model)) | state_by_name(layer_state(model))
    shapes = {n: p.shape for n, p in arrays.items()}
    padded = {
        n: np.pad(stored[n], [(0, size - own) for size, own in zip(shapes[n], stored[n].shape, strict=True)])
        for n in shapes
    }
    origin = json.loads((folder / "config.json").read_text())["model_type"]
    export(padded, model, tmp_path / "out", StoredForm("float32"), Beside(origin=origin))
    written = load_file(folder / SINGLE)  # Kimi Linear's MLPs under another name than the published one
    expected = {name: written[theirs] for name, theirs in text_names(written, folder).items()}
    assert not (tmp_path / "out" / INDEX).exists()  # one file, as in transformers
    found = load_file(tmp_path / "out" / SINGLE)
    assert found.keys() == expected.keys()
    for tensor, array in expected.items():
        assert found[tensor].dtype == array.dtype
        np.testing.assert_array_equal(found[tensor], array, err_msg=tensor)
    assert config_for(read_model(tmp_path / "out")).model == model
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["pad_token_id"] is None, "absent it would be the family's, such as Gemma's 0"


@pytest.mark.smoke
def test_the_published_config_of_gpt_oss_is_that_of_configs():
    """In the layout that the folder has: RoPE's older keys, and the experts' quantisation."""
    scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    published = {
        "attention_bias": True,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-5,
        "rope_scaling": scaling | {"original_max_position_embeddings": 4096},
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    path = Path(__file__).parents[2] / "configs/models/gpt_oss_20b.yaml"
    ours = load_config(path, ["batch.global_size=1", "batch.sequence_length=128", "data.kind=synthetic"]).model
    assert describe_model(ModelConfig.model_validate(GptOss().read(published))) == describe_model(ours)
    del published["rope_scaling"], published["rope_theta"]  # transformers' defaults
    for length in (131072, 65536):  # the factor is not their ratio
        published["max_position_embeddings"] = length
        assert describe_model(ModelConfig.model_validate(GptOss().read(published))) == describe_model(ours)


@pytest.mark.smoke
def test_a_large_model_is_written_in_several_files(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"layer.{i}": rng.standard_normal((10, 5)).astype(np.float32) for i in range(5)}
    write_folder(tmp_path / "out", {}, iter(arrays.items()), shard_bytes=450)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 5 * 10 * 5 * 4}  # bytes
    files = index["weight_map"]
    assert sorted(set(files.values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    with FolderTensors(tmp_path / "out") as weights:
        for name, array in arrays.items():
            np.testing.assert_array_equal(weights.read(name, (slice(2, 4), slice(0, 5))), array[2:4])


def test_tensors_are_in_the_order_of_their_layers():
    model = ModelConfig(num_layers=11, hidden_size=8, num_heads=1, vocab_size=8)
    weights = {"blocks.dense.attention.norm": np.arange(11.0)[:, None] * np.ones(8)}
    norms = Tensor("blocks.dense.attention.norm", "layers.{layer}.norm")
    found = [(name, x[0]) for name, x in their_tensors(weights, [norms], model, np.dtype("float32"), {})]
    assert found == [(f"layers.{layer}.norm", layer) for layer in range(11)]


@pytest.mark.smoke
def test_the_section_model_is_printed(unpack, capsys):
    assert main(["config", str(unpack("tiny_mistral"))]) == 0
    assert "  sliding_window: 7\n" in capsys.readouterr().out


def test_silu_may_be_called_swish(unpack):
    folder = unpack("tiny_llama")
    expected = read_model(folder)
    change_config(folder, hidden_act="swish")
    assert read_model(folder) == expected


# Mistakes


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def truncate(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: len(content) // 2])


def lie_about_offsets(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1)
    (folder / SINGLE).write_bytes(content[:8] + header + content[8 + length :])


def make_index(folder: Path) -> None:
    names = load_file(folder / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}))
    (folder / SINGLE).unlink()


def only_a_pickle(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


Q = "model.layers.1.self_attn.q_proj.weight"
MISTAKES = {
    "another family": (
        lambda f: change_config(f, model_type="bert"),
        "model_type=bert is not known: megajax reads bamba",
    ),
    "another activation": (lambda f: change_config(f, hidden_act="gelu"), "hidden_act=gelu is not silu"),
    "a negative size": (
        lambda f: change_config(f, num_hidden_layers=-3),
        "config.json: num_hidden_layers=-3 is too small: use 1 or more.",
    ),
    "a size in words": (
        lambda f: change_config(f, hidden_size="x"),
        "config.json: hidden_size=x is not a whole number: write one such as 4, without quotes.",
    ),
    "a boolean in words": (
        lambda f: change_config(f, tie_word_embeddings="no"),
        "tie_word_embeddings=no is not true or false",
    ),
    "positions in words": (
        lambda f: change_config(f, rope_parameters="llama3"),
        "rope_parameters=llama3 is not a mapp",
    ),
    "a factor in words": (
        lambda f: change_config(f, rope_parameters={"rope_type": "linear", "factor": "x"}),
        "config.json: rope_parameters.factor=x is not a number: copy it again.",
    ),
    "a factor in words, in the older layout": (
        lambda f: change_config(f, rope_scaling={"rope_type": "linear", "factor": "x"}),
        "config.json: rope_scaling.factor=x is not a number: copy it again.",
    ),
    "a factor in words of one kind of layers": (
        lambda f: change_config(f, rope_parameters={"full_attention": {"rope_type": "linear", "factor": "x"}}),
        "config.json: rope_parameters.full_attention.factor=x is not a number: copy it again.",
    ),
    "a small factor": (
        lambda f: change_config(f, rope_parameters={"rope_type": "linear", "factor": 0.5}),
        "config.json: rope_parameters.factor=0.5 is too small: use 1 or more.",
    ),
    "no factor": (
        lambda f: change_config(f, rope_parameters={"rope_type": "linear"}),
        "config.json has no rope_parameters.factor: copy it again.",
    ),
    "part of each head": (
        lambda f: change_config(f, partial_rotary_factor=0.5),
        "partial_rotary_factor=0.5, and megajax cannot compute this: use another model",
    ),
    "too few kinds of layers": (
        lambda f: change_config(f, layer_types=["full_attention"]),
        "layer_types has 1 entry, but the model has 3 layers",
    ),
    "a width of scores": (
        lambda f: change_config(f, query_pre_attn_scalar=0),
        "query_pre_attn_scalar=0 is not a whole number from 1 to 134,217,728: copy it again.",
    ),
    "a length that no run has": (
        lambda f: change_config(f, max_position_embeddings=2**62),
        "max_position_embeddings=4611686018427387904 is not a whole number from 1 to 134,217,728: copy it again.",
    ),
    "no key": (lambda f: (f / "config.json").write_text("{}"), "has no model_type"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "another size": (lambda f: change_config(f, num_hidden_layers=2), "model.num_layers=2, but this run has 3"),
    "an activation": (
        lambda f: change_config(f, hidden_act="relu6"),
        "hidden_act=relu6 is not silu, and megajax cannot",
    ),
    "no tensor": (lambda f: change_tensors(f, lambda t: t.pop(Q)), f"has no tensor {Q}: copy"),
    **{  # of transformers' decoders, of its encoders and of T5
        f"the head of a classifier, {head}": (
            partial(change_tensors, change=lambda t, head=head: t.update({head: t.pop("lm_head.weight")})),
            f"has no tensor lm_head.weight, but {head}, which no parameter needs: it is a classifier",
        )
        for head in ("score.weight", "classifier.weight", "classification_head.out_proj.weight")
    },
    "another shape": (
        lambda f: change_tensors(f, lambda t: t.update({Q: t[Q][1:].copy()})),
        "by config.json it has [48, 48]",
    ),
    "one too many": (lambda f: change_tensors(f, lambda t: t.update(more=t[Q])), "has the tensor more, which"),
    "a dtype": (lambda f: change_tensors(f, lambda t: t.update({Q: t[Q].astype(np.int32)})), "has dtype I32: save"),
    "truncated": (truncate, "is damaged or not a safetensors file"),
    "a pointer of Git LFS": (
        lambda f: (f / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is a pointer of Git LFS, not the file: run git lfs pull",
    ),
    "lying offsets": (lie_about_offsets, "is damaged or not a safetensors file"),
    "a missing file": (make_index, "lacks model-00001-of-00002.safetensors, which its index names"),
    "a pickle": (only_a_pickle, "is a pickle, which can run any program"),
    "no weights": (lambda f: (f / SINGLE).unlink(), "has no model.safetensors"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(unpack, mistake):
    folder = unpack("tiny_llama")
    config = config_for(read_model(folder))
    change, sentence = MISTAKES[mistake]
    change(folder)
    with pytest.raises(InputError) as error:
        read(folder, config)
    assert sentence in str(error.value) and str(folder) in str(error.value)


@pytest.mark.smoke
def test_weights_may_start_a_model_with_a_longer_context_if_the_change_is_named(unpack):
    folder = unpack("tiny_llama")
    longer = {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_positions": 64}}
    config = config_for(read_model(folder) | longer)
    with pytest.raises(
        InputError, match=r"(?s)or name those that are meant in checkpoint.allow_changes.*rope_scaling="
    ):
        read(folder, config)
    config = config.model_copy(update={"checkpoint": CheckpointConfig(allow_changes=("model.rope_scaling",))})
    expected = stored_weights("tiny_llama")
    with pytest.warns(UserWarning, match=r"let through by checkpoint.allow_changes: model.rope_scaling="):
        found = read(folder, config)
    np.testing.assert_array_equal(found["blocks.dense.attention.query"], expected["blocks.dense.attention.query"])
    plain = config_for(read_model(folder))
    base = plain.model_copy(update={"model": plain.model.model_copy(update={"rope_theta": 1e6})})
    base = base.model_copy(update={"checkpoint": CheckpointConfig(allow_changes=("model.rope_theta",))})
    for config_of_length, length in ((plain, 513), (config, 513), (base, 513), (plain, 512)):
        batch = config_of_length.batch.model_copy(update={"sequence_length": length})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read(folder, config_of_length.model_copy(update={"batch": batch}))
        said = [text for each in caught if "batch.sequence_length=513" in (text := str(each.message))]
        assert len(said) == (config_of_length is plain and length == 513)
        assert all("512 positions" in text and "model.rope_scaling" in text and str(folder) in text for text in said)
    other = config.model_copy(update={"model": config.model.model_copy(update={"qk_norm": True})})
    other = other.model_copy(update={"checkpoint": CheckpointConfig(allow_changes=("model",))})
    with pytest.raises(
        InputError, match=r"qk_norm=false, but this run has true \(checkpoint.allow_changes can't let it"
    ):
        read(folder, other)


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        (None, "set batch.sequence_length=512 or less, or model.rope_scaling='{kind: yarn, factor: 3, original_max_po"),
        ({"rope_type": "linear", "factor": 2.0}, "or a larger model.rope_scaling.factor with"),
        ({"rope_type": "dynamic", "factor": 2.0}, None),  # it grows with the sequence
    ],
)
def test_sequences_beyond_the_positions_of_a_folder_are_a_warning_with_the_scaling_to_set(unpack, scaling, sentence):
    path = unpack("tiny_llama") / "config.json"
    rope = {"rope_theta": 1e4, "rope_parameters": None, "rope_scaling": scaling, "max_position_embeddings": 512}
    path.write_text(json.dumps(json.loads(path.read_text()) | rope))
    config = config_for(read_model(path.parent))
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"sequence_length": 1025})})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_longer_sequences(config, sources.find_source(path.parent, "FOLDER"), config.model)
    assert len(caught) == (sentence is not None) and all(sentence in str(each.message) for each in caught)


@pytest.mark.smoke
def test_a_failed_export_leaves_nothing(tmp_path):
    def tensors():
        yield "a", np.zeros(3, np.float32)
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="could not be written .No space left on device.: free disk space"):
        write_folder(tmp_path / "out", {}, tensors(), shard_bytes=4)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(InputError, match="out exists: give a new folder"):
        write_folder(tmp_path / "out", {}, iter([]))
    assert (tmp_path / "out" / "mine").exists()


@pytest.mark.smoke
def test_a_model_that_no_family_has_is_refused():
    model = config_for(json.loads(str(stored_weights("tiny_llama")["model"])) | {"logit_softcap": 30.0}).model
    with pytest.raises(InputError, match="megajax writes has model.logit_softcap=30.0 .*nearest is llama"):
        family_for(model)
