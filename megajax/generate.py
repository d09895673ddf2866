"""`python -m megajax.generate RUN --prompt TEXT`: a sample from a run's newest checkpoint, or from a given one."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megajax.config import Config
from megajax.console import CommandParser, user_errors
from megajax.data.tokenizers import Tokenizer, end_of_document, load_tokenizer
from megajax.errors import InputError
from megajax.runtime import accept_missing_cuda

ARGUMENT = "RUN"  # the argument's name, in errors


def generate(
    run_or_checkpoint: str | Path, prompt: str, num_tokens: int = 100, temperature: float = 0.8, seed: int = 0
) -> str:
    """`prompt` and up to `num_tokens` tokens after it, sampled on one device.

    The weights are a run's newest checkpoint, or `RUN/checkpoints/STEP`. There is no key/value cache: each token is
    computed from the whole text before it, cut to the model's sequence length. Stops at an end-of-document token.
    Temperature 0 takes the most likely token. Raises InputError for an unusable checkpoint, tokenizer or prompt.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from megajax.checkpoint import find_checkpoint, restore_model
    from megajax.checkpoint.weights import run_config
    from megajax.model import Transformer, bind, parameters
    from megajax.model.block import layer_state

    run_dir, step = find_checkpoint(run_or_checkpoint, ARGUMENT)
    config = run_config(run_dir, ARGUMENT)
    tokenizer = find_tokenizer(config, run_dir)
    last, name = tokenizer.end_of_document, config.data.end_of_document
    if name is not None:
        last = end_of_document(tokenizer, str(config.data.tokenizer), name, f"data.end_of_document={name}")
    tokens = encode(tokenizer, prompt)
    # Without a capacity, because padding tokens would use it up.
    router = config.model.router.model_copy(update={"capacity_factor": None})
    model = Transformer(config.model.model_copy(update={"router": router}))
    device = SingleDeviceSharding(jax.devices()[0])

    def abstract(arrays):
        return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device) for n, a in arrays.items()}

    kept = {kind: abstract(own) for kind, own in layer_state(config.model).items()}
    shapes = abstract(parameters(model)), kept
    params, state = restore_model(str(run_dir / "checkpoints" / str(step)), *shapes, config.model, ARGUMENT)
    length = config.batch.sequence_length

    @jax.jit
    def next_token(params, state, tokens_s, count, key):
        logits = bind(model, params)(tokens_s[None], state=state)[0, count - 1]
        sampled = jax.random.categorical(key, logits / max(temperature, 1e-6))
        return sampled if temperature > 0 else jnp.argmax(logits)

    for i in range(num_tokens):
        window = tokens[-length:]
        padded = jnp.array(window + [0] * (length - len(window)), jnp.int32)
        token = int(next_token(params, state, padded, len(window), jax.random.fold_in(jax.random.key(seed), i)))
        if token == last:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)


def find_tokenizer(config: Config, run_dir: Path) -> Tokenizer:
    """The tokenizer of a run's training, independent of the current directory if the run has a copy.

    It is the run's copy `tokenizer.json` (or `.model`), else `data.tokenizer` relative to the current directory or to a
    directory above the run. Raises InputError if there is none, or if it does not fit the model.
    """
    spec = config.data.tokenizer
    if spec is None:
        raise InputError(f"{run_dir}/config.yaml has no data.tokenizer, so tokens cannot become text: add it.")
    if spec != "byte":
        copy = run_dir / f"tokenizer{Path(spec).suffix}"
        candidates = [copy, Path(spec), *(directory / spec for directory in run_dir.resolve().parents)]
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            raise InputError(
                f"data.tokenizer={spec} ({run_dir}/config.yaml) is neither in the current directory nor above the "
                f"run: copy the file to {copy}."
            )
        spec = str(found)
    tokenizer = load_tokenizer(spec)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise InputError(
            f"the tokenizer {spec} has {tokenizer.vocab_size} tokens, but the model has {config.model.vocab_size}: "
            f"copy the tokenizer of the training to {run_dir / f'tokenizer{Path(spec).suffix}'}."
        )
    return tokenizer


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's tokens; InputError if there are none."""
    try:
        tokens = tokenizer.encode(prompt)
    except UnicodeEncodeError:
        raise InputError(f"--prompt={prompt!r} is not UTF-8: write it in UTF-8.") from None
    if not tokens:
        raise InputError(f"--prompt={prompt!r} has no tokens: give at least one character.")
    return tokens


def main(argv: Sequence[str]) -> int:
    """Print a sample; returns the exit status."""
    parser = CommandParser("megajax.generate", description="Sample text from a run.")
    parser.add_argument("run", metavar=ARGUMENT, help="directory of a run, or RUN/checkpoints/STEP")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="largest number of new tokens (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    with user_errors():
        options = parser.parse_args(argv)
        for name in ("tokens", "temperature", "seed"):
            value = getattr(options, name)
            if value < 0 or not math.isfinite(value):
                raise InputError(
                    f"--{name}={value} is not a number of 0 or more: give one such as {parser.get_default(name)}."
                )
        accept_missing_cuda()
        print(generate(options.run, options.prompt, options.tokens, options.temperature, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
