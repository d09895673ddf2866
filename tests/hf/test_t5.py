"""T5 against transformers: folders, logits, gradients and generation (tests/data_files/make_t5_references.py)."""

import json
import shutil
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from megajax import generate
from megajax.config import Config, ModelConfig
from megajax.config.checks import check_mesh
from megajax.data.tokenizers import load_tokenizer
from megajax.errors import InputError
from megajax.hf.convert import export, family_for, open_readers, read_model, their_tensors
from megajax.hf.quantising import StoredForm
from megajax.inference.generation import Generator
from megajax.inference.language_model import LanguageModel
from megajax.inference.sampling import Sampling
from megajax.inference.scoring import Scorer
from megajax.mesh import build_mesh
from megajax.model import Transformer, bind, parameters
from megajax.sources import TextSettings
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

FILES = Path(__file__).parents[1] / "data_files"
NAMES = ["t5", "t5_tied"]  # T5 1.1, and T5 with padding in the encoder
TOLERANCE = 1e-5
GREEDY = Sampling(temperature=0.0)


def config_for(model: dict, **mesh: int) -> Config:
    batch = {"global_size": 2, "sequence_length": 12}
    values = {"model": {**model, "vocab_multiple": 2}, "mesh": mesh, "batch": batch, "data": {"kind": "synthetic"}}
    return Config.model_validate(values | {"precision": {"compute": "float32"}})


@pytest.fixture(scope="module")
def unpack(tmp_path_factory):
    """Name → its folder."""
    folder = tmp_path_factory.mktemp("t5")
    for name in NAMES:
        with zipfile.ZipFile(FILES / f"{name}.zip") as archive:
            archive.extractall(folder / name)
    return folder.joinpath


@pytest.fixture(scope="module")
def weights(unpack):
    """By name: (the model, its weights read on a mesh)."""

    def of(name: str):
        config = config_for(read_model(unpack(name)), fsdp=2, tensor=2)
        program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
        return config.model, jax.device_get(StateSaver(program).restore_weights(str(unpack(name)))[0])

    return {name: of(name) for name in NAMES}


def relative(ours, theirs) -> float:
    return float(np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_read_and_written_as_it_was(unpack, weights, tmp_path, name):
    model, own = weights[name]
    expected = json.loads(str(np.load(FILES / f"{name}.npz")["model"])) | {"vocab_multiple": 2}
    expected["encoder"]["sequence_length"] = 512  # transformers' file does not have it
    assert model == ModelConfig.model_validate(expected)
    export(own, model, tmp_path / "out", StoredForm("float32"))
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (unpack(name), tmp_path / "out"))
    assert theirs.keys() == ours.keys() and all((theirs[n] == ours[n]).all() for n in theirs)
    assert read_model(tmp_path / "out") == read_model(unpack(name))
    shorter = model.model_copy(update={"encoder": model.encoder.model_copy(update={"sequence_length": 24})})
    assert family_for(model).read(family_for(model).write(shorter))["encoder"]["sequence_length"] == 24


@pytest.mark.parametrize("stacks", [("encoder",), ("decoder",), ("encoder", "decoder")])
def test_older_folders_repeat_the_embedding_in_their_stacks(unpack, tmp_path, stacks):
    tensors = load_file(unpack("t5_tied") / "model.safetensors")
    repeated = {f"{stack}.embed_tokens.weight": tensors["shared.weight"] for stack in stacks}
    save_file(tensors | repeated, tmp_path / "model.safetensors")
    shutil.copy(unpack("t5_tied") / "config.json", tmp_path)
    model = ModelConfig.model_validate(read_model(tmp_path) | {"vocab_multiple": 2})
    shapes = {name: parameter.shape for name, parameter in parameters(Transformer(model)).items()}
    with open_readers(tmp_path, model, shapes, "folder") as readers:
        assert readers.keys() == shapes.keys()


def test_logits_are_those_of_transformers(weights):
    loss, (_, own), stored = compared(weights, "t5")
    found, logits = jax.jit(loss)(own)
    assert relative(logits, stored["logits"]) < TOLERANCE and relative(found, stored["loss"]) < TOLERANCE


@pytest.mark.long  # tests/parallel/test_encoder_layers.py has the gradients of these layers
@pytest.mark.parametrize("name", ["t5", "t5_tied"])
def test_logits_and_all_gradients_are_those_of_transformers(weights, name):
    loss, (model, own), stored = compared(weights, name)
    (found, logits), gradients = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(own))
    assert relative(logits, stored["logits"]) < TOLERANCE and relative(found, stored["loss"]) < TOLERANCE
    theirs = dict(their_tensors(gradients, family_for(model).tensors(model), model, np.dtype("float32"), {}))
    assert len(theirs) == sum(key.startswith("gradient:") for key in stored.files)
    for tensor, gradient in theirs.items():
        assert relative(gradient, stored[f"gradient:{tensor}"]) < TOLERANCE, tensor


def compared(weights, name: str):
    """(weights → (loss, logits), (model, weights), transformers' arrays) of a folder."""
    (model, own), stored = weights[name], np.load(FILES / f"{name}.npz")
    network, fields = Transformer(model), {"encoder_tokens": stored["encoder_tokens"]}
    if name == "t5_tied":
        padding = np.arange(16) >= stored["lengths"][:, None]
        fields |= {"encoder_segment_ids": -1 * padding, "segment_ids": np.zeros((2, 12), int)}

    def loss(weights):
        logits = bind(network, weights)(stored["tokens"], fields=fields)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), stored["targets"][..., None], axis=-1)
        return -chosen.mean(), logits

    assert {*own} == {*parameters(network)}
    return loss, (model, own), stored


# Of training, of the stored weights and of programs, read with the tokenizer, and what feed_forward_proj decides
MAY_CHANGE = """architectures classifier_dropout dropout_rate dtype initializer_factor use_cache transformers_version
    eos_token_id pad_token_id decoder_start_token_id dense_act_fn is_gated_act"""


def test_every_other_key_of_a_config_counts(unpack, tmp_path):
    config = json.loads((unpack("t5_tied") / "config.json").read_text())

    def read(changed):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        return ModelConfig.model_validate(read_model(tmp_path))

    base, silent = read(config), set()
    for key, value in config.items():
        other = not value if isinstance(value, bool) else 2 * value + 1 if isinstance(value, int | float) else "x"
        try:
            silent |= {key} if read(config | {key: other}) == base else set()
        except (InputError, ValidationError):
            continue
    assert silent == {*MAY_CHANGE.split()}


# feed_forward_proj as T5's config has it: ACT2FN's name, behind "gated-" with a gate; gated-gelu is the one by tanh.
PROJECTIONS = {"relu": "relu", "gated-gelu": "geglu", "gated-gelu_new": "geglu", "gated-silu": "swiglu"}


def test_each_activation_is_read_and_another_is_a_sentence(unpack, tmp_path):
    config = json.loads((unpack("t5_tied") / "config.json").read_text())
    for name in (*PROJECTIONS, "gelu", "gated-relu", "silu"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"feed_forward_proj": name}))
        if name in PROJECTIONS:
            assert ModelConfig.model_validate(read_model(tmp_path)).activation == PROJECTIONS[name]
        else:
            with pytest.raises(InputError, match="feed_forward_proj"):
                read_model(tmp_path)


def test_absent_keys_have_the_values_of_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "num_layers": 3}))
    model = ModelConfig.model_validate(read_model(tmp_path))
    assert (model.num_layers, model.encoder.num_layers, model.hidden_size, model.head_dim) == (3, 3, 512, 64)
    assert (model.relative_buckets, model.activation, model.tie_embeddings, model.scale_head) == (
        32,
        "relu",
        True,
        True,
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "tie_word_embeddings": False}))
    assert not ModelConfig.model_validate(read_model(tmp_path)).scale_head  # as in T5 1.1


@pytest.mark.parametrize(
    ("name", "mesh"), [pytest.param("t5", {"tensor": 2}, marks=pytest.mark.long), ("t5_tied", {"data": 2})]
)
def test_generation_with_cached_cross_keys_is_that_of_whole_sequences(weights, name, mesh):
    """transformers computed each token from the whole sequence before it."""
    (model, own), stored = weights[name], np.load(FILES / f"{name}.npz")
    config = config_for(model.model_dump(), **mesh)
    devices = build_mesh(check_mesh(config, 2), jax.devices()[:2])
    text = TextSettings(load_tokenizer("byte"), end_token=1)
    generator = Generator(LanguageModel(config, jax.device_put(own), {}, devices, text), GREEDY, 8)
    prompts = [row[:n].tolist() for row, n in zip(stored["encoder_tokens"], stored["lengths"], strict=True)]
    (*_, found) = generator.tokens(prompts, 8)
    assert found == stored["generated"][:, 1:].tolist()
    assert generator.model.encode("ab") == [97, 98, 1], "the encoder's sequences end as in training"
    with pytest.raises(InputError, match="logits of tokens need a text before them"):
        generator.model(stored["tokens"])
    with pytest.raises(InputError, match="scores of texts need a text before them"):
        Scorer(generator.model)


def test_the_command_prints_only_the_answer(unpack, tmp_path, capsys):
    """It does not continue the prompt, which the encoder has read."""
    shutil.copytree(unpack("t5_tied"), tmp_path, dirs_exist_ok=True)
    names = {chr(i): i for i in range(33, 127)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, "!"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = [str(tmp_path), "--prompt", "Q", "--tokens", "1", "--temperature", "0"]
    assert generate.main(arguments) == 0
    assert "Q" not in capsys.readouterr().out
