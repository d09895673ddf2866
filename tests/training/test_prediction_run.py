"""A run with multi-token prediction: its logs and counts, its checkpoints on another mesh, its model in use."""

import shutil

import jax
import numpy as np
import pytest

from megajax import load_run, load_weights
from megajax.errors import ConfigError
from megajax.estimate.costs import flops_per_token, parameter_count
from megajax.layout.kinds import expert_layers, stacked_layers
from megajax.model import Transformer
from megajax.step.mtp import MultiTokenPrediction
from megajax.training.loop import Trainer
from megajax.training.step import with_extra_layers

MODEL = (
    "model={num_layers: 1, mtp_layers: 2, num_experts: 4, expert_ffn_hidden_size: 16}",
    "model.router={score_function: sigmoid, expert_bias: true, global_loss: 0.01}",
)
NAMES = ("loss", "mtp_loss", "mtp_loss/module", "expert_load", "grad_norm")


@pytest.fixture(scope="session")
def tiny(tiny_with_attention):
    return tiny_with_attention


@pytest.mark.long
def test_a_run_resumes_on_another_mesh_and_its_model_is_used_without_modules(
    make_config, read_metrics, tmp_path, capsys
):
    def run(name: str, *overrides: str, devices: int = 1) -> dict[int, tuple]:
        settings = (f"run.dir={tmp_path / name}", "run.steps=4", "run.checkpoint_interval=2", *MODEL, *overrides)
        trainer = Trainer(make_config(*settings), jax.devices()[:devices])
        assert trainer.run() == 0
        assert np.abs(trainer.state.layer_state["mtp"]["moe.expert_bias"]).max() > 0
        return read_metrics(tmp_path / name, *NAMES)

    expected = run("whole", "data.split='8,2,0'", "run.eval_interval=4", "run.eval_steps=1")
    (evaluated,) = read_metrics(tmp_path / "whole", "eval_loss").values()
    assert abs(evaluated[0] - expected[4][0]) < 0.5
    assert (
        "2 for multi-token prediction; 0.3 × the mean of their losses is added to the loss" in capsys.readouterr().out
    )
    for loss, modules, each, load, _ in expected.values():
        assert modules == pytest.approx(np.mean(each)) and len(each) == 2 and loss not in each
        assert len(load) == 3, "a layer, then two modules"
    shutil.copytree(tmp_path / "whole", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved/checkpoints/4")
    moved = run("moved", "data.split='8,2,0'", "mesh.fsdp=2", devices=2)
    for step in (3, 4):
        for found, value in zip(moved[step], expected[step], strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-5)

    model = load_run(tmp_path / "whole")
    assert not model.config.mtp_layers and np.isfinite(model(np.arange(6)[None])).all()
    drafting, whole = load_run(tmp_path / "whole", speculate=1).weights, load_weights(tmp_path / "whole")
    for k, module in enumerate(drafting.layers[1:]):
        np.testing.assert_array_equal(module["final_norm"], whole["blocks.mtp.final_norm"][k])
    assert len(drafting.layers) == len(drafting.state) == 3


def test_metrics_of_modules_follow_those_of_the_layers(make_config):
    """A dense layer, two with experts, a module: the last kind's metrics have the module's after theirs."""
    model = make_config(*MODEL, "model={num_layers: 3, mtp_layers: 1, first_dense_layers: 1}").model
    dense, layers, module = np.zeros((1, 2)), np.array([[1, 2], [3, 4]]), np.array([[5, 6]])
    found = with_extra_layers(model, {"dense": {"a": dense}, "moe": {"a": layers}, "mtp": {"a": module}})
    assert list(found) == ["dense", "moe"] and found["dense"]["a"] is dense
    np.testing.assert_array_equal(found["moe"]["a"], [[1, 2], [3, 4], [5, 6]])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[moe, gated_deltanet_moe]", (1, 3, 4, 0, 2)),
        ("[gated_deltanet_moe, moe]", (0, 2, 1, 3, 4)),
        ("[moe, moe, moe, gated_deltanet_moe]", (3, 4, 0, 1, 2)),
    ],
)
def test_layers_of_two_kinds_with_experts_have_the_order_of_their_metrics(make_config, pattern, expected):
    """Kinds by name, each with its layers; the module, layer 4, after those of the last layer's kind."""
    model = make_config(*MODEL, f"model={{num_layers: 4, mtp_layers: 1, block_pattern: {pattern}}}").model
    numbers = {kind: {"a": np.array(layers)} for kind, layers in stacked_layers(model).items()}
    metrics = with_extra_layers(model, numbers)
    assert tuple(np.concatenate([metrics[kind]["a"] for kind in sorted(metrics)])) == expected
    assert expert_layers(model) == expected


@pytest.mark.smoke
@pytest.mark.parametrize("losses", [[3.0], [3.0, 5.0]])
def test_each_of_several_modules_has_its_own_loss_in_the_log(losses):
    values = MultiTokenPrediction.metrics(None, {"mtp_loss": np.array(losses)})  # type: ignore[arg-type]
    own = values.pop("mtp_loss/module", None)
    assert values == {"mtp_loss": sum(losses) / len(losses)}
    assert own is None if len(losses) == 1 else own.tolist() == losses


def test_a_module_counts_as_a_layer_a_projection_and_a_head(make_config):
    plain, extended = (make_config(f"model.mtp_layers={n}") for n in (0, 1))
    deeper = make_config("model.num_layers=2")
    D, V = 32, 128
    added = flops_per_token(extended) - flops_per_token(plain)
    assert added == flops_per_token(deeper) - flops_per_token(plain) + 6 * (2 * D * D + D * V)
    plain, extended, deeper = (parameter_count(Transformer(each.model)) for each in (plain, extended, deeper))
    assert extended - plain == deeper - plain + 2 * D * D + 3 * D


def test_adapters_exclude_modules(tmp_path, make_config):
    with pytest.raises(ConfigError, match=r"model.mtp_layers=1 .* lora.rank=4, .*: set model.mtp_layers=0"):
        make_config("lora.rank=4", f"checkpoint.init_from={tmp_path}", "model.mtp_layers=1")
