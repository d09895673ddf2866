"""`megajax average`: the mean of checkpoints, and moving averages of the weights, as runs that others read."""

from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import pytest

import megajax
from megajax import average
from megajax.checkpoint import checksums
from megajax.checkpoint.storage import read_description
from megajax.checkpoint.weights import open_model, run_config
from megajax.config import load_config
from megajax.hf.adapters import open_merged
from megajax.inference.load import load_run
from megajax.training.loop import Trainer

# A router's bias is layer state.
SMALL = ("model.block_pattern=null", "model.num_experts=4", "model.router.expert_bias=true", "run.steps=9")
SMALL += ("run.eval_steps=1", "data.split='8,2,0'", "checkpoint.keep=9", "model.num_layers=2")


@pytest.fixture(scope="module")
def build(tiny, text, tmp_path_factory):
    """(directory, overrides...) → a Trainer of the run directory, on one device."""
    root = tmp_path_factory.mktemp("runs")

    def build(name, *overrides):
        overrides = (f"data.train={text}", f"run.dir={root / name}", *SMALL, *overrides)
        return Trainer(load_config(tiny, overrides), jax.devices()[:1])

    return build


def save_random(trainer, steps) -> dict[int, dict[str, dict[str, np.ndarray]]]:
    """Save checkpoints with random arrays near the initial ones; the arrays by step, field of the state and name."""
    rng, saved = np.random.default_rng(0), {}
    noisy = lambda a: np.asarray(np.asarray(a) + 0.02 * rng.standard_normal(a.shape), a.dtype)  # noqa: E731
    for step in steps:
        fields = {"params": trainer.state.params, "ema": trainer.state.ema, "layer_state": trainer.state.layer_state}
        fields = jax.tree.map(noisy, fields)
        saved[step] = fields
        trainer.state = replace(trainer.state, **jax.device_put(fields))
        trainer.step = step
        trainer.save()
    trainer.close()
    return saved


@pytest.fixture(scope="module")
def run(build, tmp_path_factory):
    """(run directory, its arrays by step) of three checkpoints elsewhere, each with a moving average."""
    trainer = build(
        "run", "optimizer.ema_decay=0.5", f"checkpoint.dir={tmp_path_factory.mktemp('far') / 'checkpoints'}"
    )
    saved = save_random(trainer, (2, 5, 7))
    return trainer.directory.path, saved


def numpy_mean(saved, steps, field):
    return jax.tree.map(lambda *arrays: np.mean(np.float64(arrays), axis=0), *(saved[step][field] for step in steps))


def test_the_mean_of_checkpoints_starts_other_runs(run, build, tmp_path, capsys):
    (run_dir, saved), out = run, tmp_path / "mean"
    with mock.patch.object(checksums, "damage", wraps=checksums.damage) as verified:
        assert average.main([str(run_dir), "--steps", "7,2", "--out", str(out)]) == 0
    assert verified.call_count == 2
    assert f"the mean of the weights at steps 2 and 7 of {run_dir} to {out}" in capsys.readouterr().out
    expected, found = numpy_mean(saved, (2, 7), "params"), megajax.load_weights(out / "checkpoints" / "7")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-8, err_msg=name)
    state = numpy_mean(saved, (2, 7), "layer_state")["moe"]
    config = run_config(out, "RUN")
    assert (config.run.dir, config.run.name, config.checkpoint.dir) == (str(out), "mean", None)
    kept = open_model(out, config.model)[1]
    assert kept.keys() == {f"blocks.moe.{name}" for name in state}
    for name, array in state.items():
        np.testing.assert_allclose(kept[f"blocks.moe.{name}"][...], array, rtol=1e-6, atol=1e-8)

    started = build("started", f"checkpoint.init_from={out}")
    loss = started.evaluate()["loss"]
    like, of_layers = started.state.params, started.state.layer_state["moe"]

    def placed(arrays, like):
        return {name: jax.device_put(np.float32(array), like[name].sharding) for name, array in arrays.items()}

    started.state = replace(started.state, params=placed(expected, like), layer_state={"moe": placed(state, of_layers)})
    assert loss == pytest.approx(started.evaluate()["loss"], rel=1e-6)
    for step in (2, 5, 7):  # the mean is none of the checkpoints
        started.state = replace(started.state, params=placed(saved[step]["params"], like))
        assert abs(started.evaluate()["loss"] - loss) > 1e-4 * loss
    assert load_run(out).config.num_experts == 4


def test_moving_averages_are_written_as_they_were_saved(run, tmp_path, capsys):
    (run_dir, saved) = run
    for name, steps in (("one", (7,)), ("two", (5, 7))):
        assert average.main([str(run_dir), "--last", str(len(steps)), "--ema", "--out", str(tmp_path / name)]) == 0
        assert "moving averages" in capsys.readouterr().out
        found = megajax.load_weights(tmp_path / name)
        for parameter, array in numpy_mean(saved, steps, "ema").items():
            if len(steps) == 1:
                np.testing.assert_array_equal(found[parameter], array)
            np.testing.assert_allclose(found[parameter], array, rtol=1e-6, atol=1e-8)


def test_adapters_are_averaged_and_merged_into_their_base(run, build, tmp_path, capsys):
    (run_dir, saved), out = run, tmp_path / "mean"
    lora = ("lora.rank=2", "lora.alpha=4", "lora.targets=[query]", "model.router.bias_update_rate=0")
    trainer = build("adapted", f"checkpoint.init_from={run_dir}", *lora)
    adapters = save_random(trainer, (1, 2))
    assert average.main([str(trainer.directory.path), "--last", "2", "--out", str(out)]) == 0
    saved_as, averaged = (read_description(each / "checkpoints/2") for each in (trainer.directory.path, out))
    assert saved_as["base"] is not None
    for section in ("step", "model", "lora", "base"):  # what a start from it compares
        assert averaged[section] == saved_as[section], section
    mean, query = numpy_mean(adapters, (1, 2), "params"), "blocks.moe.attention.query"
    with open_merged(out, 2, run_config(out, "RUN")) as merged:
        for layer, base in enumerate(saved[7]["params"][query]):
            change = np.einsum("dr,rnh->dnh", mean[f"{query}_lora_a"][layer], mean[f"{query}_lora_b"][layer])
            np.testing.assert_allclose(merged[query][(layer,)], base + 2 * change, rtol=1e-5, atol=1e-7)
    config = trainer.directory.path / "config.yaml"
    config.write_text(config.read_text().replace("alpha: 4.0", "alpha: 8.0"))  # a run that went on with another one
    with pytest.raises(SystemExit):
        average.main([str(trainer.directory.path), "--last", "2", "--out", str(tmp_path / "mixed")])
    assert "lora.alpha=4.0, but this run has 8.0" in capsys.readouterr().err


def sentence(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        average.main([*map(str, arguments)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("megajax: error: ") and error.count("\n") == 1
    return error


def test_mistakes_are_sentences_and_leave_nothing(run, build, tmp_path, capsys, monkeypatch):
    run_dir, out = run[0], tmp_path / "out"
    saved = "has checkpoints of steps 2, 5, 7"
    for given, expected in (
        (("--steps", "2,3"), f"--steps=2,3: there is no checkpoint of step 3: {run_dir} {saved}."),
        (("--steps", "2,2"), "names a step twice"),
        (("--steps", "2;5"), "2;5 is not a list of steps such as 1000,1200"),
        (("--steps", "5"), "--steps=5 is one checkpoint: choose two or more, or --ema"),
        (("--last", "4"), f"--last=4: {run_dir} {saved}: give a number from 1 to 3"),
        (("--last", "2", "--steps", "2,5"), "--steps: not allowed with argument --last"),
        ((), "one of the arguments --steps --last is required"),
    ):
        assert expected in sentence(capsys, run_dir, *given, "--out", out)
    one = run_dir / "checkpoints" / "5"
    assert f"is one checkpoint: give {run_dir} --steps 5." in sentence(capsys, one, "--last", "1", "--out", out)
    assert "has no checkpoints" in sentence(capsys, tmp_path, "--last", "2", "--out", out)
    assert f"{run_dir} exists" in sentence(capsys, run_dir, "--last", "2", "--out", run_dir)

    plain = build("plain")
    plain.save()
    plain.close()
    plain_dir = plain.directory.path
    assert "0 has no moving average" in sentence(capsys, plain_dir, "--last", "1", "--ema", "--out", out)
    config = plain_dir / "config.yaml"
    config.write_text(config.read_text().replace("rope_theta: 10000.0", "rope_theta: 500.0"))
    with pytest.raises(SystemExit):
        average.main([str(plain_dir), "--last", "1", "--ema", "--out", str(out)])
    assert "model.rope_theta=10000.0, but this run has 500.0" in capsys.readouterr().err

    def fail(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(average.beside, "keep", fail)  # after the checkpoint
    assert f"{out} could not be written (No space left" in sentence(capsys, run_dir, "--last", "2", "--out", out)
    assert not [*tmp_path.iterdir()]
