"""`checkpoint.save_optimizer: false`: checkpoints that other runs start from, and that no run resumes from."""

from dataclasses import replace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from trainers import StoppedQuickTrainer

import megajax
from megajax.errors import InputError
from megajax.tools.verify.runs import canonical
from megajax.training.loop import Trainer

# A router's bias is layer state; a width of 36 is padded on 8 devices.
SMALL = ("model.hidden_size=36", "model.head_dim=8", "run.eval_steps=0", "data.kind=synthetic")
SMALL += ("model.block_pattern=null", "model.num_experts=4", "model.router.expert_bias=true")
WEIGHTS_ONLY = "checkpoint.save_optimizer=false"


@pytest.fixture
def build(make_config, tmp_path):
    """(overrides..., devices=1) → a Trainer of `tmp_path/run` unless an override says otherwise."""

    def build(*overrides, devices=1, kind=Trainer):
        config = make_config(*SMALL, f"run.dir={tmp_path / 'run'}", *overrides)
        return kind(config, jax.devices()[:devices])

    return build


def test_weights_only_checkpoints_start_other_runs_and_are_not_resumed(build, tmp_path, capsys):
    run_dir = tmp_path / "run"
    trainer = build("run.steps=3", WEIGHTS_ONLY, "mesh.fsdp=8", devices=8)
    biases = jax.tree.map(
        lambda a: jax.device_put(np.arange(a.size, dtype=a.dtype).reshape(a.shape)), trainer.state.layer_state
    )
    trainer.state, trainer.step = replace(trainer.state, layer_state=biases), 3
    trainer.save()
    trainer.close()
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(run_dir / "checkpoints/3/state").item_metadata.tree
    assert set(tree) == {"params", "experts", "step", "loss_scale", "scale_age", "skipped", "skipped_in_row"}

    expected = canonical(trainer.program, trainer.state.params)
    other = build(f"run.dir={tmp_path / 'other'}", f"checkpoint.init_from={run_dir}", "optimizer.ema_decay=0.9")
    bias = {name: np.asarray(a) for name, a in trainer.state.layer_state["moe"].items()}
    for found in (megajax.load_weights(run_dir), other.state.params, other.state.ema):
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
    for name, array in bias.items():
        np.testing.assert_array_equal(other.state.layer_state["moe"][name], array)
    assert other.step == 0 and not any(
        np.any(np.asarray(m)) for m in other.state.optimizer.slots["adamw"]["mu"].values()
    )

    path = run_dir / "checkpoints" / "3"
    first = (f"run.dir={tmp_path / 'first'}", "run.steps=1", f"checkpoint.init_from={run_dir}")
    assert build(*first, kind=StoppedQuickTrainer).run() == 0
    assert f"starting with the weights of {path}" in capsys.readouterr().out.splitlines()
    for overrides in (("run.steps=5", WEIGHTS_ONLY), ("run.steps=5",)):
        with pytest.raises(InputError) as error:
            build(*overrides)
        assert str(error.value) == (
            f"the checkpoint {path} has no optimizer state (checkpoint.save_optimizer=false), so the run can't be "
            f"resumed from it bit for bit: set checkpoint.init_from={path} and another run.dir to start from its "
            "weights."
        )
    done = build("run.steps=3")
    assert done.run() == 0 and "nothing to do" in capsys.readouterr().out
    with pytest.raises(InputError, match="has no optimizer state"):
        _ = done.state


def test_the_newest_checkpoint_with_optimizer_state_is_named(build):
    for step, overrides in ((1, ()), (2, ()), (3, (WEIGHTS_ONLY,))):
        trainer = build("run.steps=9", "checkpoint.keep=3", *overrides)
        trainer.step = step
        trainer.save()
        trainer.close()
    with pytest.raises(InputError, match="weights, or set checkpoint.resume_step=2, the newest one that has it."):
        build("run.steps=9")
    assert build("run.steps=9", "checkpoint.resume_step=2").step == 2


@pytest.mark.parametrize("steps", [1, 9])
def test_the_last_line_says_how_to_go_on(build, tmp_path, capsys, steps):
    trainer = build(f"run.steps={steps}", WEIGHTS_ONLY, kind=StoppedQuickTrainer)
    assert trainer.run() == (75 if steps > 1 else 0)
    line = capsys.readouterr().out.splitlines()[-1]
    if steps > 1:
        assert line.startswith("stopped on request at step 1, saved without optimizer state; start another run with ")
    assert line.endswith(f"checkpoint.init_from={tmp_path / 'run'}")
