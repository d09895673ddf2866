"""The speed of generation beside the limit of the memory's bandwidth, for named models with random weights.

    python dev/generation_speed.py configs/models/llama3_8b.yaml --batch 1 64 --prompt 128 --tokens 256

Each token reads all weights but the embedding's table and all caches, and reads and writes the states of recurrent
layers: bytes / bandwidth is the shortest time of a decode step. Prints a table; needs a GPU to be of any use.
"""

import argparse
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax import build_mesh, load_config
from megajax.inference.comm import LayerCache
from megajax.inference.generation import Generator, PaddedPrompts
from megajax.inference.language_model import LanguageModel
from megajax.inference.sampling import Sampling
from megajax.inference.weights import abstract_parameters
from megajax.model import Transformer
from megajax.tools.profile.trace import newest, read_files

OVERRIDES = [
    "data.kind=synthetic",
    "mesh.data=1",
    "mesh.fsdp=1",
    "mesh.tensor=1",
    "mesh.pipeline=1",
    "batch.global_size=1",
]


def random_model(path: str, length: int, overrides: list[str]) -> LanguageModel:
    """The model of a config with random BF16 weights on one device."""
    config = load_config(path, [*OVERRIDES, f"batch.sequence_length={length}", *overrides])
    mesh = build_mesh({}, jax.devices()[:1])

    @partial(jax.jit, static_argnums=(1, 2))
    def random(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return (jax.random.normal(key, shape, dtype) * 0.02).astype(dtype)

    shapes = abstract_parameters(Transformer(config.model), mesh, jnp.bfloat16)
    params = {name: random(jax.random.key(i), a.shape, a.dtype) for i, (name, a) in enumerate(shapes.items())}
    return LanguageModel(config, params, {}, mesh)


class Programs:
    """The compiled programs of a model for one number of sequences."""

    def __init__(self, model: LanguageModel, batch: int, prompt: int, tokens: int):
        self.model, self.batch = model, batch
        generator, room = Generator(model, Sampling(temperature=0)), tokens + 1
        prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, prompt)).astype(np.int32)
        self.prompts = PaddedPrompts(prompts, np.full(batch, prompt, np.int32), np.uint32(0))
        prefill = generator._prefill.lower(model.weights, self.prompts, size=prompt + tokens, room=room)
        self.start = jax.eval_shape(generator._prefill, model.weights, self.prompts, size=prompt + tokens, room=room)
        decode = generator._decode.lower(model.weights, self.start, self.ends(tokens))
        self.prefill, self.decode = prefill.compile(), decode.compile()

    def ends(self, count: int) -> np.ndarray:
        return np.full(self.batch, count, np.int32)

    def bytes_of_step(self) -> int:
        """Of the weights and caches that a step reads, and of the states that it also writes."""
        model = self.model
        weights = sum(a.nbytes for layer in model.weights.layers for a in layer.values())
        weights += sum(a.nbytes for name, a in model.weights.outer.items() if name != "embedding.tokens")
        if model.config.tie_embeddings:
            weights += model.weights.outer["embedding.tokens"].nbytes
        return weights + sum(_bytes(kept) * (1 if isinstance(kept, LayerCache) else 2) for kept in self.start.caches)

    def measure(self, prompt: int, tokens: int, bandwidth: float) -> str:
        """A line of the table: prefill seconds, decode milliseconds a step, tokens/s, share of the bandwidth."""
        firsts, steps, early = [], [], tokens // 4
        for _ in range(3):
            begin = time.perf_counter()
            progress = jax.block_until_ready(self.prefill(self.model.weights, self.prompts))
            firsts.append(time.perf_counter() - begin)
            progress = jax.block_until_ready(self.decode(self.model.weights, progress, self.ends(early)))
            begin = time.perf_counter()
            progress = jax.block_until_ready(self.decode(self.model.weights, progress, self.ends(tokens)))
            steps.append((time.perf_counter() - begin) / (tokens - early))
            assert (np.asarray(progress.count) == tokens).all()
        step, limit = min(steps), self.bytes_of_step() / (bandwidth * 1e12)
        return (
            f"| {self.batch} | {prompt} + {tokens} | {min(firsts):.3f} | {1e3 * step:.2f} | {1e3 * limit:.2f} | "
            f"{self.batch / step:,.0f} | {limit / step:.0%} |"
        )

    def kernels(self, count: int, tokens: int = 16) -> str:
        """The kernels of a decode step by their time, without their numbers: a line for each of the first `count`."""
        decode, weights = self.decode, self.model.weights
        progress = jax.block_until_ready(decode(weights, self.prefill(weights, self.prompts), self.ends(8)))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(decode(weights, progress, self.ends(8 + tokens)))
            found = read_files(newest(Path(folder)), Path(folder))
        times: dict[str, list[float]] = {}
        for kernel in found:
            times.setdefault(re.sub(r"[_.]?\d+", "", kernel.name), []).append(kernel.end - kernel.start)
        busy = sum(map(sum, times.values()))
        span = max(kernel.end for kernel in found) - min(kernel.start for kernel in found)
        lines = [f"batch {self.batch}: {span / tokens:.3f} ms a step, kernels {busy / tokens:.3f} ms"]
        for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:count]:
            lines.append(f"  {1e3 * sum(each) / tokens:8.1f} us in {len(each) / tokens:6.1f} of {name[:100]}")
        return "\n".join(lines)


def _bytes(kept: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", metavar="CONFIG")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of all configs")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--bandwidth", type=float, default=4.2, help="TB/s that the GPU's memory reaches")
    parser.add_argument("--kernels", type=int, default=0, help="number of a decode step's kernels that are listed")
    options = parser.parse_args()
    prompt, tokens = options.prompt, options.tokens
    for config in options.configs:
        model = random_model(config, prompt + tokens, options.set)
        kernels = f"{model.kernels.attention}, {model.kernels.linear_attention}"
        print(f"{config}, {jax.devices()[0].device_kind}, jax {jax.__version__}, {kernels}")
        print("| batch | tokens | prefill s | step ms | limit ms | tokens/s | of the bandwidth |")
        print("|---|---|---|---|---|---|---|", flush=True)
        with ThreadPoolExecutor() as pool:
            compiled = [*pool.map(lambda batch, model=model: Programs(model, batch, prompt, tokens), options.batch)]
        for programs in compiled:
            print(programs.measure(prompt, tokens, options.bandwidth), flush=True)
        for programs in compiled if options.kernels else ():
            print(programs.kernels(options.kernels), flush=True)


if __name__ == "__main__":
    main()
