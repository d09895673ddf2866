"""Runs become checkpoints of Megatron-Core: read back bit for bit, with the list of tensors that Megatron writes.

dev/megatron_checkpoints.py has megatron-core read them.
"""

import json
import math
import pickle
import pickletools
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from megatron_files import FILES, pattern, stored, unpacked
from single_device import make_config

from megajax import commands
from megajax.checkpoint.description import describe_model
from megajax.checkpoint.manager import save_weights
from megajax.config import load_config
from megajax.errors import InputError
from megajax.megatron import METADATA, NEWEST
from megajax.megatron.convert import load, open_tensors
from megajax.megatron.distributed import common_state, newest, saved_arguments
from megajax.megatron.pickled import Plain, load_plain
from megajax.megatron.torch_files import Call, Instance, Named, Pairs, pickled
from megajax.megatron.writer import CheckpointWriter
from megajax.model import Transformer, parameters
from megajax.model.block import layer_state
from megajax.tools.export_megatron.__main__ import export_step
from megajax.tools.export_megatron.arguments import arguments_for
from megajax.tools.from_megatron.arguments import from_mapping
from megajax.tools.from_megatron.experts import translate_experts
from megajax.tools.from_megatron.model import translate_model
from megajax.tools.from_megatron.training import translate_precision
from megajax.tools.from_megatron.translation import Translation

STEP = 5
PARSER = json.loads((Path(__file__).parent.parent / "data_files/megatron_lines.json").read_text())
SMALL = {"hidden_size": 16, "num_heads": 4, "num_layers": 2, "ffn_hidden_size": 24, "vocab_size": 50}
GPT = SMALL | {"norm": "layernorm", "activation": "gelu", "position": "learned", "tie_embeddings": True}
MODELS = {
    "gqa": stored("gqa")[0],
    "v3": stored("v3")[0],
    "gpt": GPT | {"attention_bias": True, "mlp_bias": True, "max_positions": 32, "qk_norm": "layernorm"},
    "mixtral": SMALL
    | {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 8, "shared_expert_ffn_hidden_size": 8}
    | {"shared_expert_gate": True, "attention_sinks": True},
}
MESHES = [{"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}]
ALIASES = ("layer_norm_weight", "layer_norm_bias", "layernorm.weight", "layernorm.bias")


@pytest.fixture
def make_run(tmp_path):
    def make_run(name: str, **more):
        """A run whose weights are `pattern` of their names, before its first step."""
        model = MODELS[name] | {"vocab_multiple": 32} | more
        sizes = {"global_size": 8, "num_microbatches": 2, "sequence_length": 32}
        config = make_config(model, {"data": 1}, batch=sizes, run={"dir": str(tmp_path / "run"), "steps": 9})
        declared = parameters(Transformer(config.model))
        weights = jax.device_put({parameter: pattern(parameter, p.shape) for parameter, p in declared.items()})
        state = {
            kind: jax.device_put({key: pattern(f"{kind} {key}", a.shape) for key, a in own.items()})
            for kind, own in layer_state(config.model).items()
        }
        (tmp_path / "run").mkdir()
        about = {"format": 1, "step": STEP, "model": describe_model(config.model), "samples_consumed": 36}
        save_weights(tmp_path / "run", weights, state, about)
        (tmp_path / "run/config.yaml").write_text(config.to_yaml())
        return config, weights, state

    return make_run


def export(tmp_path, *options) -> int:
    return commands.main(["export-megatron", str(tmp_path / "run"), str(tmp_path / "out"), *options])


@pytest.mark.parametrize(("name", "axes"), [*zip(MODELS, [*MESHES, MESHES[1]], strict=True)], ids=str)
def test_a_run_comes_back_bit_for_bit_on_any_mesh(make_run, tmp_path, name, axes):
    config, weights, state = make_run(name)
    assert export(tmp_path, "--tp", "2") == 0
    mesh = Mesh(np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values()), tuple(axes))

    def wanted(array):
        free, spec = dict(axes), []
        for size in array.shape:
            axis = next((axis for axis, parts in free.items() if size % parts == 0), None)
            spec.append(axis)
            free.pop(axis, None)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    if not config.model.is_latent:  # for each KV head its queries, its key and its value
        names = ("query", "key", "value")
        kind = next(parameter.split(".")[1] for parameter in weights if parameter.endswith("attention.query"))
        own = [np.asarray(weights[f"blocks.{kind}.attention.{name}"]) for name in names]  # [layer, in, heads, width]
        layers, width, kv_heads, head = own[1].shape
        together = np.concatenate([x.reshape(layers, width, kv_heads, -1, head) for x in own], axis=3)
        with open_tensors(tmp_path / "out", config.model) as stored_tensors:
            for layer, expected in enumerate(together.reshape(layers, width, -1).swapaxes(1, 2)):
                name = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
                slices = [slice(0, size) for size in expected.shape]
                np.testing.assert_array_equal(stored_tensors.read(name, slices), expected, err_msg=name)

    found, kept = load(tmp_path / "out", *jax.tree.map(wanted, (weights, state)), config.model)
    for parameter, array in weights.items():
        expected = np.array(array)  # the padding is not in the checkpoint
        expected[(slice(None),) * (expected.ndim - 1) + (slice(50, None),)] *= parameter != "head" or name == "v3"
        expected[50:] *= parameter != "embedding.tokens" or name == "v3"
        np.testing.assert_array_equal(found[parameter], expected, err_msg=parameter)
    jax.tree.map(np.testing.assert_array_equal, kept, state)


def tensors(folder):
    """(the tensors' shapes, dtypes and chunks, the objects) of a checkpoint."""
    metadata = load_plain((folder / METADATA).read_bytes(), "file")
    found = {key: own for key, own in metadata.state_dict_metadata.items() if hasattr(own, "chunks")}
    for key, own in found.items():
        cells = sum(np.prod(chunk.sizes, dtype=int) for chunk in own.chunks)
        assert cells == np.prod(own.size, dtype=int), key
    placed = {(at.fqn, getattr(at, "offset", None)) for at in metadata.storage_data}
    chunks = {(key, chunk.offsets) for key, own in found.items() for chunk in own.chunks}
    assert placed == chunks | {(key, None) for key in metadata.state_dict_metadata.keys() - found.keys()}
    described = {key: (own.size, own.properties.state) for key, own in found.items()}
    return described, metadata.state_dict_metadata.keys() - found.keys()


def attributes(value, found: dict[str, set[str]]) -> dict[str, set[str]]:
    """The attributes of the objects within a description, by class."""
    if isinstance(value, Plain):
        found.setdefault(type(value).__name__, set()).update(vars(value).keys() - {"state", "made_of"})
    parts = vars(value) if isinstance(value, Plain) else value
    for part in [*parts, *parts.values()] if isinstance(parts, dict) else parts if type(parts) in (list, tuple) else ():
        attributes(part, found)
    return found


def names(pickle_bytes: bytes) -> set[tuple[str, str]]:
    """The classes and functions that a pickle names."""
    found, texts = set(), []
    for code, argument, _ in pickletools.genops(pickle_bytes):
        if code.name == "GLOBAL":
            found.add(tuple(argument.split(" ")))
        elif "UNICODE" in code.name:
            texts.append(argument)
        elif code.name == "STACK_GLOBAL":  # of Megatron's, whose module may be remembered
            found.add((None, texts[-1]))
    return found


@pytest.mark.parametrize("name", ["gqa", "v3"])
def test_the_list_of_tensors_is_that_of_megatrons_own_checkpoint(make_run, tmp_path, name):
    make_run(name)
    assert export(tmp_path, "--tp", "2") == 0
    theirs, out = unpacked(name, tmp_path), tmp_path / f"out/iter_{STEP:07d}"
    (expected, their_objects), (found, objects) = tensors(theirs), tensors(out)
    assert {key: found.get(key) for key in expected} == expected
    assert all(key.endswith(ALIASES) for key in found.keys() - expected.keys())  # of norms, as Transformer Engine's
    assert {key for key in their_objects if not key.startswith("common_state/")} <= objects
    assert all("_extra_state/shard_" in key for key in objects)
    mine, own = (attributes(load_plain((each / METADATA).read_bytes(), "file"), {}) for each in (out, theirs))
    newer = {"Metadata": {"all_local_plans", "version"}}
    assert mine == {kind: own[kind] - newer.get(kind, set()) for kind in mine} and len(mine) > 5
    ours = names((out / METADATA).read_bytes())
    assert {name for _, name in ours} <= {name for _, name in names((theirs / METADATA).read_bytes())}
    assert (out / "metadata.json").read_text() == (theirs / "metadata.json").read_text()
    assert (tmp_path / "out" / NEWEST).read_text() == str(STEP)
    found, expected = (
        {member.partition("/")[2] for member in zipfile.ZipFile(next(folder.glob("__0_0.distcp"))).namelist()}
        for folder in (out, theirs)
    )
    assert found <= expected  # of one tensor's archive
    assert not any(member[0] not in "./" for member in expected - found)  # the others are hidden ones


def test_the_arguments_are_the_models_and_have_the_position_of_the_run(make_run, tmp_path):
    config, _, _ = make_run("gqa")
    assert export(tmp_path, "--tp", "2", "--pp", "2") == 0
    arguments = saved_arguments(tmp_path / "out")
    expected = {"iteration": STEP, "consumed_train_samples": 36, "tensor_model_parallel_size": 2, "num_query_groups": 2}
    expected |= {"padded_vocab_size": 64, "make_vocab_size_divisible_by": 16, "no_save_optim": True, "world_size": 4}
    expected |= {"vocab_size": 50}
    assert {key: arguments[key] for key in expected} == expected
    assert commands.main(["from-megatron", str(tmp_path / "out"), "--write", str(tmp_path / "back.yaml")]) == 0
    with zipfile.ZipFile(FILES / "megatron_training.zip") as archive:
        archive.extractall(tmp_path / "theirs", [name for name in archive.namelist() if name.startswith("gpt/")])
    theirs = common_state(newest(tmp_path / "theirs/gpt"))["content_metadata"]
    assert common_state(tmp_path / f"out/iter_{STEP:07d}")["content_metadata"] == theirs
    back = load_config(tmp_path / "back.yaml").model
    assert back == config.model.model_copy(update={"vocab_size": 64, "init_std": back.init_std})


TRAINING = {  # what the network does not depend on, each with a number of its own
    "dropout": 0.11,
    "init_std": 0.021,
    "mtp_loss_weight": 0.31,
    "qk_clip": 41.0,
    "router.global_loss": 0.051,
    "router.sequence_loss": 0.061,
    "router.z_loss": 0.0071,
    "router.jitter": 0.081,
    "router.bias_update_rate": 0.0091,
    "router.capacity_factor": 1.25,
    "router.drop_policy": "position",
}


@pytest.mark.parametrize("key", TRAINING)
def test_settings_of_training_come_back_from_the_arguments(key):
    model = MODELS["mixtral"] | {"mtp_layers": 1, "router": {"expert_bias": True}}
    for name, value in TRAINING.items():
        section = model["router"] if name.startswith("router.") else model
        section[name.removeprefix("router.")] = value
    config = make_config(model, batch={"global_size": 8, "sequence_length": 32})
    back = Translation(from_mapping(arguments_for(config, STEP, 40, (1, 1, 1)), "the arguments"), 1)
    translate_model(back)
    translate_experts(back, 1)
    assert back.settings[f"model.{key}"].value == TRAINING[key]


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("gpt", {"max_positions": 64}, {"seq_length": 32, "max_position_embeddings": 64}),
        ("gqa", {}, {"seq_length": 32, "max_position_embeddings": 32}),
        ("mixtral", {"router": {"capacity_factor": 1.25}}, {"moe_token_drop_policy": "probs"}),
        ("mixtral", {}, {"moe_z_loss_coeff": None, "moe_input_jitter_eps": None}),  # 0.0 would compute a loss
    ],
)
def test_an_argument_is_that_of_megatrons_rules(name, more, expected):
    config = make_config(MODELS[name] | more, batch={"global_size": 8, "sequence_length": 32})
    arguments = arguments_for(config, STEP, 40, (1, 1, 1))
    assert {key: arguments[key] for key in expected} == expected


@pytest.mark.parametrize("name", MODELS)
def test_every_argument_has_a_type_of_megatrons_parser(name):
    """The type of its default, or of what it made of some launch line."""
    found = arguments_for(
        make_config(MODELS[name], batch={"global_size": 8, "sequence_length": 32}), STEP, 40, (1, 1, 1)
    )
    values: dict[str, list] = {}
    for dest, kind, default in PARSER["flags"].values():
        values.setdefault(dest, []).extend([default, True, False] if kind in ("flag", "off") else [default])
    for line in PARSER["lines"].values():
        for dest, value in line["parsed"].items():
            values.setdefault(dest, []).append(value)
    types = {dest: {type(value) for value in own} for dest, own in values.items()}
    types = {dest: own | {float} if int in own else own for dest, own in types.items()}
    types["params_dtype"] = {np.dtype}  # torch's, of which JSON has the name
    wrong = {dest: value for dest, value in found.items() if not isinstance(value, tuple(types.get(dest, {object})))}
    assert not wrong and len(found.keys() & types.keys()) > 800


@pytest.mark.parametrize(
    ("multiple", "tensor", "size"), [(32, 2, 160), (32, 4, 160), (1, 1, 150), (1, 2, 256), (2, 4, 512)]
)
def test_the_vocabulary_is_padded_as_megatron_pads_it(multiple, tensor, size):
    """150 tokens, up to a multiple of --make-vocab-size-divisible-by times --tp: if it can be, as here."""
    model = MODELS["gqa"] | {"vocab_size": 150, "vocab_multiple": multiple}
    config = make_config(model, batch={"global_size": 8, "sequence_length": 32})
    found = arguments_for(config, STEP, 40, (tensor, 1, 1))
    each = found["make_vocab_size_divisible_by"] * tensor
    assert found["padded_vocab_size"] == size and size % each == 0 and size - 150 < each


def test_windows_are_without_the_own_token_and_come_back():
    model = MODELS["gqa"] | {"sliding_window": 8, "layer_pattern": ("local", "global")}
    arguments = arguments_for(make_config(model, batch={"global_size": 8, "sequence_length": 32}), STEP, 40, (1, 1, 1))
    assert (arguments["window_size"], arguments["window_attn_skip_freq"]) == ((7, 0), [1, 0])
    back = Translation(from_mapping(arguments, "the arguments"), 1)
    translate_model(back)
    found = {key: back.settings[f"model.{key}"].value for key in ("sliding_window", "layer_pattern")}
    assert found == {"sliding_window": 8, "layer_pattern": ["local", "global"]}


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_the_position_and_the_format_of_a_run_are_arguments(compute):
    config = make_config(MODELS["gqa"], batch={"global_size": 8, "sequence_length": 32}, precision={"compute": compute})
    arguments = arguments_for(config, STEP, 40, (1, 1, 1))
    expected = {"iteration": STEP, "consumed_train_samples": 40, "skipped_train_samples": 0, "global_batch_size": 8}
    expected |= {"consumed_valid_samples": 0, "train_iters": config.run.steps, "lr": config.schedule.learning_rate}
    expected |= {"micro_batch_size": 1, "seed": config.run.seed, "mock_data": True, "params_dtype": np.dtype(compute)}
    expected |= {"bf16": compute == "bfloat16", "fp16": compute == "float16", "dist_ckpt_format": "torch_dist"}
    expected |= dict.fromkeys(("no_save_optim", "no_save_rng", "use_dist_ckpt"), True)
    assert {key: arguments[key] for key in expected} == expected
    back = Translation(from_mapping(arguments, "the arguments"), 1)
    translate_precision(back)
    assert back.settings["precision.compute"].value == compute


@pytest.mark.parametrize(("name", "prefix"), [("v3", ""), ("gqa", "yarn_")])
def test_every_number_of_yarn_is_an_argument(name, prefix):
    scaling = {"kind": "yarn", "factor": 4.0, "original_max_positions": 16, "beta_fast": 24.0, "beta_slow": 2.5}
    config = make_config(MODELS[name] | {"rope_scaling": scaling}, batch={"global_size": 8, "sequence_length": 32})
    found = arguments_for(config, STEP, 40, (1, 1, 1))
    named = {f"{prefix}beta_fast": 24.0, f"{prefix}beta_slow": 2.5, "rotary_scaling_factor": 4.0}
    named[f"{prefix}original_max_position_embeddings"] = 16
    assert {key: found[key] for key in named} == named


# Megatron's flags of its activations (transformer_config): GELU is exact unless --openai-gelu, or fused with a bias.
FLAGS = ("swiglu", "squared_relu", "quick_geglu", "openai_gelu")


@pytest.mark.parametrize("bias", [False, True])
def test_each_activation_has_the_flags_that_mean_it_or_is_refused(bias):
    flags = {"swiglu": ["swiglu"], "relu2": ["squared_relu"], "clamped_swiglu": ["quick_geglu"], "gelu_exact": []}
    flags["gelu"] = [] if bias else ["openai_gelu"]
    for activation in ("swiglu", "geglu", "geglu_exact", "clamped_swiglu", "gelu", "gelu_exact", "relu", "relu2"):
        model = SMALL | {"activation": activation, "mlp_bias": bias, "attention_bias": bias, "num_kv_heads": 4}
        config = make_config(model, batch={"global_size": 8, "sequence_length": 32})
        if activation not in flags:
            with pytest.raises(InputError, match=f"model.activation={activation} "):
                arguments_for(config, STEP, 40, (1, 1, 1))
            continue
        found = arguments_for(config, STEP, 40, (1, 1, 1))
        assert [name for name in FLAGS if found[name]] == flags[activation], activation
        if not found["swiglu"] and not found["squared_relu"] and not found["quick_geglu"]:
            assert (found["openai_gelu"] or found["bias_gelu_fusion"] and bias) == (activation == "gelu")


def test_a_bfloat16_checkpoint_has_rounded_weights_and_exact_biases_of_the_choice(make_run, tmp_path):
    make_run("v3")
    assert export(tmp_path, "--dtype", "bfloat16") == 0
    found = {key: state[0].name for key, (_, state) in tensors(tmp_path / f"out/iter_{STEP:07d}")[0].items()}
    exact = {key for key, dtype in found.items() if dtype == "float32"}
    assert set(found.values()) == {"bfloat16", "float32"} and {key[-11:] for key in exact} == {"expert_bias"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"norm_placement": "both"}, r"model.norm_placement=both .* has no arguments of Megatron-LM"),
        ({"attention_scale": 0.3}, r"model.attention_scale=0.3 "),
        ({"activation": "geglu"}, r"model.activation=geglu "),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 1.0, "original_max_positions": 16}},
            r"model.rope_scaling=\{kind: yarn",
        ),
        ({"mlp_bias": True}, r"model.attention_bias=qkv "),
        (
            {"block_pattern": ["dense", "gated_deltanet"]},
            r"model.block_pattern=\[dense, gated_deltanet\] .* become null",
        ),
    ],
)
def test_a_model_that_megatron_does_not_have_is_a_sentence(make_run, tmp_path, change, sentence):
    config, _, _ = make_run("gqa", **change)
    with pytest.raises(InputError, match=sentence):
        export_step(tmp_path / "run", STEP, tmp_path / "out", (1, 1, 1), "float32")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tp", "3"], "--tp=3 does not divide model.num_heads=4"),
        (["--pp", "3"], "--pp=3 does not divide model.num_layers=2"),
        (["--ep", "2"], "--ep=2 needs experts"),
        (["--tp", "0"], "--tp=0 is no number of devices"),
        (["--step", "4"], "has checkpoints of steps 5"),
        ([], "out exists: give a new folder"),
    ],
)
def test_mistakes_are_sentences_and_write_nothing(make_run, tmp_path, capsys, options, sentence):
    make_run("gqa")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("kept")
    with pytest.raises(SystemExit):
        export(tmp_path, *options)
    assert sentence in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
    assert (tmp_path / "out/mine").read_text() == "kept"


def test_large_tensors_are_in_files_of_their_own(tmp_path):
    with CheckpointWriter(tmp_path, file_bytes=1000) as writer:
        for layer in range(3):
            writer.add(["layers.weight", "layers.alias"], np.full((16, 16), layer, np.float32), [layer], [3])
        writer.finish({})
    assert sorted(path.name for path in tmp_path.glob("*.distcp")) == [f"__0_{i}.distcp" for i in range(3)]
    shape, state = tensors(tmp_path)[0]["layers.alias"]
    assert shape == (3, 16, 16) and state[0] == np.float32


def test_pickles_are_those_of_pythons_reader():
    plain = {"a": [None, True, False, -1, 2**31, -(2**40), 2**70, 1.5, "ä", (), (1, ("a", "a")), {}], 3: {"b": [[]]}}
    assert pickle.loads(pickled(plain)) == plain
    described = Instance(Named("argparse", "Namespace"), {"x": Call(Named("builtins", "complex"), (1.0, 2.0))})
    found = pickle.loads(pickled(Pairs(((described, 1),)).pairs[0]))
    assert found[0].x == 1 + 2j and found[1] == 1
    assert isinstance(load_plain(pickled(described), "file", True), Plain)
    with pytest.raises(TypeError, match="object is no plain value"):
        pickled(object())
