"""`megajax generate RUN_OR_HF_FOLDER --prompt TEXT`: text from a run or a model in Hugging Face's format."""

import json
import sys
from collections.abc import Sequence

from megajax.command_parser import CommandParser
from megajax.console import add_model_arguments, add_sampling_arguments, user_errors
from megajax.errors import InputError
from megajax.runtime import accept_missing_cuda


def generate(options) -> None:
    """Load the model, continue the prompts and print them; `options` are those of the parser below.

    One prompt is printed with its continuation as it grows, of a chat, or with an encoder, only the answer; several as
    JSON lines {"prompt", "text"} at the end. Counts of verified drafts follow on stderr.
    """
    from megajax.data.rendering import Chat
    from megajax.inference.generation import continue_texts, generator
    from megajax.inference.load import load_chosen
    from megajax.inference.prompts import Located, as_chat, chosen_arguments, encode_prompt, read_prompts, with_images
    from megajax.inference.sampling import chosen_sampling

    sampling = chosen_sampling(options)
    if options.prompts is None:
        prompts = [Located(with_images(options.prompt or "", options.image))]
    elif options.image:
        raise InputError("--image belongs to --prompt: name the pictures of --prompts in its lines.")
    else:
        prompts = read_prompts(options.prompts)
    if options.chat or options.system is not None:
        prompts = [each._replace(prompt=as_chat(each.prompt, options.system)) for each in prompts]
    given = chosen_arguments(options)
    model = load_chosen(options, options.speculate)
    encoded = [encode_prompt(model, each, given) for each in prompts]
    alone = options.prompts is None
    if alone and not isinstance(prompts[0].prompt, Chat) and model.config.of_encoder is None:
        print(encoded[0][0], end="", flush=True)

    def show(text: str) -> None:
        print(text, end="", flush=True)

    found = continue_texts(
        model,
        [tokens for _, tokens in encoded],
        options.tokens,
        sampling,
        stop=options.stop,
        seed=options.seed,
        on_text=show if alone else None,
    )
    if alone:
        print()
    else:
        for (prompt, *_), text in zip(prompts, found, strict=True):
            asked = prompt.messages if isinstance(prompt, Chat) else getattr(prompt, "prompt", prompt)
            print(json.dumps({"prompt": asked, "text": text}, ensure_ascii=False))
    used = generator(model, sampling)
    if cut := used.explain_cut(options.tokens):
        print(cut, file=sys.stderr)
    if used.verified:
        print(used.verified.explain(), file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Print continuations of prompts; returns the exit status."""
    parser = CommandParser("megajax.generate", description="Continue text with a trained model.")
    add_model_arguments(parser)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="text to continue, or with --chat the message to answer")
    given.add_argument(
        "--prompts",
        metavar="FILE",
        help='texts, one per line; .jsonl, .json, .parquet: {"prompt": TEXT}, {"messages": [...]} or another form of'
        " chats, whose answer at the end is left out",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="picture before the prompt, or where it has <image>; may be given several times",
    )
    parser.add_argument("--chat", action="store_true", help="prompts are messages: answer them by the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of chats that have none; implies --chat")
    add_sampling_arguments(parser, tokens=100)
    with user_errors():
        options = parser.parse_args(argv)
        accept_missing_cuda()
        generate(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
