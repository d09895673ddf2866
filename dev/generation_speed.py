"""The speed of generation beside the limit of the memory's bandwidth, for a named model with random weights.

    python dev/generation_speed.py configs/models/llama3_8b.yaml --batch 1 64 --prompt 128 --tokens 256

Each token reads all weights but the embedding's table, and the cache: bytes / bandwidth is the shortest time of a
decode step. Prints a table; needs a GPU to be of any use.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from megajax import build_mesh, load_config
from megajax.inference.generation import Generator
from megajax.inference.language_model import LanguageModel
from megajax.inference.sampling import Sampling
from megajax.inference.weights import abstract_parameters
from megajax.model import Transformer

OVERRIDES = ["data.kind=synthetic", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "mesh.pipeline=1"]


def random_model(path: str, length: int) -> LanguageModel:
    """The model of a config with random BF16 weights on one device."""
    config = load_config(path, [*OVERRIDES, f"batch.sequence_length={length}"])
    mesh = build_mesh({}, jax.devices()[:1])

    def random(i: int, shape: jax.ShapeDtypeStruct) -> jax.Array:
        draw = jax.jit(lambda key: (jax.random.normal(key, shape.shape, shape.dtype) * 0.02).astype(shape.dtype))
        return draw(jax.random.key(i))

    shapes = abstract_parameters(Transformer(config.model), mesh, jnp.bfloat16)
    params = {name: random(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    return LanguageModel(config, params, {}, mesh)


def measure(model: LanguageModel, batch: int, prompt: int, tokens: int, bandwidth: float) -> str:
    """A line of the table: prefill seconds, decode milliseconds a step, tokens/s, share of the bandwidth."""
    generator = Generator(model, Sampling(temperature=0))
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, prompt)).tolist()

    def seconds(count: int) -> float:
        start = time.perf_counter()
        assert sum(map(len, [*generator.tokens(prompts, count)][-1])) == batch * count
        return time.perf_counter() - start

    # The same programs for both counts: lengths are rounded up to multiples of 64.
    seconds(tokens)
    few = tokens - 63
    first, whole = min(seconds(few) for _ in range(3)), min(seconds(tokens) for _ in range(3))
    step = (whole - first) / (tokens - few)
    weights = sum(a.nbytes for layer in model.weights.layers for a in layer.values())
    weights += sum(a.nbytes for name, a in model.weights.outer.items() if name != "embedding.tokens")
    if model.config.tie_embeddings:
        weights += model.weights.outer["embedding.tokens"].nbytes
    c, slots = model.config, prompt + tokens
    cache = 2 * c.num_layers * batch * slots * c.num_kv_heads * c.head_dim * 2
    limit = (weights + cache) / (bandwidth * 1e12)
    return (
        f"| {batch} | {prompt} + {tokens} | {whole - step * (tokens - 1):.3f} | {1e3 * step:.2f} | "
        f"{1e3 * limit:.2f} | {batch / step:,.0f} | {limit / step:.0%} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--bandwidth", type=float, default=4.2, help="TB/s that the GPU's memory reaches")
    options = parser.parse_args()
    model = random_model(options.config, options.prompt + options.tokens + 128)
    print(f"{options.config}, {jax.devices()[0].device_kind}, jax {jax.__version__}, {model.kernels.attention}")
    print("| batch | tokens | prefill s | step ms | limit ms | tokens/s | of the bandwidth |")
    print("|---|---|---|---|---|---|---|")
    for batch in options.batch:
        print(measure(model, batch, options.prompt, options.tokens, options.bandwidth), flush=True)
