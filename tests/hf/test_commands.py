"""`python -m megajax.hf`: import, export, compare and plan, and each mistake as a sentence."""

import json
import math
import re
import resource
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import megajax
from megajax import generate
from megajax.checkpoint.weights import run_config
from megajax.config import ModelConfig, load_config
from megajax.config.checks import check_mesh
from megajax.errors import InputError
from megajax.hf import compare as comparison
from megajax.hf import importing, reader
from megajax.hf.__main__ import main
from megajax.hf.convert import read_folder, read_model
from megajax.hf.folder import INDEX, SINGLE, FolderTensors
from megajax.hf.plan import plan, shards
from megajax.hf.reader import unpadded
from megajax.hf.tensors import tensor_names
from megajax.inference.generation import check_decoding
from megajax.mesh import build_mesh
from megajax.model import Transformer, parameters
from megajax.sharding import place_all, stored_rows, unpadded_spec
from megajax.sources import find_source
from megajax.training.loop import Trainer
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

FILES = Path(__file__).parents[1] / "data_files"
RUN = """
run: {steps: 1}
batch: {global_size: 32, sequence_length: 16, num_microbatches: 4}
data: {kind: synthetic}
logging: {tensorboard: false}
"""


def add_tokenizer(folder: Path) -> Path:
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "<|im_end|>": 3, "</s>": 4}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "bos_token": "a"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def with_tokenizer(unpack):
    """A folder that transformers wrote, by its name, with a tokenizer."""
    return lambda name: add_tokenizer(unpack(name))


@pytest.fixture(scope="module")
def imported_once(tmp_path_factory):
    """A directory with `tiny_llama` and what was imported from it, `run`."""
    directory = tmp_path_factory.mktemp("imported")
    with zipfile.ZipFile(FILES / "tiny_llama.zip") as archive:
        archive.extractall(directory / "tiny_llama")
    assert main(["import", str(add_tokenizer(directory / "tiny_llama")), str(directory / "run")]) == 0
    return directory


@pytest.fixture
def imported(imported_once, tmp_path):
    """(folder, run directory) of tiny_llama, imported; a copy, in whose config its own path is."""
    shutil.copytree(imported_once, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run/config.yaml"
    config.write_text(config.read_text().replace(str(imported_once), str(tmp_path)))
    return tmp_path / "tiny_llama", tmp_path / "run"


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensor(folder: Path, name: str, change) -> None:
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {name: change(tensors[name])}, folder / SINGLE)


def error_of(capsys, *arguments, lines: int = 1) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == lines
    return captured.err


def visible(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_an_import_computes_in_the_dtype_of_the_folder_by_either_name(with_tokenizer, tmp_path):
    folder = with_tokenizer("tiny_mixtral")
    for dtype in ("float32", "bfloat16"):
        for names in ({"dtype": dtype, "torch_dtype": None}, {"dtype": None, "torch_dtype": dtype}):
            change_json(folder / "config.json", **names)
            assert importing._config(folder, tmp_path / "run").precision.compute == dtype, names
            assert find_source(folder, "FOLDER").config().precision.compute == dtype, names  # its use without a run


def test_an_imported_run_has_the_weights_generates_and_starts_another_run(with_tokenizer, tmp_path, capsys):
    folder, run_dir = with_tokenizer("tiny_mixtral"), tmp_path / "run"
    beside = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    beside += ("added_tokens.json", "special_tokens_map.json", "tokenizer.model")
    for name in beside[3:]:  # which these tokenizers do not need
        (folder / name).write_text("{}")
    change_json(folder / "config.json", max_position_embeddings=65536, bos_token_id=1, eos_token_id=[3, 4])
    change_json(folder / "config.json", dtype="float32", torch_dtype="bfloat16")  # the first counts
    assert main(["import", str(folder), str(run_dir)]) == 0
    stored, found = dict(np.load(FILES / "tiny_mixtral.npz")), megajax.load_weights(run_dir)
    for parameter, array in found.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array[tuple(map(slice, stored[parameter].shape))], stored[parameter], parameter)

    config = run_config(run_dir, "RUN")
    assert config.data.end_of_document == "<|im_end|>" and config.batch.sequence_length == 65536
    assert config.run.name == "run"
    ours = comparison.run_logits(run_dir / "checkpoints/0", config.model, stored["tokens"])
    assert np.linalg.norm(ours - stored["logits"]) < 1e-5 * np.linalg.norm(stored["logits"])
    assert config.precision.compute == "float32"
    capsys.readouterr()
    assert generate.main([str(run_dir), "--prompt", "a b", "--tokens", "1", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("a b")

    other = tmp_path / "other.yaml"
    other.write_text(f"model: {json.dumps(config.model.model_dump(mode='json'))}\n{RUN}")
    trainer = Trainer(
        load_config(other, [f"checkpoint.init_from={run_dir}", f"run.dir={tmp_path / 'other'}"]), jax.devices()[:1]
    )
    trainer.save()
    trainer.close()
    for parameter, array in trainer.state.params.items():
        np.testing.assert_array_equal(array, found[parameter])

    # Tokenizer, settings for generation and ids of special tokens pass through both runs.
    (run_dir / "generation_config.json").unlink()
    shutil.copytree(run_dir / "checkpoints/0", run_dir / "checkpoints/7")  # a newer one
    for source, length in ((run_dir, 65536), (tmp_path / "other/checkpoints/0", 65536)):
        out = tmp_path / f"out-{source.name}"
        assert main(["export", str(source), str(out), *(["--step", "0"] if source == run_dir else [])]) == 0
        assert "wrote step 0 of " in capsys.readouterr().out
        written = json.loads((out / "config.json").read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (1, [3, 4])
        assert written["max_position_embeddings"] == length
        for file in beside:
            assert (out / file).read_bytes() == (folder / file).read_bytes()
    assert json.loads((tmp_path / "out-run/generation_config.json").read_text())["eos_token_id"] == [3, 4]
    assert (tmp_path / "out-0/generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()


def test_an_encoder_becomes_a_run_and_a_folder_but_writes_no_text(unpack, tmp_path):
    folder, run_dir, out = unpack("tiny_modernbert"), tmp_path / "run", tmp_path / "out"
    assert main(["import", str(folder), str(run_dir)]) == 0
    config, stored = run_config(run_dir, "RUN"), np.load(FILES / "tiny_modernbert.npz")
    assert config.objective.kind == "masked_tokens"
    ours = comparison.run_logits(run_dir / "checkpoints/0", config.model, stored["tokens"])
    assert np.linalg.norm(ours - stored["logits"]) < 1e-5 * np.linalg.norm(stored["logits"])
    assert main(["export", str(run_dir), str(out)]) == 0
    written, theirs = load_file(out / SINGLE), load_file(folder / SINGLE)
    assert written.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(written[name], tensor, name)
    with pytest.raises(InputError, match="generation needs model.causal=true: each token .* sees those after it"):
        check_decoding(megajax.load_run(run_dir))


def test_a_run_with_another_tokenizer_keeps_nothing_of_the_folder(imported, tmp_path):
    folder, run_dir = imported
    (tmp_path / "mine.json").write_text((folder / "tokenizer.json").read_text() + " ")
    config = run_config(run_dir, "RUN").to_yaml()
    (tmp_path / "c.yaml").write_text(config.replace(str(run_dir / "tokenizer.json"), str(tmp_path / "mine.json")))
    overrides = [f"checkpoint.init_from={folder}", f"run.dir={tmp_path / 'other'}", "batch.sequence_length=16"]
    trainer = Trainer(load_config(tmp_path / "c.yaml", overrides), jax.devices()[:1])
    trainer.save()
    trainer.close()
    assert not {"tokenizer_config.json", "hf_config.json", "chat_template.jinja"} & visible(tmp_path / "other")
    assert (tmp_path / "other/tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()


def test_the_config_of_a_classifier_says_that_its_head_is_not_read(imported, capsys):
    folder, _ = imported
    change_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert main(["config", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "architectures=LlamaForSequenceClassification" in printed.err and printed.out.startswith("model:\n")


def test_an_export_with_inputs_scales_that_the_run_does_not_have_is_told_the_other_formats(imported, tmp_path, capsys):
    _, run_dir = imported
    with pytest.raises(SystemExit):
        main(["export", str(run_dir), str(tmp_path / "out"), "--quantization", "fp8_tensor"])
    assert re.search("fp8_tensor .*recipe=delayed.*fp8_channel or fp8_block", capsys.readouterr().err)


def test_special_tokens_come_from_the_tokenizer_if_nothing_else_names_them(imported, tmp_path):
    _, run_dir = imported
    for name in ("hf_config.json", "generation_config.json"):
        (run_dir / name).unlink()
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    expected = {"bos_token_id": 1, "eos_token_id": 3}
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == expected
    expected |= {"model_type": "llama"}
    assert expected.items() <= json.loads((tmp_path / "out/config.json").read_text()).items()
    of_text = {"max_position_embeddings": 9999, "model_type": "mistral"}  # of families with the same model
    kept = {"bos_token_id": None, "eos_token_id": 2, "text_config": of_text}
    (run_dir / "hf_config.json").write_text(json.dumps(kept))
    (run_dir / "generation_config.json").write_text('{"bos_token_id": 4}')
    assert main(["export", str(run_dir), str(tmp_path / "out3")]) == 0
    expected = {"bos_token_id": 4, "eos_token_id": [3, 2], **of_text}
    assert expected.items() <= json.loads((tmp_path / "out3/config.json").read_text()).items()
    for name in ("hf_config.json", "generation_config.json", "tokenizer_config.json"):
        (run_dir / name).unlink()
    config = (run_dir / "config.yaml").read_text().replace("end_of_document: <|im_end|>", "end_of_document: null")
    (run_dir / "config.yaml").write_text(config)
    assert main(["export", str(run_dir), str(tmp_path / "out2")]) == 0
    assert json.loads((tmp_path / "out2/generation_config.json").read_text()) == {"eos_token_id": 4}


@pytest.mark.smoke
def test_numbers_that_are_nan_on_both_sides_are_equal():
    found, ours = comparison.TensorDifference("w", (4,), "float32"), np.float32([np.nan, np.inf, 1, 2])
    found.add(ours, ours + np.float32([0, 0, 0, 0.5]))
    assert (found.unequal, found.absolute, found.relative) == (1, 0.5, pytest.approx(0.2))


def test_compare_tells_rounding_from_differences(imported, tmp_path, capsys, small_pieces):
    folder, run_dir = imported
    assert main(["compare", str(folder), str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 32 and lines[-1].startswith(f"30 tensors of {folder} and {run_dir} are the same")
    assert lines[-1].endswith("largest difference 0")

    assert main(["export", str(run_dir), str(tmp_path / "bf16"), "--dtype", "bfloat16"]) == 0
    written = json.loads((tmp_path / "bf16/config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"  # transformers 5 reads the first, 4 the second
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "bf16"), str(run_dir)]) == 0
    assert "are the same in the folder's dtype; largest difference 0.00" in capsys.readouterr().out
    name = "model.layers.2.mlp.down_proj.weight"
    weights = load_file(folder / SINGLE)[name]
    rounded = weights.astype(ml_dtypes.bfloat16).astype(np.float32)
    differences = {d.name: d for d in comparison.compare(tmp_path / "bf16", str(run_dir))}
    assert differences[name].absolute == np.abs(weights - rounded).max() > 0
    nonzero = rounded != 0
    expected = np.abs(weights - rounded)[nonzero] / np.abs(rounded)[nonzero]
    assert differences[name].relative == pytest.approx(expected.max())

    changed = weights.copy()
    changed[1, 2], changed[3, 4] = np.nan, weights[3, 4] + 0.5
    change_tensor(folder, name, lambda _: changed)
    assert main(["compare", str(folder), str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert f"{name}  [48x80] float32  inf  inf  2 unequal numbers" in out and "1 of 30 tensors" in out
    change_tensor(folder, name, lambda _: np.where(np.isnan(changed), weights, changed))
    found = {d.name: d for d in comparison.compare(folder, str(run_dir))}[name]
    assert (found.absolute, found.unequal) == (pytest.approx(0.5), 1)
    of_small_numbers = replace(found, name="norm", absolute=0.1, relative=found.relative + 1)
    assert comparison.summary([of_small_numbers, found], folder, "RUN").endswith(f"largest difference 0.5, of {name}")


def test_logits_are_compared_with_those_of_transformers(imported, monkeypatch):
    folder, run_dir = imported
    stored = np.load(FILES / "tiny_llama.npz")
    tokens, logits = stored["tokens"], stored["logits"]
    monkeypatch.setattr(comparison, "_their_logits", lambda folder, _: logits)
    monkeypatch.setattr(comparison, "run_logits", lambda *_, run=comparison.run_logits: run(*_[:2], tokens))
    line = comparison.compare_logits(folder, str(run_dir))
    assert "the same likeliest token for 34 of 32" in line  # two stored sequences of 17 tokens
    assert float(line.split("= ")[1].split(",")[0]) < 1e-5


def test_the_difference_of_logits_is_relative_to_the_folders(imported, monkeypatch):
    """Two tokens: of (3, 4, 0) and (0, 0, 12) the run has (3, 0, 0) and (0, 13, 12): norms √(16 + 169) and 13."""
    folder, run_dir = imported
    theirs, ours = np.array([[[3.0, 4, 0], [0, 0, 12]]]), np.array([[[3.0, 0, 0], [0, 13, 12]]])
    monkeypatch.setattr(comparison, "_their_logits", lambda *_: theirs)
    monkeypatch.setattr(comparison, "run_logits", lambda *_: ours)
    line = comparison.compare_logits(folder, str(run_dir), 2)
    apart = f"{185**0.5 / 13:.3g}"
    assert line.startswith(f"logits of 2 tokens: ||run - folder|| / ||folder|| = {apart}, largest difference 13, ")
    assert line.endswith("the same likeliest token for 0 of 2")


# The plan


PLANNED = [("tiny_mixtral", {"expert": 2, "tensor": 2, "pipeline": 2})]
PLANNED += [pytest.param("tiny_deepseek_v3", {"fsdp": 4, "tensor": 2}, marks=pytest.mark.long)]


@pytest.mark.parametrize(("name", "mesh"), PLANNED, ids=str)
def test_the_plan_counts_what_reading_reads(with_tokenizer, tmp_path, monkeypatch, small_pieces, capsys, name, mesh):
    """On eight devices of one process; and the shards of a plan are those of jax."""
    folder = with_tokenizer(name)
    assert main(["config", str(folder)]) == 0
    path = tmp_path / "c.yaml"
    path.write_text(capsys.readouterr().out + RUN)
    config = load_config(path, [f"mesh.{axis}={size}" for axis, size in mesh.items()])
    sizes = check_mesh(config, 8)
    read, sizes_read = FolderTensors.read, []

    def note(self, name, slices):
        block = read(self, name, slices)
        sizes_read.append(block.nbytes)
        return block

    monkeypatch.setattr(FolderTensors, "read", note)
    monkeypatch.setattr(reader, "_with_piece", lambda shard, *_: shard)  # its numbers do not count here
    program = TrainProgram.build(config, build_mesh(sizes))
    weights = StateSaver(program).restore_weights(str(folder))[0]
    [planned] = plan(config, sizes, folder, 8)
    assert planned == (sum(sizes_read), len(sizes_read))

    declared = parameters(Transformer(config.model))
    placements = place_all(declared, sizes, stored_rows(config, sizes["pipeline"]), config.mesh.experts_over)
    for name, array in weights.items():
        spec = unpadded_spec(placements[name], sizes)
        expected = array.sharding.devices_indices_map(array.shape)
        ours = [*shards(spec, array.shape, sizes)]
        for device, bounds in zip(program.mesh.devices.flat, ours, strict=True):
            theirs = [slice(*s.indices(n)[:2]) for s, n in zip(expected[device], array.shape, strict=True)]
            assert list(bounds) == theirs, name

    arguments = [str(path), str(folder), "--devices", "8", "--per-process", "4"]
    assert main(["plan", *arguments, *(f"mesh.{axis}={size}" for axis, size in mesh.items())]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].startswith("2 processes of 4 devices: 0.0 GB, of a folder of")


def test_processes_read_what_all_have_whole_each(with_tokenizer, tmp_path, capsys):
    folder = with_tokenizer("tiny_mixtral")
    assert main(["config", str(folder)]) == 0
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out + RUN)
    config = load_config(tmp_path / "c.yaml", ["mesh.data=2"])
    sizes = check_mesh(config, 2)
    [together], apart = plan(config, sizes, folder, 2), plan(config, sizes, folder, 1)
    declared = parameters(Transformer(config.model))
    stored = place_all(declared, sizes)
    whole = sum(math.prod(shape.shape) for name, shape in declared.items() if not stored[name].storage_axes)
    assert sum(reads.size for reads in apart) - together.size == 4 * whole > 0  # FP32
    # A process has consecutive devices, here the two of a stage: it reads no layer of the other stage.
    config = load_config(tmp_path / "c.yaml", ["mesh.pipeline=2", "mesh.tensor=2", "batch.num_microbatches=2"])
    sizes = check_mesh(config, 4)
    [together], apart = plan(config, sizes, folder, 4), plan(config, sizes, folder, 2)
    layers = plan(config, check_mesh(config, 4) | {"tensor": 1}, folder, 1)
    assert [reads.size for reads in apart] == [reads.size for reads in layers]


LARGE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "mlp_only_layers": [0, 1, 2],
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def write_sparse_folder(folder: Path, config: dict) -> int:
    """A folder with the headers of all tensors in BF16, and holes instead of numbers; its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    family, section, _ = read_folder(folder)
    model = ModelConfig.model_validate(section)
    declared = parameters(Transformer(model))
    header, end, files = {}, 0, []
    for tensor in family.tensors(model):
        shape = unpadded(tensor.ours, declared[tensor.ours].shape, model)[tensor.stacked :]
        for name in tensor_names(tensor, model).values():
            theirs = tensor.their_shape(shape)
            start, end = end, end + 2 * int(np.prod(theirs))
            header[name] = {"dtype": "BF16", "shape": theirs, "data_offsets": [start, end]}
            if end > 10**11:
                files, header, end = [*files, (header, end)], {}, 0
    weight_map: dict[str, str] = {}
    for i, (content, length) in enumerate([*files, (header, end)]):
        text = json.dumps(content).encode()
        with (folder / f"model-{i:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + length)
        weight_map |= dict.fromkeys(content, f"model-{i:05d}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.long
def test_a_model_of_671_billion_parameters_is_planned_on_1024_devices(tmp_path):
    folder = tmp_path / "large"
    size = write_sparse_folder(folder, LARGE)
    assert size > 1.3e12
    path = tmp_path / "c.yaml"
    given = {
        "model": read_model(folder),
        "mesh": {"fsdp": 16, "expert": 64},
        "batch": {"global_size": 1024, "sequence_length": 4096},
        "data": {"kind": "synthetic"},
    }
    path.write_text(json.dumps(given))
    config = load_config(path)
    reads = plan(config, check_mesh(config, 1024, 128), folder, 8)
    assert len(reads) == 128
    total = sum(read.size for read in reads)
    assert size < total < 1.01 * size  # norms and routers are read by all
    assert max(reads).size < 1.01 * total / 128


# Mistakes


@pytest.fixture
def full_disk():
    """() → files of this process end at 20 kB from now on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_nothing(imported, full_disk, tmp_path, capsys):
    folder, run_dir = imported
    before = visible(tmp_path)
    full_disk()
    for arguments in (("import", folder, tmp_path / "new"), ("export", run_dir, tmp_path / "new")):
        sentence = error_of(capsys, *arguments)
        assert f"{tmp_path / 'new'} could not be written (File too large): free disk space there" in sentence
        assert visible(tmp_path) == before


@pytest.mark.smoke
def test_mistakes_are_sentences(imported, with_tokenizer, tmp_path, capsys, monkeypatch):
    folder, run_dir = imported
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed; to import it takes seconds
    assert f"{run_dir} exists: give a new folder, or remove it" in error_of(capsys, "import", folder, run_dir)
    assert f"{folder} exists: give a new folder, or remove it" in error_of(capsys, "export", run_dir, folder)
    assert "RUN_DIR=. exists: give a new folder" in error_of(capsys, "import", folder, ".")
    assert "has checkpoints of steps 0." in error_of(capsys, "export", run_dir, tmp_path / "o", "--step", 3)
    assert f"{run_dir}/config.json does not exist" in error_of(capsys, "import", run_dir, tmp_path / "new")
    config = tmp_path / "changed" / "config.json"
    shutil.copytree(folder, config.parent)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_key_value_heads": 4}))
    sentence = error_of(capsys, "import", config.parent, tmp_path / "new")
    assert f"{config} is of a model that no run has: model.num_kv_heads=4 does not divide" in sentence
    other = error_of(capsys, "compare", with_tokenizer("tiny_mistral"), run_dir, lines=5)  # one for each setting
    assert "HF_FOLDER=" in other and "was saved with other settings" in other and "hf config " in other
    assert "has no checkpoints: give the directory of a run" in error_of(capsys, "compare", folder, folder)
    needs = error_of(capsys, "compare", folder, tmp_path / "no_run", "--logits")  # said before anything is read
    assert "--logits needs torch and transformers (" in needs
    (tmp_path / "c.yaml").write_text((run_dir / "config.yaml").read_text())
    planning = ("plan", tmp_path / "c.yaml", folder)
    assert "--per-process=8 does not divide --devices=12" in error_of(capsys, *planning, "--devices", "12")
    assert "mesh.data=3 uses 3 of 4 devices" in error_of(capsys, *planning, "--devices", 4, "mesh.data=3")
    change_tensor(folder, "model.norm.weight", lambda a: a[1:].copy())
    for arguments in (("compare", folder, run_dir), ("import", folder, tmp_path / "new"), (*planning, "--devices", 1)):
        assert "model.norm.weight has the shape [47], but by config.json" in error_of(capsys, *arguments)
    assert "nothing" in error_of(capsys, "nothing") and not (tmp_path / "new").exists()
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0 and "import   write a run directory" in capsys.readouterr().out


def test_an_imported_run_is_not_resumed(imported):
    _, run_dir = imported
    with pytest.raises(megajax.InputError, match="has no optimizer state .*: set checkpoint.init_from=.* and another"):
        Trainer(run_config(run_dir, "RUN"), jax.devices()[:1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_export_has_each_dtype_of_weights_in_folders(tmp_path, capsys, dtype):
    """The run is missing, which is the error."""
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "nowhere"), str(tmp_path / "out"), "--dtype", dtype])
    assert "nowhere" in capsys.readouterr().err
