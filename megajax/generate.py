"""`python -m megajax.generate RUN_DIR --prompt TEXT`: a sample from the newest checkpoint of a run."""

import argparse
import sys
from pathlib import Path

from megajax.config import Config, load_config
from megajax.config.cli import user_errors
from megajax.data.tokenizers import load_tokenizer
from megajax.errors import InputError
from megajax.runtime import accept_missing_cuda


def generate(config: Config, prompt: str, num_tokens: int, temperature: float, seed: int) -> str:
    """`prompt` and up to `num_tokens` tokens after it, sampled on one device.

    Each token is computed from the whole text before it, cut to the model's sequence length: no key/value cache. Ends
    early at an end-of-document token. Temperature 0 takes the most likely token.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from megajax.checkpoint import restore_model
    from megajax.model import Transformer, bind, parameters
    from megajax.model.transformer import layer_state

    if config.data.tokenizer is None:
        raise InputError(f"{config.run.dir}/config.yaml names no data.tokenizer: text cannot be made without one.")
    tokenizer = load_tokenizer(config.data.tokenizer)
    # Without a capacity: what the text is padded with would take places.
    router = config.model.router.model_copy(update={"capacity_factor": None})
    model = Transformer(config.model.model_copy(update={"router": router}))
    device = SingleDeviceSharding(jax.devices()[0])

    def abstract(arrays):
        return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device) for n, a in arrays.items()}

    shapes = abstract(parameters(model)), abstract(layer_state(config.model))
    params, state = restore_model(config.run.dir, *shapes, config.model, "RUN_DIR")
    length = config.batch.sequence_length

    @jax.jit
    def next_token(params, state, tokens_s, count, key):
        logits = bind(model, params)(tokens_s[None], state=state)[0, count - 1]
        sampled = jax.random.categorical(key, logits / max(temperature, 1e-6))
        return sampled if temperature > 0 else jnp.argmax(logits)

    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise InputError(f"--prompt={prompt!r} has no tokens: give at least one character.")
    for i in range(num_tokens):
        window = tokens[-length:]
        padded = jnp.array(window + [0] * (length - len(window)), jnp.int32)
        token = int(next_token(params, state, padded, len(window), jax.random.fold_in(jax.random.key(seed), i)))
        if token == tokenizer.end_of_document:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)


def main(argv: list[str]) -> int:
    """Print a sample; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megajax.generate", description="Sample text from a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a megajax run")
    parser.add_argument("--prompt", required=True, help="text to go on from")
    parser.add_argument("--tokens", type=int, default=100, help="how many tokens at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    options = parser.parse_args(argv)
    with user_errors():
        path = Path(options.run_dir) / "config.yaml"
        if not path.exists():
            raise InputError(f"RUN_DIR={options.run_dir} holds no config.yaml: name the directory of a megajax run.")
        config = load_config(path, [f"run.dir={options.run_dir}"])
        accept_missing_cuda()
        print(generate(config, options.prompt, options.tokens, options.temperature, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
