"""A run may change its FP8 recipe at a checkpoint: weights and moments stay, histories are kept as far as they go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from trainers import QuickTrainer

from megajax.config import load_config
from megajax.errors import ConfigError
from megajax.training.loop import Trainer

TINY = """
run: {log_interval: 1}
model: {num_layers: 2, hidden_size: 32, num_heads: 2, head_dim: 16, ffn_hidden_size: 64, vocab_size: 70,
        vocab_multiple: 128, init_std: 0.1}
kernels: {scan_unroll: 2}
batch: {global_size: 8, sequence_length: 16}
schedule: {kind: constant, learning_rate: 1.0e-3}
data: {kind: synthetic}
logging: {tensorboard: false}
"""
BF16, CURRENT, NVFP4 = ([f"precision.fp8.recipe={recipe}"] for recipe in ("none", "current", "nvfp4"))


def delayed(length: int) -> list[str]:
    return ["precision.fp8.recipe=delayed", f"precision.fp8.amax_history_length={length}"]


@pytest.fixture
def make_trainer(tmp_path):
    """(steps, overrides, kind, axis=size...) → a Trainer of the one run directory on a mesh of the first devices."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)

    def make(steps, overrides, kind=Trainer, **sizes):
        mesh = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
        config = load_config(path, [f"run.dir={tmp_path / 'run'}", f"run.steps={steps}", *overrides, *mesh])
        return kind(config, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])

    return make


def weights_and_moments(trainer) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((trainer.state.params, trainer.state.optimizer))]


def histories(trainer) -> dict[str, np.ndarray]:
    return {name: np.asarray(history) for name, history in trainer.state.layer_state.get("fp8", {}).items()}


def assert_goes_on_from(trainer, previous) -> None:
    assert trainer.step == previous.step == int(trainer.state.step)
    for found, expected in zip(weights_and_moments(trainer), weights_and_moments(previous), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def run_to_the_end(trainer):
    before = weights_and_moments(trainer)
    assert trainer.run() == 0
    assert not any(np.array_equal(a, b) for a, b in zip(before, weights_and_moments(trainer), strict=True))
    return trainer


@pytest.mark.long
def test_a_bf16_run_goes_on_in_fp8_and_back(make_trainer):
    plain = run_to_the_end(make_trainer(2, BF16))
    assert histories(plain) == {}

    first = make_trainer(4, delayed(4))
    assert_goes_on_from(first, plain)
    assert len(first.state.layer_state["fp8"]) == 12
    assert all(h.shape == (2, 4) and not h.any() for h in histories(first).values())
    run_to_the_end(first)
    assert all(h[:, :2].all() and not h[:, 2:].any() for h in histories(first).values())

    # On a mesh that stores the weights otherwise.
    shorter, longer = make_trainer(4, delayed(1), fsdp=2), make_trainer(5, delayed(6))
    assert_goes_on_from(shorter, first)
    assert_goes_on_from(longer, first)
    for name, history in histories(first).items():
        np.testing.assert_array_equal(histories(shorter)[name], history[:, :1])
        np.testing.assert_array_equal(histories(longer)[name], np.pad(history, ((0, 0), (0, 2))))
    for overrides in (CURRENT, NVFP4, BF16):
        trainer = make_trainer(6, overrides)
        assert_goes_on_from(trainer, first)
        assert histories(trainer) == {}
    # Histories do not come back: the run without FP8 kept none.
    trainer.step = 5
    trainer.save()
    trainer.checkpoints.close()
    again = make_trainer(6, delayed(4))
    assert again.step == 5
    assert not any(h.any() for h in histories(again).values())


def test_a_shorter_history_keeps_its_newest_steps(make_trainer):
    first = make_trainer(1, delayed(3))
    first.state.layer_state["fp8"] = {
        name: jnp.float32([[layer + each for each in (30, 20, 10)] for layer in range(len(history))])
        for name, history in histories(first).items()
    }
    first.save()
    first.checkpoints.close()
    shorter = histories(make_trainer(2, delayed(2)))
    assert len(shorter) == 12
    for history in shorter.values():
        np.testing.assert_array_equal(history, [[30, 20], [31, 21]])


def test_a_run_with_delayed_scaling_exports_its_inputs_scales(make_trainer, tmp_path):
    """No calibration: the scales are those of the largest magnitudes of the history."""
    export = [f"checkpoint.export_hf.dir={tmp_path / 'hf'}", "checkpoint.export_hf.quantization=fp8_tensor"]
    trainer = make_trainer(2, [*delayed(4), *export, "run.eval_steps=0"], kind=QuickTrainer)
    random = np.random.default_rng(1)
    trainer.state.layer_state["fp8"] = {
        name: jnp.float32(random.uniform(1, 9, history.shape)) for name, history in histories(trainer).items()
    }
    assert trainer.run() == 0
    history = histories(trainer)
    with safe_open(tmp_path / "hf/step-2/model.safetensors", framework="np") as file:
        for theirs, ours in (("self_attn.q_proj", "attention.qkv"), ("mlp.down_proj", "mlp.down")):
            for layer in range(2):
                scale = file.get_tensor(f"model.layers.{layer}.{theirs}.input_scale")
                assert scale.dtype == np.float32 and scale.shape == (1,)
                np.testing.assert_array_equal(scale, history[f"{ours}.input"][layer].max() / np.float32(448))
    with pytest.raises(
        ConfigError, match="quantization=fp8_tensor .*recipe=current.*: set precision.fp8.recipe=delayed"
    ):
        make_trainer(2, [*CURRENT, *export])
