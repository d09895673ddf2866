"""Formats of models from elsewhere: config.json of each family, weights, quantised weights."""

import json
import zipfile
from pathlib import Path

from dev.fuzz.subject import Packing, Subject, headed

TINY = Path(__file__).parents[2] / "tests" / "data_files"


def unpacked(folder: Path, names: list[str]) -> list[Path]:
    """Folders of tiny models of the tests, with these names."""
    for name in names:
        with zipfile.ZipFile(TINY / f"{name}.zip") as archive:
            archive.extractall(folder / name)
    return [folder / name for name in names]


def family_configs(folder: Path) -> Subject:
    """config.json of each family, read as `checkpoint.init_from` and `megajax hf import` do."""
    from megajax.config import ModelConfig
    from megajax.hf.convert import read_folder
    from megajax.hf.importing import _config

    names = sorted(path.stem for path in TINY.glob("tiny_*.zip"))
    folders = unpacked(folder, names)

    def read(path: Path) -> None:
        ModelConfig.model_validate(read_folder(path.parent)[1])
        _config(path.parent, folder / "run")

    words = (b'"yarn"', b'"llama3"', b'"rope_type"', b'"text_config"', b'"fp8"', b'"linear"', b'"full_attention"')
    return Subject([each / "config.json" for each in folders], read, words=words)


def weights(folder: Path) -> Subject:
    """safetensors, one file or several with an index, read whole."""
    from safetensors.numpy import load_file, save_file

    from megajax.config import ModelConfig
    from megajax.hf.convert import open_readers, read_folder
    from megajax.model import Transformer, parameters

    single, sharded = unpacked(folder, ["tiny_llama", "tiny_qwen3_moe_mixed"])
    tensors = load_file(sharded / "model.safetensors")
    shards = [dict(list(tensors.items())[i::2]) for i in range(2)]
    files = [single / "model.safetensors"]
    named: dict[str, str] = {}
    for i, shard in enumerate(shards):
        files.append(sharded / f"model-{i}.safetensors")
        save_file(shard, files[-1])
        named |= dict.fromkeys(shard, files[-1].name)
    (sharded / "model.safetensors").unlink()
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": named}), encoding="utf-8")
    models = {each: ModelConfig.model_validate(read_folder(each)[1]) for each in (single, sharded)}
    shapes = {e: {n: p.shape for n, p in parameters(Transformer(models[e])).items()} for e in models}

    def read(path: Path) -> None:
        own = path.parent
        read_folder(own)
        with open_readers(own, models[own], shapes[own], "HF_FOLDER") as readers:
            for reader in readers.values():
                for _, _, block in reader.blocks():
                    block.sum()

    packed: dict[Path, Packing] = {file: headed() for file in files}
    return Subject([*files, index], read, packed)


def quantised(folder: Path) -> Subject:
    """FP8 weights with the scales of blocks, read tensor by tensor."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from megajax.hf.folder import FolderTensors, read_config

    values = np.ones((40, 24), ml_dtypes.float8_e4m3fn)
    tensors = {"model.a.weight": values, "model.a.weight_scale_inv": np.ones((3, 2), np.float32)}
    tensors |= {"lm_head.weight": np.ones((8, 4), ml_dtypes.bfloat16)}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    quantisation = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    config = folder / "config.json"
    config.write_text(json.dumps({"model_type": "deepseek_v3", "quantization_config": quantisation}), encoding="utf-8")

    def read(_: Path) -> None:
        with FolderTensors(folder, read_config(folder).get("quantization_config")) as weights:
            for name in weights.files:
                shape = weights.shape(name)
                weights.itemsize(name)
                weights.read(name, tuple(slice(0, size) for size in shape)).sum()

    return Subject([folder / "model.safetensors", config], read, {folder / "model.safetensors": headed()})
