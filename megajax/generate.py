"""`python -m megajax.generate RUN_OR_HF_FOLDER --prompt TEXT`: text from a run or a model in Hugging Face's format."""

import json
import sys
from collections.abc import Sequence
from functools import cache

from megajax.console import CommandParser, add_model_arguments, user_errors
from megajax.errors import InputError
from megajax.runtime import accept_missing_cuda


def generate(options) -> None:
    """Load the model, continue the prompts and print them; `options` are those of the parser below.

    One prompt is printed with its continuation as it grows; several as JSON lines {"prompt", "text"} at the end. Counts
    of verified drafts follow on stderr.
    """
    from megajax.data.chat_template import load_chat_template
    from megajax.inference.generation import continue_texts, generator
    from megajax.inference.load import load_chosen
    from megajax.inference.prompts import read_prompts
    from megajax.inference.sampling import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    sampling.check()
    prompts = [options.prompt] if options.prompts is None else read_prompts(options.prompts)
    model = load_chosen(options, options.speculate)
    template = cache(lambda: load_chat_template(model.folder))  # read once, if any prompt is a chat
    texts = [p if isinstance(p, str) else template().render(p, True) for p in prompts]
    tokens = [
        model.encode(text, special_tokens=isinstance(prompt, str)) for text, prompt in zip(texts, prompts, strict=True)
    ]
    alone = options.prompts is None
    if alone:
        print(texts[0], end="", flush=True)

    def show(text: str) -> None:
        print(text, end="", flush=True)

    found = continue_texts(
        model,
        tokens,
        options.tokens,
        sampling,
        stop=options.stop,
        seed=options.seed,
        on_text=show if alone else None,
    )
    if alone:
        print()
    else:
        for prompt, text in zip(prompts, found, strict=True):
            print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
    if verified := generator(model, sampling).verified:
        print(verified.sentence(), file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Print continuations of prompts; returns the exit status."""
    parser = CommandParser("megajax.generate", description="Continue text with a trained model.")
    add_model_arguments(parser)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="text to continue")
    given.add_argument(
        "--prompts", metavar="FILE", help='texts, one a line; .jsonl: {"prompt": TEXT} or {"messages": [...]} a line'
    )
    parser.add_argument("--tokens", type=int, default=100, help="largest number of new tokens (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="choose among this many likely tokens (default: 0, all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="and among those of this probability (default: 1)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="and at least this share of the likeliest (default: 0)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument(
        "--speculate",
        type=int,
        default=0,
        metavar="N",
        help="draft N tokens in each step with the multi-token prediction modules (default: 0, none)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    with user_errors():
        options = parser.parse_args(argv)
        if options.tokens < 1:
            raise InputError(f"--tokens={options.tokens} is not a positive number: give at least 1.")
        if options.seed < 0:
            raise InputError(f"--seed={options.seed} is not a number of 0 or more: give one such as 0.")
        accept_missing_cuda()
        generate(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
