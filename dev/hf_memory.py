"""The peak of host memory while a Hugging Face folder is read, on CPU devices.

    python dev/hf_memory.py [--devices N] [--layers L] [--shard-gb S]

Makes a folder of Llama 3.2 1B's shape (BF16, random numbers, in files of at most S GB) in a temporary directory, reads
it onto N CPU devices with fsdp=N in a process of its own, and prints that process's memory: before reading, its peak,
the devices' share (FP32 weights, which CPU devices keep in host memory too) and the rest. Memory is anonymous: mapped
files' cached pages are not counted.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from megajax.config import Config
from megajax.console import user_errors
from megajax.hf.convert import FAMILIES
from megajax.hf.folder import write_folder
from megajax.hf.reader import unpadded
from megajax.hf.tensors import tensor_names
from megajax.model import Transformer, parameters

READ = "--read"  # the argument of the process that reads


def config_for(layers: int, devices: int) -> Config:
    """Llama 3.2 1B's shape, with this number of layers."""
    model = {
        "num_layers": layers,
        "hidden_size": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "ffn_hidden_size": 8192,
        "vocab_size": 128256,
        "tie_embeddings": True,
    }
    return Config.model_validate(
        {
            "model": model,
            "mesh": {"fsdp": devices},
            "batch": {"global_size": devices, "sequence_length": 128},
            "data": {"kind": "synthetic"},
        }
    )


def tensors(config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """Random numbers for each tensor of the folder, in BF16."""
    declared, random = parameters(Transformer(config.model)), np.random.default_rng(0)
    for tensor in FAMILIES["llama"].tensors(config.model):
        shape = unpadded(tensor.ours, declared[tensor.ours].shape, config.model)[tensor.stacked :]
        for name in tensor_names(tensor, config.model).values():
            numbers = random.standard_normal(tensor.their_shape(shape), np.float32)
            yield name, numbers.astype(ml_dtypes.bfloat16)


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))


def read(folder: str, layers: int, devices: int) -> None:
    """Read the folder and print the memory."""
    import jax

    from megajax.mesh import build_mesh
    from megajax.training.saving import StateSaver
    from megajax.training.step import TrainProgram

    config = config_for(layers, devices)
    saver = StateSaver(TrainProgram.build(config, build_mesh({"fsdp": devices} | ONE, jax.devices())))
    jax.block_until_ready(jax.numpy.zeros(()))
    peak, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak.append(max(peak[-1], anonymous_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    weights = jax.block_until_ready(saver.restore_weights(folder)[0])
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    share = sum(array.nbytes for array in weights.values())
    before, top = peak[0], peak[-1]
    print(
        f"{devices} devices: before {before / 1e9:.2f} GB, peak {top / 1e9:.2f} GB, devices' share {share / 1e9:.2f} "
        f"GB, besides these {(top - before - share) / 1e9:.2f} GB; {seconds:.1f} s"
    )


ONE = dict.fromkeys(("pipeline", "data", "expert", "context", "tensor"), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="CPU devices (default: 8)")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model (default: 16)")
    parser.add_argument("--shard-gb", type=float, default=1.0, help="largest file (default: 1)")
    parser.add_argument(READ, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.read, options.layers, options.devices)
        return 0
    with user_errors(), tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "model"
        config = config_for(options.layers, options.devices)
        keys = {**FAMILIES["llama"].write(config.model), "dtype": "bfloat16"}
        write_folder(folder, keys, tensors(config), shard_bytes=int(options.shard_gb * 1e9))
        size = sum(path.stat().st_size for path in folder.iterdir())
        files = len([*folder.glob("*.safetensors")])
        print(f"{size / 1e9:.2f} GB in {files} files, the largest of at most {options.shard_gb:g} GB")
        flags = f"--xla_force_host_platform_device_count={options.devices}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        shape = ["--devices", str(options.devices), "--layers", str(options.layers)]
        return subprocess.run([sys.executable, __file__, READ, str(folder), *shape], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
