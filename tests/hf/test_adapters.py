"""Adapters of a Hugging Face model: trained, resumed, merged into the exported model, and in PEFT's format."""

import json
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megajax.checkpoint.storage import SUBDIRECTORY
from megajax.config import load_config
from megajax.errors import InputError
from megajax.hf import adapters
from megajax.hf.__main__ import main
from megajax.hf.compare import compare
from megajax.hf.convert import load, read_model
from megajax.hf.folder import SINGLE
from megajax.inference.load import from_hf, load_run
from megajax.layout.kinds import block_layers
from megajax.model import Transformer, bind, parameters
from megajax.model.lora import is_adapter
from megajax.schema.vision import VisionConfig
from megajax.training.batches import batches
from megajax.training.loop import Trainer

FILES = Path(__file__).parents[1] / "data_files"
TARGETS = {"tiny_llama": "[query, value, output, gate, down]", "tiny_gpt2": "[query, value, output, up]"}
PEFT = {  # module of layer 0 → rank, in, out
    "tiny_llama": {
        "self_attn.q_proj": 2,
        "self_attn.v_proj": 2,
        "self_attn.o_proj": 2,
        "mlp.gate_proj": 2,
        "mlp.down_proj": 2,
    },
    "tiny_gpt2": {"attn.c_attn": 4, "attn.c_proj": 2, "mlp.c_fc": 2},
}


def make_config(folder: Path, run_dir: Path, name: str, *overrides: str):
    path = run_dir.with_suffix(".yaml")
    path.write_text(json.dumps({"model": read_model(folder) | {"vocab_multiple": 64}}))
    settings = [
        f"run={{dir: {run_dir}, steps: 4, eval_steps: 0}}",
        "batch={global_size: 4, sequence_length: 16}",
        "precision.compute=float32",
        "schedule={kind: constant, learning_rate: 0.05}",
        "mesh.fsdp=2",
        "data.kind=synthetic",
        "logging.tensorboard=false",
        f"checkpoint={{init_from: {folder}, keep: 9}}",
        f"lora={{rank: 2, alpha: 6.0, targets: {TARGETS[name]}, dropout: 0.1}}",
    ]
    return load_config(path, [*settings, *overrides])


# The fused attention of GPT-2 is the harder of the two.
@pytest.fixture(scope="module", params=[pytest.param("tiny_llama", marks=pytest.mark.long), "tiny_gpt2"])
def run(request, tmp_path_factory):
    """(name, folder of the base, trainer of a saved run whose adapters are random numbers)."""
    trainer, rng = trainer_of(request.param, tmp_path_factory.mktemp(request.param)), np.random.default_rng(0)
    drawn = {n: 0.2 * rng.normal(size=w.shape).astype(np.float32) for n, w in trainer.state.params.items()}
    drawn = {n: jax.device_put(w, trainer.state.params[n].sharding) for n, w in drawn.items()}
    trainer.state = replace(trainer.state, params=drawn)
    trainer.save()
    trainer.close()
    return request.param, trainer.run_dir.parent / "base", trainer


@pytest.fixture(scope="module")
def merged(run, tmp_path_factory):
    """The folder that `hf export` writes of the run."""
    folder = tmp_path_factory.mktemp("export") / "merged"
    assert main(["export", str(run[2].run_dir), str(folder)]) == 0
    return folder


def trainer_of(name: str, directory: Path) -> Trainer:
    """The trainer of a new run in this directory, whose base is beside it."""
    with zipfile.ZipFile(FILES / f"{name}.zip") as archive:
        archive.extractall(directory / "base")
    return Trainer(make_config(directory / "base", directory / "run", name), devices=jax.devices()[:2])


@pytest.mark.long
def test_a_resumed_run_loads_its_base_again_and_goes_on_bit_for_bit(tmp_path):
    name = "tiny_gpt2"
    trainer, base = trainer_of(name, tmp_path), tmp_path / "base"
    for step in range(1, 5):
        trainer.train_step(trainer.next_batch())
        if step % 2 == 0:
            trainer.save()
    trainer.close()
    config = make_config(base, trainer.run_dir, name, "checkpoint.resume_step=2")
    again = Trainer(config, devices=jax.devices()[:2])
    assert again.step == 2
    saved = {n: np.asarray(w) for n, w in again.state.params.items()}
    for _ in range(2):
        again.train_step(again.next_batch())
    for parameter, w in trainer.state.weights.items():
        np.testing.assert_array_equal(again.state.weights[parameter], w, err_msg=parameter)
    assert all((saved[n] != np.asarray(w)).any() for n, w in again.state.params.items())


def test_the_merged_model_is_base_and_adapters_and_peft_has_its_names(run, merged, tmp_path):
    name, base, trainer = run
    assert main(["adapters", str(trainer.run_dir), str(tmp_path / "peft")]) == 0
    written = [*merged.glob("*"), *tmp_path.glob("peft/*")]
    assert len({path.stat().st_mode for path in written}) == 1  # other users of a cluster can read the weights too
    exported = load_file(next(merged.glob("*.safetensors")))
    plain, peft = load_file(base / SINGLE), load_file(tmp_path / "peft" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["target_modules"] == sorted(PEFT[name]) and settings["peft_type"] == "LORA"
    assert settings["base_model_name_or_path"] == str(base)
    adapted = {key.removesuffix(".lora_A.weight") for key in peft if key.endswith(".lora_A.weight")}
    assert len(peft) == 2 * len(adapted)
    for module in adapted:
        a, b = peft[f"{module}.lora_A.weight"], peft[f"{module}.lora_B.weight"]
        own = ".".join(module.split(".")[-2:])
        rank = settings["rank_pattern"].get(own, settings["r"])
        assert a.shape[0] == b.shape[1] == rank == PEFT[name][own]
        scale = settings["alpha_pattern"].get(own, settings["lora_alpha"]) / rank
        weight = f"{module.removeprefix('base_model.model.')}.weight"
        change = scale * b @ a
        assert np.abs(change).max() > 1e-2
        change = change.T if settings["fan_in_fan_out"] else change
        np.testing.assert_allclose(exported[weight], plain[weight] + change, atol=1e-5, err_msg=weight)
        plain[weight] = exported[weight]
    assert len(adapted) == len(PEFT[name]) * trainer.config.model.num_layers
    for weight, w in plain.items():
        np.testing.assert_array_equal(exported[weight], w, err_msg=weight)


def test_the_merged_model_has_the_loss_of_the_adapted_one(run, merged):
    name, _, trainer = run
    model, one = Transformer(trainer.config.model), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {n: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=one) for n, p in parameters(model).items()}
    weights = load(merged, shapes, {}, trainer.config.model, "folder")[0]
    batch = next(batches(trainer.program, "train", trainer.data["train"], 9))
    sums, tokens = trainer.program.eval_step(trainer.state.weights, {}, batch)

    @jax.jit
    def mean_loss(weights, batch):
        logits = bind(model, weights)(batch["tokens"][0])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][0, ..., None], -1).mean()

    expected = mean_loss(weights, {name: np.asarray(batch[name]) for name in ("tokens", "targets")})
    assert float(sums["loss"] / tokens) == pytest.approx(float(expected), rel=1e-5)
    loaded = load_run(trainer.run_dir)  # for generation, merged on the devices
    np.testing.assert_allclose(loaded.weights.outer["embedding.tokens"], weights["embedding.tokens"])
    query = np.asarray(weights["blocks.dense.attention.query"])[1].reshape(weights["embedding.tokens"].shape[1], -1)
    np.testing.assert_allclose(
        np.asarray(loaded.weights.layers[1]["attention.qkv"])[:, : query.shape[1]], query, atol=1e-6, err_msg=name
    )


def test_the_settings_of_adapters_are_those_that_peft_reads(run, tmp_path):
    """GPT-2's linear layers are stored as [in, out]; of its fused one two parts have adapters of rank 2 each."""
    name, base, trainer = run
    assert main(["adapters", str(trainer.run_dir), str(tmp_path / "peft")]) == 0
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": 2,
        "lora_alpha": 6.0,
        "lora_dropout": 0.1,
        "target_modules": sorted(PEFT[name]),
        "rank_pattern": {"attn.c_attn": 4} if name == "tiny_gpt2" else {},
        "alpha_pattern": {"attn.c_attn": 12.0} if name == "tiny_gpt2" else {},
        "bias": "none",
        "fan_in_fan_out": name == "tiny_gpt2",
        "inference_mode": True,
        "modules_to_save": None,
    }


def test_adapters_are_added_before_weights_are_rounded(run):
    """Those of BF16 are the sum of the rounded base and the adapter's FP32 product, rounded once."""
    name, base, trainer = run
    a, b = (
        np.asarray(trainer.state.params[f"blocks.dense.attention.query_lora_{which}"], np.float64)[1] for which in "ab"
    )
    change = 6.0 / 2 * a @ b.reshape(len(b), -1)
    plain, found = (
        np.asarray(model.weights.layers[1]["attention.qkv"], np.float64)[:, : change.shape[1]]
        for model in (from_hf(base, dtype="bfloat16"), load_run(trainer.run_dir, dtype="bfloat16"))
    )
    np.testing.assert_allclose(found, plain + change, rtol=2**-8, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("run", ["tiny_gpt2"], indirect=True)
def test_another_base_and_adapters_as_a_base_are_refused(run, tmp_path):
    name, base, trainer = run
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(base / SINGLE)
    tensors[next(name for name in tensors if name.endswith("1.mlp.c_fc.weight"))][3, 4] += 1
    save_file(tensors, other / SINGLE)
    (other / "config.json").write_text((base / "config.json").read_text())
    changed = make_config(other, trainer.run_dir, name, f"checkpoint.init_from={other}")
    with pytest.raises(InputError, match=r"has other weights than the base of the adapters in .*: set it to the same"):
        Trainer(changed, devices=jax.devices()[:2]).state  # noqa: B018
    for compute, refusal in (("float32", pytest.raises(InputError)), ("bfloat16", nullcontext())):
        with refusal:  # a base in another dtype has other bits
            trainer.saver.compare_base({"precision": {"compute": compute}, "base": 1}, "a checkpoint")
    on_top = make_config(base, tmp_path / "run", name, f"checkpoint.init_from={trainer.run_dir}")
    with pytest.raises(InputError, match=r"has adapters only: write the merged model with python -m megajax.hf export"):
        Trainer(on_top, devices=jax.devices()[:2])
    with pytest.raises(InputError, match=r"adapters only \(lora.rank=2\).* compare the losses of both .*evaluate"):
        compare(base, str(trainer.run_dir))
    with pytest.raises(InputError, match=r"with other settings: restore them.*\n  lora.rank=2, but this run has 4"):
        Trainer(make_config(base, trainer.run_dir, name, "lora.rank=4"), devices=jax.devices()[:2])


@pytest.mark.parametrize("run", ["tiny_gpt2"], indirect=True)
def test_adapters_that_cannot_be_written_or_merged_are_sentences(run, tmp_path):
    _, base, trainer = run
    config, folder = trainer.config, trainer.run_dir
    [step] = (int(path.name) for path in (folder / SUBDIRECTORY).iterdir() if path.name.isdigit())

    def changed(section: str, **values):
        return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})

    tower = VisionConfig.model_validate({"image_token": 9, "num_layers": 1, "hidden_size": 8, "num_heads": 2})
    for other, sentence in (
        (changed("lora", rank=None), r"has no adapters \(lora.rank=null\): write its weights with the command export"),
        (
            changed("model", vision=tower),
            r"reads images \(model.vision\): write its merged weights with the",
        ),
    ):
        with pytest.raises(InputError, match=f"RUN={folder} {sentence}"):
            adapters.export_adapters(folder, step, other, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    tokens = config.model.vocab_size
    with pytest.warns(
        UserWarning, match=rf"vocab_size={tokens}, but this run has {tokens + 1}.*with the command export"
    ):
        adapters.export_adapters(folder, step, changed("model", vocab_size=tokens + 1), tmp_path / "out")
    named = changed("checkpoint", init_from=base.name)  # beside the run, not in the current directory
    with adapters.open_merged(folder, step, named) as found, adapters.open_merged(folder, step, config) as expected:
        np.testing.assert_array_equal(found["final_norm"][()], expected["final_norm"][()])
    other = changed("checkpoint", init_from=str(folder))  # a run with adapters only
    sentence = f"checkpoint.init_from={folder} .* is not the adapters' base: restore the base"
    with pytest.raises(InputError, match=sentence), adapters.open_merged(folder, step, other):
        pass


def test_peft_has_each_layer_of_a_model_with_dense_and_moe_layers_once(tmp_path, monkeypatch):
    with zipfile.ZipFile(FILES / "tiny_qwen3_moe_mixed.zip") as archive:
        archive.extractall(tmp_path / "base")
    config = make_config(tmp_path / "base", tmp_path / "run", "tiny_llama", "lora.targets=[output, up]")
    rng = np.random.default_rng(0)
    declared = parameters(Transformer(config.model, config.lora))
    weights = {n: rng.normal(size=p.shape).astype(np.float32) for n, p in declared.items() if is_adapter(n)}
    monkeypatch.setattr(adapters, "open_weights", lambda path: weights)
    adapters.export_adapters(tmp_path / "run", 1, config, tmp_path / "peft")
    peft = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    dense, moe = (block_layers(config.model)[kind] for kind in ("dense", "moe"))
    modules = [f"{layer}.self_attn.o_proj" for layer in (*dense, *moe)] + [f"{layer}.mlp.up_proj" for layer in dense]
    names = {f"base_model.model.model.layers.{m}.lora_{which}.weight" for m in modules for which in "AB"}
    assert peft.keys() == names and dense and moe
    found = peft[f"base_model.model.model.layers.{moe[-1]}.self_attn.o_proj.lora_A.weight"]
    a = weights["blocks.moe.attention.output_lora_a"][-1]  # [N, H, rank]
    np.testing.assert_array_equal(found, a.reshape(-1, 2).T)

    weights["objective.score"] = rng.normal(size=(config.model.hidden_size, 3)).astype(np.float32)
    adapters.export_adapters(tmp_path / "run", 1, config, tmp_path / "classifier")
    classifier = load_file(tmp_path / "classifier" / "adapter_model.safetensors")
    score = classifier.pop("base_model.model.score.weight")
    np.testing.assert_array_equal(score.T, weights["objective.score"])
    settings = json.loads((tmp_path / "classifier" / "adapter_config.json").read_text())
    assert classifier.keys() == names
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    weights["objective.other"] = weights.pop("objective.score")
    with pytest.warns(UserWarning, match="has parameters of objective.kind=.* are not written: .*megajax.load_weights"):
        adapters.export_adapters(tmp_path / "run", 1, config, tmp_path / "without_head")


# Of each module of a layer the weights here, in the order of its outputs, and the factor of each in transformers.
MAMBA = ("mamba2.gate", "mamba2.value", "mamba2.key", "mamba2.query")
ATTENTION = {f"{own[0]}_proj": {f"attention.{own}": 1.0} for own in ("query", "key", "value")}
WITH_MULTIPLIERS = {
    "tiny_granite_dense": ATTENTION
    | {"in_proj": dict.fromkeys(MAMBA, 1.0), "input_linear": {"mlp.gate": 1.0, "mlp.up": 1.0}}
    | {"o_proj": {"attention.output": 0.375}, "out_proj": {"mamba2.output": 0.375}}
    | {"output_linear": {"mlp.down": 0.375}},
    "tiny_falcon_h1": {
        "q_proj": {"attention.query": 0.75},
        "k_proj": {"attention.key": 0.75 * 0.5},
        "v_proj": {"attention.value": 0.75},
        "o_proj": {"attention.output": 1.5},
        "in_proj": {own: 1.25 * factor for own, factor in zip(MAMBA, (0.5, 1.5, 0.75, 1.25), strict=True)},
        "out_proj": {"mamba2.output": 0.375},
        "gate_proj": {"mlp.gate": 0.75},
        "up_proj": {"mlp.up": 1.0},
        "down_proj": {"mlp.down": 0.625},
    },
}


@pytest.mark.parametrize("name", WITH_MULTIPLIERS)
def test_with_multipliers_peft_adds_what_the_run_adds(tmp_path, monkeypatch, name):
    """The weights here contain the multipliers; transformers applies them to what PEFT adds too."""
    with zipfile.ZipFile(FILES / f"{name}.zip") as archive:
        archive.extractall(tmp_path / "base")
    config = make_config(tmp_path / "base", tmp_path / "run", "tiny_llama", "lora.targets=null")
    rng, declared = np.random.default_rng(0), parameters(Transformer(config.model, config.lora))
    weights = {n: rng.normal(size=p.shape).astype(np.float32) for n, p in declared.items() if is_adapter(n)}
    monkeypatch.setattr(adapters, "open_weights", lambda path: weights)
    adapters.export_adapters(tmp_path / "run", 1, config, tmp_path / "peft")
    peft = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    seen = set[str]()
    for kind, layers in block_layers(config.model).items():
        for row, layer in enumerate(layers):
            for module, parts in WITH_MULTIPLIERS[name].items():
                own = {part: [weights.get(f"blocks.{kind}.{part}_lora_{end}") for end in "ab"] for part in parts}
                if any(a is None for a, _ in own.values()):
                    continue
                [key] = [key for key in peft if f".{layer}." in key and key.endswith(f".{module}.lora_A.weight")]
                added = (peft[key.replace("lora_A", "lora_B")] @ peft[key]).T  # [in, out]
                expected = [a[row].reshape(-1, 2) @ b[row].reshape(2, -1) / parts[part] for part, (a, b) in own.items()]
                expected = np.concatenate(expected, axis=1)
                np.testing.assert_allclose(added[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-5, err_msg=key)
                assert not added[:, expected.shape[1] :].any()  # steps of Mamba have no adapters
                seen |= {key, key.replace("lora_A", "lora_B")}
    assert seen == peft.keys()
