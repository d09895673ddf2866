"""The model against transformers: logits, loss and gradients of tiny random models, stored with the script that made
them (tests/data_files/make_transformers_references.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from single_device import stored as stored_in

from megajax.config import Config
from megajax.mesh import AXES, build_mesh
from megajax.model import Transformer, bind, parameters
from megajax.model.block import layer_state
from megajax.sharding import to_canonical
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

DATA_FILES = Path(__file__).parents[1] / "data_files"
FILES = sorted(DATA_FILES.glob("tiny_*.npz"))
# Every part of the other models is in one of these; test_hybrids.py has other states between tokens on meshes.
ON_A_MESH = ("deepseek_v2", "deepseek_v3", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "olmo2")
ON_A_MESH += ("nemotron_h", "kimi_linear", "modernbert")
ON_A_MESH = tuple(f"tiny_{name}" for name in ON_A_MESH)
# Mamba-2 and gated DeltaNet. tests/ops/test_linear_recurrences.py differentiates the recurrences, test_context.py and
# test_hybrids.py the layers on meshes.
HYBRIDS = ("tiny_falcon_h1", "tiny_qwen3_next")
SMOKE = ("tiny_gpt2", "tiny_llama", "tiny_deepseek_v2")
# Their blocks are among those of qwen3_next and nemotron_h,
LONG = ("tiny_qwen3_5_text", "tiny_qwen3_5_moe_text", "tiny_mamba2")
# and in granite_dense and gpt_neox; in phi3; gemma3_text; gemma2 and qwen2; qwen3_moe_mixed and deepseek_v2.
LONG += ("tiny_bamba", "tiny_mistral", "tiny_qwen3", "tiny_qwen3_local", "tiny_qwen3_moe")
# The step on a mesh has their losses and gradients; test_commands.py compares the logits of what it imports.
LONG += ("tiny_gpt_oss", "tiny_deepseek_v3", "tiny_mixtral", "tiny_modernbert")
MARKS = dict.fromkeys(SMOKE, pytest.mark.smoke) | dict.fromkeys(LONG, pytest.mark.long)
LOGITS = [pytest.param(path, id=path.stem, marks=MARKS.get(path.stem, ())) for path in FILES]
FAST_ON_A_MESH = ("tiny_deepseek_v3", "tiny_gpt_oss")  # test_hybrids.py and others have meshes of the other mixers
TOLERANCE = 1e-5


def load(path):
    stored = np.load(path)
    tokens, model = stored["tokens"], json.loads(str(stored["model"]))
    config = Config.model_validate(
        {
            "model": model | {"vocab_multiple": 128},
            "objective": {"kind": "next_token" if model.get("causal", True) else "masked_tokens"},
            "batch": {"global_size": len(tokens), "sequence_length": tokens.shape[1] - 1},
            "precision": {"compute": "float32"},
            "data": {"kind": "synthetic"},
        }
    )
    weights = {}
    for name, parameter in parameters(Transformer(config.model)).items():
        # The stored vocabulary is not padded; the padding gets values that would change every result.
        widths = [(0, ours - theirs) for ours, theirs in zip(parameter.shape, stored[name].shape, strict=True)]
        weights[name] = np.pad(stored[name], widths, constant_values=3.0)
    state = {
        kind: {name: stored[f"blocks.{kind}.{name}"] for name in own} for kind, own in layer_state(config.model).items()
    }
    return stored, config, weights, state


def relative(ours, theirs):
    return np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs)


def check_gradients(stored, gradients):
    """Those that are stored are as these."""
    checked = [key.removeprefix("gradient:") for key in stored.files if key.startswith("gradient:")]
    gradients = jax.device_get(gradients)
    assert checked
    for name in checked:
        theirs = stored[f"gradient:{name}"]
        ours = gradients[name][tuple(slice(size) for size in theirs.shape)]  # without the padded vocabulary
        assert relative(ours, theirs) < 10 * TOLERANCE, name


@pytest.mark.parametrize("path", LOGITS)
def test_logits_are_those_of_transformers(path):
    loss, weights, stored = compared(path)
    logits = jax.jit(lambda w: loss(w)[1])(weights)
    assert relative(logits, stored["logits"]) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", HYBRIDS)
def test_gradients_on_one_device_are_those_of_transformers(name):
    loss, weights, stored = compared(DATA_FILES / f"{name}.npz")
    (found, _), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    assert relative(found, stored["loss"]) < TOLERANCE
    check_gradients(stored, gradients)


def compared(path):
    """(weights → (loss, logits), weights, transformers' arrays) of a file."""
    stored, config, weights, state = load(path)
    network, tokens = Transformer(config.model), stored["tokens"]

    def loss(weights):
        logits = bind(network, weights)(tokens, state=state)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        return -chosen.mean(), logits

    return loss, weights, stored


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST_ON_A_MESH else pytest.mark.long) for name in ON_A_MESH]
)
def test_the_step_has_the_loss_and_gradients_of_transformers(name):
    """On a mesh; one device runs the same layers, with its own embedding, head and experts."""
    from megajax.step.gradients import gradient_function

    stored, config, weights, state = load(DATA_FILES / f"{name}.npz")
    # Two rows; three heads are not divided.
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": 2, "tensor": 2 if config.model.num_kv_heads % 2 == 0 else 1}
    mesh = build_mesh(sizes, jax.devices()[: np.prod(list(sizes.values()))])
    program = TrainProgram.build(config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)}), mesh)
    params = {
        name: jax.device_put(stored_in(w, program.placements[name], w.dtype), program.state_shardings.params[name])
        for name, w in weights.items()
    }
    tokens = stored["tokens"]
    rows, length = len(tokens), tokens.shape[1] - 1
    fields = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((rows, length)),
        "positions": np.broadcast_to(np.arange(length), (rows, length)),
    }
    batch = to_global(program, fields)
    sums, gradients, *_ = jax.jit(gradient_function(program.graph, mesh))(
        params, state, batch, jnp.int32(0), jnp.float32(1)
    )
    assert abs(float(sums["loss"]) - stored["loss"]) / stored["loss"] < TOLERANCE
    check_gradients(
        stored, {name: to_canonical(np.asarray(g), program.placements[name]) for name, g in gradients.items()}
    )
