"""`megajax chat RUN_OR_HF_FOLDER`: a conversation with a model in the terminal."""

import sys
from collections.abc import Iterator, Sequence

from megajax.command_parser import CommandParser
from megajax.console import add_model_arguments, add_sampling_arguments, user_errors
from megajax.errors import InputError
from megajax.runtime import accept_missing_cuda

EXIT, RESET, PICTURE = "/exit", "/reset", "/image "
HELP = (
    f"{RESET} begins a new conversation, {PICTURE}FILE adds a picture to the next message, {EXIT} or Ctrl-D ends;"
    " Ctrl-C stops an answer; \\ at a line's end continues it"
)


def chat(options) -> None:
    """Load the model and answer each line of stdin as it comes; `options` are those of the parser below."""
    from megajax.inference.load import load_chosen
    from megajax.inference.sampling import chosen_sampling

    sampling = chosen_sampling(options)
    conversation = Conversation(load_chosen(options, options.speculate), sampling, options)
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{HELP}.", file=sys.stderr)
    for message in _messages(terminal):
        if message == EXIT:
            return
        if message == RESET:
            conversation.reset()
            continue
        try:
            if message.startswith(PICTURE):
                conversation.add_picture(message.removeprefix(PICTURE).strip(), PICTURE.strip())
            else:
                conversation.ask(message)
        except InputError as error:
            if not terminal:
                raise
            print(f"megajax: {error}{conversation.kept()} {RESET} begins a new conversation.", file=sys.stderr)


class Conversation:
    """A conversation with a model; answers are printed as they grow."""

    def __init__(self, model, sampling, options):
        from megajax.inference.prompts import chosen_arguments

        model.check_has_no_prefix("a conversation")
        self._model, self._sampling, self._options = model, sampling, options
        self._arguments, self._count = chosen_arguments(options), 0
        self.pictures: list[str] = []  # of the next message
        self.reset()
        for name in options.image:
            self.add_picture(name, "--image")

    def add_picture(self, name: str, location: str) -> None:
        """Add a picture to the next message. Raises InputError, with `location`, for one that cannot be used."""
        from megajax.data.pictures import Picture
        from megajax.inference.prompts import sized_picture

        sized_picture(self._model.images, Picture(name, "", location))
        self.pictures.append(name)

    def kept(self) -> str:
        """The end of a message on the pictures that no message has yet."""
        return f" The next message has {', '.join(self.pictures)}." if self.pictures else ""

    def reset(self) -> None:
        """Forget all messages but the system's, and the pictures of the next one."""
        from megajax.data.rendering import Chat

        if self.pictures:
            print(f"megajax: the next message is without {', '.join(self.pictures)}.", file=sys.stderr)
        self.pictures = []
        system = self._options.system
        self.chat = Chat([] if system is None else [{"role": "system", "content": system}], {})

    def ask(self, message: str) -> None:
        """Print the answer to a message. Ctrl-C stops it: its text so far is the answer.

        Raises InputError for what the model cannot answer. A message without an answer is no part of the conversation,
        and its pictures are those of the next one.
        """
        from megajax.inference.generation import continue_texts, generator
        from megajax.inference.prompts import Located, as_chat, encode_prompt, with_images

        model, options, pieces = self._model, self._options, []
        added = as_chat(with_images(message, self.pictures), None)
        messages, pictures = [*self.chat.messages, *added.messages], (*self.chat.pictures, *added.pictures)
        asked = self.chat._replace(messages=messages, pictures=pictures)

        def show(text: str) -> None:
            pieces.append(text)
            print(text, end="", flush=True)

        _, tokens = encode_prompt(model, Located(asked), self._arguments)
        settings = {"stop": options.stop, "seed": options.seed + self._count, "on_text": show, "growing": True}
        try:
            continue_texts(model, [tokens], options.tokens, self._sampling, **settings)
        except KeyboardInterrupt:
            pass
        print()
        if cut := generator(model, self._sampling).explain_cut(options.tokens):
            print(cut, file=sys.stderr)
        self._count += 1  # another seed for the next answer
        if any(pieces):
            answer = {"role": "assistant", "content": "".join(pieces)}
            self.chat, self.pictures = asked._replace(messages=[*asked.messages, answer]), []
        elif kept := self.kept():
            print(f"megajax: no answer.{kept}", file=sys.stderr)


def _messages(terminal: bool) -> Iterator[str]:
    """The messages of stdin, a line each; a backslash at its end continues a line, also at the end of stdin."""
    if terminal:
        try:
            import readline  # noqa: F401 (input() then has a history, and lines can be edited)
        except ImportError:
            pass
    else:
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")  # pyright: ignore[reportAttributeAccessIssue]
    message = ""
    while True:
        try:
            message += input(("… " if message else "> ") if terminal else "")
        except EOFError:
            if terminal:
                print()
            if message.strip():
                yield message.removesuffix("\n")
            return
        except KeyboardInterrupt:  # as in a shell, the line is given up
            if not terminal:
                raise
            print()
            message = ""
            continue
        if message.endswith("\\"):
            message = message[:-1] + "\n"
            continue
        if message.strip():
            yield message
        message = ""


def main(argv: Sequence[str]) -> int:
    """Talk with a model; returns the exit status."""
    parser = CommandParser("megajax.chat", description=f"Chat with a model: each line is a message. {HELP}.")
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="the conversation's system message")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="picture of the first message; may be repeated"
    )
    add_sampling_arguments(parser, tokens=1024)
    with user_errors():
        options = parser.parse_args(argv)
        accept_missing_cuda()
        chat(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
