"""Checkpoints that megatron-core 0.19.2 wrote are read: `gqa` by two tensor-parallel ranks on each of two pipeline
stages, with a padded vocabulary, biases and normalised queries; `v3` with latent attention, YaRN, a dense layer, groups
of experts, shared experts and a prediction module.

Their weights are `pattern` of the parameter's name here; Megatron's logits of the tokens are stored beside them.
"""

import argparse
import enum
import io
import os
import pickle
import shutil
import struct
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from megatron_files import pattern, stored, unpacked
from single_device import make_config
from single_device import stored as stored_form

from megajax.config import ModelConfig, load_config
from megajax.errors import InputError
from megajax.hf import reader
from megajax.megatron.convert import load, open_readers
from megajax.megatron.distributed import METADATA, NEWEST, MegatronTensors, StoredTensor, named_parts, saved_arguments
from megajax.megatron.pickled import TorchZip, load_plain
from megajax.megatron.torch_files import Call, Instance, Named, Pairs, pickled
from megajax.megatron.writer import DCP
from megajax.mesh import build_mesh
from megajax.model import Transformer, bind, parameters
from megajax.model.block import layer_state
from megajax.sources import initial_weights
from megajax.tools.from_megatron.__main__ import main
from megajax.training.loop import Trainer

F32 = np.dtype("float32")


@pytest.fixture
def unpack(tmp_path):
    return lambda name: unpacked(name, tmp_path)


def read(folder, model: ModelConfig, left_out=()):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=device)

    declared = parameters(Transformer(model))
    wanted = {name: abstract(parameter) for name, parameter in declared.items() if name not in left_out}
    kept = {kind: {name: abstract(a) for name, a in own.items()} for kind, own in layer_state(model).items()}
    return load(str(folder), wanted, kept, model)


@pytest.mark.parametrize("name", ["gqa", pytest.param("v3", marks=pytest.mark.long)])
def test_weights_are_those_that_megatron_saved_and_logits_are_megatrons(unpack, name):
    section, tokens, logits = stored(name)
    model = ModelConfig.model_validate(section | {"vocab_multiple": 32})
    weights, state = read(unpack(name), model)
    for parameter, array in weights.items():
        whole = ModelConfig.model_validate(section | {"vocab_multiple": 1})
        shape = parameters(Transformer(whole))[parameter].shape
        expected = np.zeros(array.shape, np.float32)  # the vocabulary's padding here
        expected[tuple(map(slice, shape))] = pattern(parameter, shape)
        np.testing.assert_array_equal(array, expected, err_msg=parameter)
    if name == "gqa":  # an objective with parameters in place of the head
        assert read(unpack(name), model, left_out=("head",))[0].keys() == weights.keys() - {"head"}
    for row, bias in enumerate(state["moe"]["moe.expert_bias"] if state else ()):
        np.testing.assert_array_equal(bias, pattern(f"expert_bias {row}", bias.shape))
    found = jax.jit(lambda weights: bind(Transformer(model), weights)(jnp.asarray(tokens), state))(weights)
    np.testing.assert_allclose(found, logits, atol=1e-6)  # FP32 sums in another order


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gqa", {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("v3", {"expert": 4, "tensor": 2}, marks=pytest.mark.long),
        ("v3", {"pipeline": 2, "fsdp": 4}),
    ],
    ids=str,
)
def test_a_run_on_a_mesh_starts_from_a_checkpoint(unpack, name, mesh):
    section, _, _ = stored(name)
    folder = unpack(name)
    run = folder.parent / "run"
    (folder / "iter_0000007").mkdir()
    for file in [*folder.glob("*.distcp"), folder / METADATA]:
        file.rename(folder / "iter_0000007" / file.name)
    (folder / NEWEST).write_text("7\n")
    config = make_config(
        section,
        mesh,
        batch={"global_size": 8, "num_microbatches": 2, "sequence_length": 16},
        run={"dir": str(run), "steps": 1, "eval_steps": 0},
        checkpoint={"init_from": str(folder)},
    )
    model, state = config.model, read(folder, config.model)[1]
    trainer = Trainer(config)
    try:
        for parameter, array in trainer.state.params.items():
            placement = trainer.program.placements[parameter]
            shape = parameters(Transformer(model))[parameter].shape
            if parameter in ("embedding.tokens", "head"):
                continue  # padded here; the test above has them
            expected = stored_form(pattern(parameter, shape), placement, np.dtype(np.float32))
            np.testing.assert_array_equal(array, expected, err_msg=parameter)
        for kind, own in state.items():
            for key, array in own.items():
                np.testing.assert_array_equal(trainer.state.layer_state[kind][key], array)
    finally:
        trainer.close()


def test_a_device_has_its_own_heads_of_matrices_that_are_read_in_pieces(unpack, monkeypatch):
    """The heads of queries, keys and values take turns in a tensor, so each piece is of all heads."""
    monkeypatch.setattr(reader, "PIECE_BYTES", 256)
    model = ModelConfig.model_validate(stored("gqa")[0])
    shapes = {name: parameter.shape for name, parameter in parameters(Transformer(model)).items()}
    heads = NamedSharding(build_mesh({"tensor": 2}, jax.devices()[:2]), PartitionSpec(None, None, "tensor"))
    with open_readers(unpack("gqa"), model, shapes) as readers:
        for name in (f"blocks.dense.attention.{own}" for own in ("query", "key", "value")):
            found = readers[name].on_devices(heads, np.float32)
            np.testing.assert_array_equal(found, pattern(name, shapes[name]), err_msg=name)


def test_threads_read_tensors_of_one_file_at_the_same_time(unpack):
    folder, interval = unpack("gqa"), sys.getswitchinterval()
    model = ModelConfig.model_validate(stored("gqa")[0])
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            with MegatronTensors(folder, model) as tensors, ThreadPoolExecutor(8) as pool:
                blocks = {name: [slice(0, size) for size in tensors.shape(name)] for name in tensors.files}
                found = [*pool.map(tensors.read, blocks, blocks.values())]
    finally:
        sys.setswitchinterval(interval)
    with MegatronTensors(folder, model) as tensors:
        for name, read_by_a_thread in zip(blocks, found, strict=True):
            np.testing.assert_array_equal(read_by_a_thread, tensors.read(name, blocks[name]), err_msg=name)


def test_experts_begin_as_copies_of_a_dense_checkpoints_mlps(unpack):
    section, folder = stored("gqa")[0] | {"num_experts": 3}, unpack("gqa")
    with pytest.raises(InputError, match=r"gqa has no experts, but .*num_experts=3: set checkpoint\.upcycle=true"):
        read(folder, ModelConfig.model_validate(section))
    config = make_config(section, checkpoint={"init_from": str(folder), "upcycle": True})
    everywhere = NamedSharding(build_mesh({}, jax.devices()[:1]), PartitionSpec())
    wanted = {
        name: jax.ShapeDtypeStruct(parameter.shape, jnp.float32, sharding=everywhere)
        for name, parameter in parameters(Transformer(config.model)).items()
    }
    found, _ = initial_weights(config).read(wanted, {}, config.model)
    for name in ("gate", "up", "down"):
        experts = found[f"blocks.moe.moe.{name}"]
        dense = pattern(f"blocks.dense.mlp.{name}", (len(experts), *experts.shape[2:]))
        np.testing.assert_array_equal(experts, np.stack([dense] * 3, axis=1), err_msg=name)


def test_a_checkpoint_of_another_model_is_named(unpack):
    section, _, _ = stored("gqa")
    folder = unpack("gqa")
    with pytest.raises(InputError, match=r"linear_fc2.weight has the shape \[16, 24\], but .* it has \[16, 32\]"):
        read(folder, ModelConfig.model_validate(section | {"ffn_hidden_size": 32}))
    with pytest.raises(InputError, match="has no tensor decoder.layers.2.self_attention.linear_qkv.weight"):
        read(folder, ModelConfig.model_validate(section | {"num_layers": 3}))
    with pytest.raises(
        InputError, match="has blocks.dense.attention.post_norm, which Megatron-Core's GPTModel does not"
    ):
        read(folder, ModelConfig.model_validate(section | {"norm_placement": "both"}))
    with pytest.raises(InputError, match="has the tensor decoder.layers.0.self_attention.linear_qkv.bias, which"):
        read(folder, ModelConfig.model_validate(section | {"attention_bias": False}))


def test_names_of_transformer_engines_modules_are_those_of_the_local_ones():
    """Norms fused with the layer after them, experts of one grouped GEMM, and layers of one tensor."""

    def names(key, *shape):
        return [name for _, name, _ in named_parts([StoredTensor(key, shape, np.dtype("float32"), ())], 4)]

    layers, attention = "decoder.layers.", "self_attention."
    assert names(f"{layers}1.{attention}linear_qkv.layer_norm_weight", 8) == [f"{layers}1.input_layernorm.weight"]
    assert names(f"{layers}mlp.linear_fc1.layer_norm_bias", 2, 8) == [
        f"{layers}0.pre_mlp_layernorm.bias",
        f"{layers}1.pre_mlp_layernorm.bias",
    ]
    for module, norm in (("linear_q_up_proj", "q_layernorm"), ("linear_kv_up_proj", "kv_layernorm")):
        assert names(f"{layers}0.{attention}{module}.layer_norm_weight", 8) == [f"{layers}0.{attention}{norm}.weight"]
    experts = "mlp.experts.experts.linear_fc2.weight"
    assert names(f"{layers}{experts}", 1, 2, 8, 4) == [
        f"{layers}0.mlp.experts.local_experts.{expert}.linear_fc2.weight" for expert in (0, 1)
    ]
    assert names("mtp.layers.0.mtp_model_layer.input_layernorm.weight", 8) == [
        "mtp.layers.4.transformer_layer.input_layernorm.weight"
    ]
    for key in ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "chained_0.optimizer.state.step.a"):
        found = named_parts([StoredTensor(key, (8,), np.dtype("float32"), ())], 4)
        assert [(state, name) for state, name, _ in found] == [tuple(key.rpartition("state.")[2].split(".", 1))]
    assert names("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg", 8) == []


# Damaged and hostile files: a sentence, and nothing runs


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def altered(folder: Path, change) -> None:
    """Change the objects of `.metadata`, with stand-ins that pickle by the names of torch's classes."""
    data = (folder / METADATA).read_bytes()
    (folder / METADATA).write_bytes(change(data))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "__0_0.distcp").unlink(), "does not exist|No such file|cannot be read"),
        (lambda f: os.truncate(f / "__0_0.distcp", 9000), "__0_0.distcp is shorter than .metadata says"),
        (lambda f: (f / "__0_0.distcp").write_bytes(b"\0" * 40000), "is damaged"),
        (lambda f: os.truncate(f / METADATA, 5000), "metadata is damaged"),
        (lambda f: altered(f, lambda d: d.replace(b"__0_0.distcp", b"../../../abc")), "outside its folder: it was not"),
        (lambda f: altered(f, lambda d: d.replace(b"__0_0.distcp", b"/etc/passwd1")), "outside its folder: it was not"),
        (
            lambda f: altered(f, lambda d: d.replace(b"bfloat16", b"float128").replace(b"float32", b"evalxyz")),
            "evalxyz",
        ),
        (lambda f: (f / METADATA).write_bytes(b"\x80\x04]" + b"(" * 10**6), "is damaged"),
        (lambda f: (f / METADATA).write_bytes(b""), "is damaged"),
        (lambda f: (f / METADATA).write_bytes(pickle.dumps([1, 2])), "is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_a_sentence(unpack, damage, sentence):
    section, _, _ = stored("gqa")
    folder = unpack("gqa")
    damage(folder)
    with pytest.raises(InputError, match=sentence) as caught:
        read(folder, ModelConfig.model_validate(section))
    assert len(str(caught.value)) < 500


def test_a_pickle_that_calls_a_function_is_refused_by_name(unpack, tmp_path):
    made = tmp_path / "made"
    folder = unpack("gqa")
    (folder / METADATA).write_bytes(pickle.dumps({"state": Touch(str(made))}))
    with pytest.raises(InputError, match="names posix.mkdir, .*not read"):
        MegatronTensors(folder, ModelConfig.model_validate(stored("gqa")[0]))
    for code in (b"cbuiltins\neval\n(V1\ntR.", b"cos\nsystem\n(Vtrue\ntR.", b"ctorch.serialization\nload\n."):
        with pytest.raises(InputError, match="which a checkpoint of tensors does not need"):
            load_plain(code, "file")
    assert not made.exists()


def test_a_record_of_two_sizes_or_that_is_compressed_is_damage():
    """Its numbers are read where they are in the file, so a compressed or cut record would give others."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", b"\0" * 8)
    content = bytearray(file.getvalue())
    size_of_the_last = content.rindex(b"PK\x01\x02") + 24
    assert content[size_of_the_last : size_of_the_last + 4] == struct.pack("<I", 8)
    tensor: Any = SimpleNamespace(record="0", start=0, shape=(2,), dtype=np.dtype("float32"), is_contiguous=True)
    assert TorchZip(file, 0, len(content), "file").place(tensor).at == content.index(b"\0" * 8, 30)
    method_of_the_last = size_of_the_last - 14
    for at, value in ((size_of_the_last, struct.pack("<I", 16)), (method_of_the_last, struct.pack("<H", 8))):
        changed = content[:at] + value + content[at + len(value) :]
        with pytest.raises(InputError, match="file is damaged .data/0 is compressed.: copy it again"):
            TorchZip(io.BytesIO(bytes(changed)), 0, len(changed), "file").place(tensor)


def archive(**records: bytes) -> tuple[io.BytesIO, int, int]:
    """(a file as torch.save writes it, its start, its size): arguments of `TorchZip`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, data in ({"data.pkl": pickle.dumps({})} | records).items():
            written.writestr(f"archive/{name}", data)
    return file, 0, len(file.getvalue())


@pytest.mark.parametrize(
    ("start", "shape", "is_contiguous", "sentence"),
    [
        (0, (3,), True, "a tensor is larger than its record"),
        (1, (2,), True, "a tensor is larger than its record"),
        (-1, (1,), True, "a tensor is larger than its record"),
        (0, (-1,), True, "a tensor is larger than its record"),
        (0, (2,), False, "numbers are not side by side"),
        (1, (1, 1), True, ""),
        (0, (), True, ""),
    ],
)
def test_a_tensor_is_within_its_record(start, shape, is_contiguous, sentence):
    file, *place = archive(**{"data/0": b"12345678"})
    tensor: Any = SimpleNamespace(
        record="0", start=start, shape=shape, dtype=np.dtype("float32"), is_contiguous=is_contiguous
    )
    torch_file = TorchZip(file, *place, "file")
    if not sentence:
        assert torch_file.place(tensor).at == file.getvalue().index(b"12345678") + 4 * start
        return
    with pytest.raises(InputError, match=sentence):
        torch_file.place(tensor)


def test_numbers_of_another_kind_are_not_guessed():
    with pytest.raises(InputError, match="file has numbers of another byte order"):
        TorchZip(*archive(byteorder=b"big"), "file")
    assert TorchZip(*archive(byteorder=b"little"), "file").value == {}
    storage = b"\x80\x02(X\x07\x00\x00\x00storageX\x03\x00\x00\x00abcX\x01\x00\x00\x000tQ."
    with pytest.raises(InputError, match="a storage of the unknown type abc: save it again"):
        load_plain(storage, "file")


def test_a_folder_of_checkpoints_names_its_newest(tmp_path):
    for text, sentence in (
        ("twelve", "latest_checkpointed_iteration.txt has no step: give the folder of one checkpoint"),
        ("12", "iter_0000012 is no checkpoint of Megatron-Core .*: save it with --ckpt-format torch_dist"),
    ):
        (tmp_path / NEWEST).write_text(text)
        with pytest.raises(InputError, match=sentence):
            saved_arguments(tmp_path)


def test_missing_chunks_and_another_tensor_in_a_file_are_sentences(unpack):
    """`.metadata` is of the same checkpoint, or the files are not."""
    name, folder, section = "decoder.layers.0.mlp.linear_fc2.weight", unpack("gqa"), stored("gqa")[0]
    for changes, sentence in (
        (
            lambda kept: {"chunks": kept.chunks[:1]},
            "chunks of .*linear_fc2.weight are missing: copy all of its .distcp",
        ),
        (lambda _: {"dtype": np.dtype("float64")}, "has another tensor than .metadata says: copy the whole checkpoint"),
    ):
        with MegatronTensors(folder, ModelConfig.model_validate(section)) as tensors:
            part, whole = tensors._parts[name], tuple(slice(0, size) for size in tensors.shape(name))
            assert len(part.stored.chunks) > 1 and tensors.read(name, whole).shape == tensors.shape(name)
            tensors._placed.cache_clear()
            tensors._parts[name] = replace(part, stored=replace(part.stored, **changes(part.stored)))
            with pytest.raises(InputError, match=sentence):
                tensors.read(name, whole)


def list_of_a_tensor(dtype: Any = F32, shape=(2, 4), offsets=(0, 0), sizes=(2, 4), start=0) -> bytes:
    """`.metadata` of a checkpoint with one tensor in one chunk."""

    def described(name: str, state: Any, module: str = "metadata") -> Instance:
        return Instance(Named(f"{DCP}{module}", name), state)

    at, size, whole = (Call(Named("torch", "Size"), (each,)) for each in (offsets, sizes, shape))
    properties = described("TensorProperties", (dtype, None, False, None, False))
    chunks = [described("ChunkStorageMetadata", {"offsets": at, "sizes": size})]
    listed = {"properties": properties, "size": whole, "chunks": chunks}
    index = described("MetadataIndex", {"fqn": "a", "offset": at, "index": None})
    place = {"relative_path": "__0_0.distcp", "offset": start, "length": 8}
    content = {
        "state_dict_metadata": {"a": described("TensorStorageMetadata", listed)},
        "storage_data": Pairs(((index, described("_StorageInfo", place, "filesystem")),)),
    }
    return pickled(described("Metadata", content))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"dtype": Named(f"{DCP}metadata", "float9")},
            "a has the dtype .*, which is not read: save it in BF16",
        ),
        ({"shape": (0, 4)}, r".metadata is damaged \(a has the shape \(0, 4\)\): copy it again"),
        ({"shape": (2**40, 2**9)}, r".metadata is damaged \(a has the shape .*\): copy it again"),
        ({"sizes": (2, 5)}, r".metadata is damaged \(a chunk of a is outside it\): copy it again"),
        ({"offsets": (-1, 0)}, r".metadata is damaged \(a chunk of a is outside it\): copy it again"),
        ({"start": -1}, r".metadata is damaged \(a chunk of a is outside it\): copy it again"),
    ],
    ids=str,
)
def test_a_list_of_tensors_that_cannot_be_is_damaged(tmp_path, changes, sentence):
    model = ModelConfig.model_validate(stored("gqa")[0])
    for own in ({"shape": (2**40, 2**8)}, {}):  # the largest that is read, and the usual
        (tmp_path / METADATA).write_bytes(list_of_a_tensor(**own))
        assert MegatronTensors(tmp_path, model).shape("a") == own.get("shape", (2, 4))
    (tmp_path / METADATA).write_bytes(list_of_a_tensor(**changes))
    with pytest.raises(InputError, match=sentence):
        MegatronTensors(tmp_path, model)


@pytest.mark.parametrize("state", [{}, {"args": argparse.Namespace()}])
def test_a_checkpoint_without_arguments_is_a_sentence(unpack, state):
    folder = unpack("gqa")
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps(state, protocol=2))
        archive.writestr("common/byteorder", "little")
    with pytest.raises(InputError, match=r"has no arguments \(args\): give the launch script of its run"):
        saved_arguments(folder)


def test_a_tensors_own_pickle_is_not_trusted_either(unpack, tmp_path):
    """The archive of a chunk has a pickle too."""
    folder, made = unpack("gqa"), tmp_path / "made"
    with MegatronTensors(folder, ModelConfig.model_validate(stored("gqa")[0])) as tensors:
        part = tensors._parts["decoder.final_layernorm.weight"]
        [chunk] = part.stored.chunks
        data = bytearray((folder / chunk.file).read_bytes())
        evil = io.BytesIO()
        with zipfile.ZipFile(evil, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Touch(str(made))))
        padded = evil.getvalue()
        assert len(padded) <= chunk.length
        start = chunk.start + chunk.length - len(padded)
        data[chunk.start : chunk.start + chunk.length] = b"\0" * (start - chunk.start) + padded
        shutil.rmtree(folder / "x", ignore_errors=True)
        (folder / chunk.file).write_bytes(data)
        with pytest.raises(InputError, match="posix.mkdir"):
            tensors.read("decoder.final_layernorm.weight", (slice(0, 16),))
    assert not made.exists()


class Backend(enum.Enum):  # an object that is no plain value, as Megatron's arguments have some
    AUTO = 5


def test_the_arguments_of_a_checkpoint_become_a_config(unpack, tmp_path, capsys):
    folder, made = unpack("gqa"), tmp_path / "made"
    arguments = argparse.Namespace(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        ffn_hidden_size=24,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=True,
        qk_layernorm=True,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=50,
        seq_length=32,
        max_position_embeddings=32,
        micro_batch_size=1,
        global_batch_size=8,
        train_iters=100,
        lr=1e-3,
        tensor_model_parallel_size=2,
        world_size=4,
        mock_data=True,
        make_vocab_size_divisible_by=16,
        attention_backend=Backend.AUTO,
        finetune=True,  # of the start of that run, as the next three
        no_load_optim=True,
        pretrained_checkpoint="earlier",
        ckpt_step=3,
        iterations_to_skip=[],  # the default of Megatron's parser is an empty list
        anything=Touch(str(made)),
    )
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"args": arguments, "iteration": 7}, protocol=2))
        archive.writestr("common/byteorder", "little")
    assert main([str(folder), "--write", str(tmp_path / "run.yaml")]) == 0
    assert not made.exists() and "wrote" in capsys.readouterr().out
    config = load_config(tmp_path / "run.yaml")
    section = stored("gqa")[0] | {"vocab_size": 64}  # Megatron's softmax has the padding
    assert (config.mesh.tensor, config.batch.num_microbatches) == (2, 4)
    assert {name: getattr(config.model, name) for name in section} == section
    assert (config.checkpoint.init_from, config.checkpoint.init_state) == (str(folder), "all")
    more = ["--world", "8", "--data-path", "a", "--split", "9,1,0", "--train-iters", "200"]  # what it does not have
    run = tmp_path / "of_megatron"
    shutil.move(folder, run / "iter_0000007")
    (run / NEWEST).write_text("7")
    assert main([str(run), *more, "--write", str(tmp_path / "more.yaml")]) == 0
    config = load_config(tmp_path / "more.yaml")
    assert (config.mesh.tensor, config.mesh.data, config.run.steps) == (2, 4, 200)
    assert config.checkpoint.init_from == str(run)  # its newest checkpoint
