"""Checkpoints in Megatron-LM's older format: those that megatron-core 0.19.2 wrote, and files made up for each rule.

dev/megatron_checkpoints.py compares further models with megatron-core itself.
"""

import os
import pickle
import pickletools
import shutil
import zipfile
from pathlib import Path, PurePosixPath

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from megatron_files import pattern, stored, unpacked_legacy
from single_device import make_config

from megajax.config import ModelConfig
from megajax.errors import InputError
from megajax.megatron import NEWEST, is_megatron_folder, pickled
from megajax.megatron.convert import load
from megajax.megatron.distributed import saved_arguments
from megajax.megatron.gpt import tensor_shapes
from megajax.megatron.legacy import LegacyTensors
from megajax.megatron.torch_files import Call, Instance, Named, save, tensor
from megajax.megatron.torch_files import pickled as as_pickle
from megajax.model import Transformer, parameters
from megajax.model.block import layer_state
from megajax.tools.from_megatron import __main__ as from_megatron
from megajax.training.loop import Trainer

SMALL = {"hidden_size": 8, "num_heads": 2, "num_layers": 2, "ffn_hidden_size": 12, "vocab_size": 32}
MOE = SMALL | {"num_layers": 1, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 4}
STATE = "self_attention.linear_qkv._extra_state"


def read(folder: Path, model: ModelConfig, sharding=None):
    sharding = sharding or (lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    def abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding(leaf.shape))

    wanted = {name: abstract(parameter) for name, parameter in parameters(Transformer(model)).items()}
    kept = {kind: {name: abstract(a) for name, a in own.items()} for kind, own in layer_state(model).items()}
    return load(folder, wanted, kept, model)


@pytest.mark.parametrize("name", ["gqa", "v3"])
@pytest.mark.parametrize("axes", [{"a": 1}, {"a": 2, "b": 2}], ids=str)
def test_weights_are_those_that_megatron_saved_on_any_mesh(tmp_path, name, axes):
    section = stored(name)[0]
    model = ModelConfig.model_validate(section | {"vocab_multiple": 1})
    devices = np.array(jax.devices()[: np.prod([*axes.values()])])
    mesh = Mesh(devices.reshape(*axes.values()), [*axes])

    def sharding(shape):
        free, spec = dict(axes), []
        for size in shape:
            spec.append(next((axis for axis, parts in free.items() if size % parts == 0), None))
            free.pop(spec[-1], None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    folder = unpacked_legacy(name, tmp_path)
    assert is_megatron_folder(folder)
    weights, state = read(folder, model, sharding)
    for parameter, array in weights.items():
        np.testing.assert_array_equal(array, pattern(parameter, array.shape), err_msg=parameter)
    for row, bias in enumerate(state["moe"]["moe.expert_bias"] if state else ()):
        np.testing.assert_array_equal(bias, pattern(f"expert_bias {row}", bias.shape))


def test_a_run_starts_from_the_newest_of_a_folder(tmp_path):
    section = stored("gqa")[0]
    (tmp_path / "saved").mkdir()
    unpacked_legacy("gqa", tmp_path).rename(tmp_path / "saved/iter_0000007")
    (tmp_path / "saved" / NEWEST).write_text("7\n")
    run = {"dir": str(tmp_path / "run"), "steps": 1, "eval_steps": 0}
    sizes = {"global_size": 8, "num_microbatches": 1, "sequence_length": 16}
    start = {"init_from": str(tmp_path / "saved")}
    trainer = Trainer(make_config(section, {"data": 2, "fsdp": 4}, batch=sizes, run=run, checkpoint=start))
    try:
        array = trainer.state.params["final_norm"]
        np.testing.assert_array_equal(array, pattern("final_norm", array.shape))
    finally:
        trainer.close()


def test_its_arguments_are_those_of_the_first_file(tmp_path):
    arguments = saved_arguments(unpacked_legacy("gqa", tmp_path))
    expected = {"num_layers": 2, "hidden_size": 16, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert {name: arguments[name] for name in expected} == expected


# Files made up for one rule each


def write(folder: Path, rank: str, models: dict, more=None, **arguments) -> Path:
    """A file of a rank, whose `models` are by key: each an array by name, or an object."""
    path = folder / f"mp_rank_{rank}/model_optim_rng.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    value: dict = {"args": Instance(Named("argparse", "Namespace"), {"num_layers": 2, **arguments})}
    for key, model in models.items():
        value[key] = {}
        for name, own in model.items():
            if isinstance(own, np.ndarray):
                arrays[str(len(arrays))] = own
                own = tensor(str(len(arrays) - 1), own)
            value[key][name] = own
    with path.open("wb") as file:
        save(file, value | (more or {}), arrays)
    return path


def whole(model: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors of a model by the names of Megatron's local modules, each with its own numbers."""
    return {name: pattern(name, shape) for name, shape in tensor_shapes(model).items()}


def same(folder: Path, model: ModelConfig, expected: dict[str, np.ndarray]) -> None:
    with LegacyTensors(folder, model) as tensors:
        assert tensors.files.keys() == expected.keys()
        for name, array in expected.items():
            for start, step in ((0, 1), (0, 3), (1, 2), (2, 5)):  # also across the ranks' parts
                wanted = tuple(slice(min(start, size - 1), size, step) for size in array.shape)
                np.testing.assert_array_equal(tensors.read(name, wanted), array[wanted], err_msg=name)


def test_virtual_stages_are_in_the_order_of_the_layers(tmp_path):
    """Two stages of two virtual ones: layers 0, 2 and 4 are in the first, 1 and 3 in the second."""
    model = ModelConfig.model_validate(SMALL | {"num_layers": 5})
    expected, files = whole(model), [[{}, {}], [{}, {}]]
    for name, array in expected.items():
        if not name.startswith("decoder.layers."):
            at = (0, 0) if name.startswith("embedding.") else (1, 1)
            files[at[0]][at[1]][name] = array
            continue
        layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
        pipeline, virtual, local = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 0)][int(layer)]
        files[pipeline][virtual][f"decoder.layers.{local}.{rest}"] = array
    for pipeline, stages in enumerate(files):
        models = {f"model{virtual}": own | {STATE: None} for virtual, own in enumerate(stages)}
        write(tmp_path, f"00_{pipeline:03d}", models, pipeline_model_parallel_size=2)
    same(tmp_path, model, expected)


def test_each_tensor_parallel_rank_has_its_gate_before_its_up_projection(tmp_path):
    """In the matrix and in its bias."""
    model = ModelConfig.model_validate(SMALL | {"num_layers": 1, "mlp_bias": True})
    expected, own = whole(model), {}
    for rank in (0, 1):
        for name, array in expected.items():
            if "linear_fc1." in name:
                own[name] = np.concatenate([np.split(half, 2)[rank] for half in np.split(array, 2)])
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                own[name] = np.split(array, 2, axis=1)[rank]
            elif "linear_qkv." in name or name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                own[name] = np.split(array, 2)[rank]
            else:
                own[name] = array
        write(tmp_path, f"0{rank}", {"model": own}, num_layers=1, tensor_model_parallel_size=2)
    same(tmp_path, model, expected)
    name, first = "embedding.word_embeddings.weight", (slice(0, 16), slice(0, 8))
    with LegacyTensors(tmp_path, model) as tensors:
        shutil.rmtree(tmp_path / "mp_rank_01")  # which has the other rows
        np.testing.assert_array_equal(tensors.read(name, first), expected[name][first])


def test_transformer_engines_names_and_divided_experts_of_any_width(tmp_path):
    """Norms fused with the layer after them, numbered experts, and whole experts beside TP 2: two files of four."""
    model = ModelConfig.model_validate(MOE)
    expected = whole(model)
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for rank in (0, 1):
        own = {}
        for name, array in expected.items():
            parts = [slice(None)]
            if ".local_experts." in name:
                before, _, after = name.partition(".local_experts.")
                expert, _, rest = after.partition(".")
                if int(expert) // 2 == rank:
                    own[f"{before}.{rest}{int(expert) % 2}"] = array
                continue
            if name.endswith("linear_proj.weight"):
                parts = [slice(None), slice(rank * 4, rank * 4 + 4)]
            elif "linear_qkv" in name or name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                parts = [slice(rank * len(array) // 2, (rank + 1) * len(array) // 2)]
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            own[name] = array[tuple(parts)]
        write(tmp_path, f"0{rank}_00{rank}", {"model": own}, num_layers=1, num_experts=4, **sizes)
    same(tmp_path, model, expected)


def test_a_tied_head_and_copies_in_later_stages_are_left_out(tmp_path):
    model = ModelConfig.model_validate(SMALL | {"tie_embeddings": True, "num_layers": 1})
    expected = whole(model)
    first = {name: array for name, array in expected.items() if not name.startswith("decoder.final")}
    last = {"output_layer.weight": np.ones((32, 8), np.float32), "embedding.word_embeddings.weight": np.zeros((32, 8))}
    last |= {"decoder.final_layernorm.weight": expected["decoder.final_layernorm.weight"]}
    for rank, own in enumerate((first, last)):
        write(tmp_path, f"00_00{rank}", {"model": own}, num_layers=1, pipeline_model_parallel_size=2)
    same(tmp_path, model, expected)


def small(folder: Path, rank: str = "00", more=None, **arguments) -> None:
    write(folder, rank, {"model": whole(ModelConfig.model_validate(SMALL))}, more, **arguments)


def a_list(folder: Path) -> None:
    (folder / "mp_rank_00").mkdir()
    with (folder / "mp_rank_00/model_optim_rng.pt").open("wb") as file:
        save(file, [1])


CALL = Call(Named("posix", "mkdir"), ("made",))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda f: small(f, more={"rng": CALL}), r"names posix.mkdir, .*not read"),
        (lambda f: small(f, more={"rng": Call(Named("builtins", "eval"), ("1",))}), r"names builtins.eval, .*not read"),
        (lambda f: write(f, "00", {"model": {"a": CALL}}), "names posix.mkdir"),
        (lambda f: small(f, num_layers=CALL), "names posix.mkdir"),
        (lambda f: (small(f), os.truncate(f / "mp_rank_00/model_optim_rng.pt", 5000)), "is damaged"),
        (lambda f: (f / "mp_rank_00").mkdir() or (f / "mp_rank_00/model_optim_rng.pt").write_bytes(b""), "is damaged"),
        (lambda f: write(f, "00", {}), "has no model"),
        (lambda f: write(f, "00", {}, {"model": None}), "has no model"),
        (lambda f: write(f, "00", {"model": {"language_model": {}}}), "before Megatron-Core: convert"),
        (lambda f: write(f, "00", {"model": {}}, {"args": None}), r"has no arguments \(args\)"),
        (lambda f: a_list(f), r"has no arguments \(args\)"),
        (lambda f: small(f, tensor_model_parallel_size=2), "no file of the tensor-parallel rank 1, of 2"),
        (lambda f: small(f, tensor_model_parallel_size=10**15), "no file of the tensor-parallel rank 1, of 1000000"),
        (lambda f: small(f, "00_001", pipeline_model_parallel_size=2), "no file of the pipeline-parallel rank 0, of 2"),
        *(
            (lambda f, rank=rank: small(f, rank), f"mp_rank_{rank} is no folder of a rank with tensor_model_parallel")
            for rank in ("01", "00_000")
        ),
        (
            lambda f: write(f, "00", {"model": {"decoder.layers.0.mlp.experts.weight1": np.zeros((8, 8), np.float32)}}),
            "all experts in one tensor, decoder.layers.0.mlp.experts.weight1",
        ),
    ],
)
def test_a_damaged_or_hostile_file_is_a_sentence_and_nothing_runs(tmp_path, monkeypatch, make, sentence):
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    with pytest.raises(InputError, match=sentence) as caught:
        read(tmp_path, ModelConfig.model_validate(SMALL))
    assert len(str(caught.value)) < 500 and not (tmp_path / "made").exists()


SIZES = [f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert")]
SHAPES = ["num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "num_experts"]


@pytest.mark.parametrize("name", SIZES + SHAPES)
def test_files_of_two_checkpoints_are_not_read_as_one(tmp_path, name):
    """All arguments that a tensor's shape or a file's place follows from."""
    stage = "_000" if name in SIZES[1:] else ""
    for rank, value in (("00", 2), ("01", 4)):
        small(tmp_path, rank + stage, **{"tensor_model_parallel_size": 2, name: value})
    with pytest.raises(InputError, match=f"mp_rank_01.* is of {name}=4, but .*mp_rank_00.* of {name}=2"):
        read(tmp_path, ModelConfig.model_validate(SMALL))


def test_objects_of_megatron_are_held_and_not_called(tmp_path):
    """An enumeration in the arguments, and NumPy's random state, which a function makes."""
    backend = Call(Named("megatron.core.transformer.enums", "AttnBackend"), (5,))
    state = Call(Named("numpy.core.multiarray", "_reconstruct"), (Named("numpy", "ndarray"), (0,)))
    theirs = pickletools.genops(pickle.dumps(np.random.get_state(), protocol=2))
    named = {Named(*text.split()) for operation, text, _ in theirs if operation.name == "GLOBAL"}
    assert Named("_codecs", "encode") in named
    named |= {Named("torch", "float8_e4m3fn"), Named("signal", "Signals")}  # in saved arguments
    named |= {Named("transformer_engine.common.recipe", "DelayedScaling")}
    small(tmp_path, more={"rng_state": [state, *(Call(name, ()) for name in named)]}, attention_backend=backend)
    same(tmp_path, ModelConfig.model_validate(SMALL), whole(ModelConfig.model_validate(SMALL)))


def test_how_a_saved_run_began_is_not_how_one_goes_on_with_its_checkpoint(tmp_path):
    began = {"finetune": True, "no_load_optim": True, "pretrained_checkpoint": "x", "ckpt_step": 5}
    small(tmp_path, load="y", seed=7, **began)
    given, _ = from_megatron.read([str(tmp_path)])
    assert (given["load"], given["seed"]) == (str(tmp_path), 7) and not began.keys() & given.given.keys()


def test_a_missing_file_of_one_rank_names_the_tensor(tmp_path):
    (tmp_path / "empty/mp_rank_00").mkdir(parents=True)
    with pytest.raises(InputError, match=r"empty has no model_optim_rng.pt in its folders mp_rank_\*: copy the whole"):
        LegacyTensors(tmp_path / "empty", ModelConfig.model_validate(SMALL))
    folder = unpacked_legacy("gqa", tmp_path)
    model = ModelConfig.model_validate(stored("gqa")[0])
    shutil.rmtree(folder / "mp_rank_01_001")
    with pytest.raises(InputError, match="no part of decoder.layers.1.* of the tensor-parallel rank 1"):
        read(folder, model)


@pytest.mark.parametrize(
    "other", [np.ones((8, 6), np.float16), np.ones((8, 12), np.float32)], ids=lambda array: str(array.dtype)
)
def test_a_part_that_is_unlike_the_first_ranks_is_named(tmp_path, other):
    own, name = np.ones((8, 6), np.float32), "decoder.layers.0.mlp.linear_fc2.weight"
    for rank, part in (("00", own), ("01", other)):
        write(tmp_path, rank, {"model": {name: part}}, tensor_model_parallel_size=2)
    with pytest.raises(InputError, match=f"mp_rank_01/.* has another shape or dtype of {name} than mp_rank_00/.*"):
        LegacyTensors(tmp_path, ModelConfig.model_validate(SMALL))
    write(tmp_path, "01", {"model": {name: own}}, tensor_model_parallel_size=2)
    assert LegacyTensors(tmp_path, ModelConfig.model_validate(SMALL)).shape(name) == (8, 12)


def test_another_model_is_named(tmp_path):
    folder, section = unpacked_legacy("gqa", tmp_path), stored("gqa")[0]
    with pytest.raises(InputError, match=r"linear_fc2.weight has the shape \[16, 12\], but .* it has \[16, 32\]"):
        read(folder, ModelConfig.model_validate(section | {"ffn_hidden_size": 32}))
    with pytest.raises(InputError, match="has no tensor decoder.layers.2.self_attention"):
        read(folder, ModelConfig.model_validate(section | {"num_layers": 3}))


def test_an_archive_with_another_pickle_is_not_trusted(tmp_path):
    path = write(tmp_path, "00", {"model": {}})
    path.write_bytes(pickle.dumps({"model": {}}))
    with pytest.raises(InputError, match="is damaged"):
        read(tmp_path, ModelConfig.model_validate(SMALL))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [((2, 3), (3, 1), True), ((2, 3), (1, 2), False), ((1, 3), (7, 1), True), ((2, 1, 3), (3, 9, 1), True)],
)
def test_the_stride_of_a_dimension_of_one_does_not_matter(shape, strides, expected):
    """As in torch: a tensor that was cut keeps the strides of the whole one."""
    info = pickled.TensorInfo("0", np.dtype("float32"), 0, shape, strides)
    assert info.is_contiguous == expected


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("name", ["PosixPath", "PurePosixPath"])
def test_a_path_is_read_as_each_python_saves_it(module, name):
    """torch's list of tensors has that of its folder. Python 3.13 has the classes in a module of their own."""
    written = as_pickle({"checkpoint_id": Call(Named(module, name), ("/", "a", "b"))})
    assert pickled.load_plain(written, ".metadata") == {"checkpoint_id": PurePosixPath("/a/b")}


# The typed storages of torch 2, with NumPy's name of their numbers, and its dtypes of before and of now
STORAGES = {"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "LongStorage": "int64"}
STORAGES |= {"BFloat16Storage": "bfloat16", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"}
STORAGES |= {"ByteStorage": "uint8", "BoolStorage": "bool"}


class OfTorch(pickle.Unpickler):
    """Python's own unpickler, with a list in place of a tensor."""

    def persistent_load(self, pid):
        return pid

    def find_class(self, module, name):
        return (lambda *arguments: [*arguments]) if (module, name) != ("collections", "OrderedDict") else dict


@pytest.mark.parametrize("dtype", STORAGES.values())
def test_a_storage_has_as_many_numbers_as_its_record(tmp_path, dtype):
    """torch.load refuses another number."""
    array = np.zeros((2, 3), jnp.dtype(dtype))
    with (tmp_path / "a.pt").open("wb") as file:
        save(file, {"w": tensor("0", array)}, {"0": array})
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        (_, _, record, _, count), start, shape, strides, *_ = OfTorch(archive.open("archive/data.pkl")).load()["w"]
        assert (count, archive.getinfo(f"archive/data/{record}").file_size) == (6, 6 * array.itemsize)
    assert (start, shape, strides) == (0, (2, 3), (3, 1))


def test_every_kind_of_numbers_of_a_torch_file_has_its_numpy_dtype():
    assert {name: dtype.name for name, dtype in pickled.STORAGES.items()} == STORAGES
    assert {name: dtype.name for name, dtype in pickled.DTYPES.items()} == {name: name for name in STORAGES.values()}
    assert {name: pickled.ALLOWED["torch", name] for name in STORAGES} == {name: name for name in STORAGES}
    assert all(pickled.ALLOWED["torch", name].name == name for name in STORAGES.values())
