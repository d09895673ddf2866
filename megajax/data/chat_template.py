"""A model's chat template: found in its folder, and run in a child process with limits on memory and time."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax.data.answers import AnswerSamples, samples_of_each, samples_within
from megajax.data.model_files import TOKENIZER_CONFIG, inside, read_json, token_texts, tokenizer_config
from megajax.data.rendering import Chat, Message, Template, compiles, render
from megajax.data.sandbox import LimitedProcess, Stopped
from megajax.errors import InputError, UserError, file_reader
from megajax.files import read_text, why_unreadable

CURE = "correct it, or use another one"
_child = LimitedProcess()  # one for all templates: its death changes none of them


class ChatTemplate:
    """A model's chat template, or several by name, with its special tokens and further arguments.

    Errors are InputErrors that name `location`: of a template that is damaged, that needs more than the limits, or that
    does not accept the messages.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        location: str,
        arguments: Mapping[str, Any] | None = None,
    ):
        """`arguments`, such as enable_thinking, are for every chat; they replace special tokens of the same name."""
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.location, self.arguments = location, dict(special_tokens) | dict(arguments or {})
        self._template = Template(self.sources, self.arguments, location)

    def with_image(self, image: str) -> "ChatTemplate":
        """This template for chats with pictures, which it writes as the text `image`."""
        changed = copy.copy(self)
        changed._template = replace(self._template, image=image)
        return changed

    def check(self) -> None:
        """Raises InputError for a template that is damaged."""
        self._once(compiles)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **more: Any) -> str:
        """The text of a chat, as `Template.render`."""
        return self._once(render, messages, add_generation_prompt, more)

    def samples(
        self, chats: Sequence[Chat], room: Callable[[str], int | None] = lambda text: None
    ) -> list[AnswerSamples]:
        """`answer_samples` of each chat. Raises Stopped with the error, and the number of chats before it."""
        samples = []
        for chat, found in zip(chats, self._run(samples_of_each, chats), strict=True):
            if isinstance(found, str):
                try:
                    found = self._once(samples_within, chat, found, room(found))
                except UserError as error:
                    raise Stopped(len(samples), error) from None
            samples.append(found)
        return samples

    def _once[T](self, work: Callable[..., Iterator[T]], *arguments: Any) -> T:
        """The one value of a work."""
        try:
            [value] = self._run(work, *arguments)
        except Stopped as stopped:
            raise stopped.error from None
        return value

    def _run[T](self, work: Callable[..., Iterator[T]], *arguments: Any) -> list[T]:
        return _child.run(f"the chat template {self.location}", CURE, work, self._template, *arguments)


def load_chat_template(folder: Path | None, arguments: Mapping[str, Any] | None = None) -> ChatTemplate:
    """The chat template of a folder; raises InputError if there is none."""
    template = find_chat_template(folder, arguments=arguments)
    if template is None:
        raise InputError(f"{folder} has no chat template: add chat_template.jinja to the folder, or give plain text.")
    return template


@file_reader("file", "folder")
def find_chat_template(
    folder: Path | None, file: Path | None = None, arguments: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """The template `file`, else those of a model's folder: chat_template.jinja, or in tokenizer_config.json.

    The special tokens are those of the folder. None: there is no template.
    """
    template = file or (folder / "chat_template.jinja" if folder else None)
    config_path = folder / TOKENIZER_CONFIG if folder else None
    sources: Any = {} if config_path is None else read_json(config_path).get("chat_template")
    if isinstance(sources, list):  # several named ones
        sources = {str(entry.get("name")): entry.get("template") for entry in sources if isinstance(entry, dict)}
    elif not isinstance(sources, dict):
        sources = {"default": sources}
    files = {"default": template} if template is not None and (file or template.is_file()) else {}
    if folder is not None and file is None:
        files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if files:
        sources = {name: _source(path if path == file else inside(path)) for name, path in files.items()}
    sources = {name: source for name, source in sources.items() if isinstance(source, str)}
    if "default" not in sources:
        return None
    return ChatTemplate(sources, _special_tokens(folder), str(files.get("default", config_path)), arguments)


def _source(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the chat template {path} cannot be read ({why_unreadable(error)}): give a file of text."
        ) from None


def _special_tokens(folder: Path | None) -> dict[str, str]:
    """The special tokens that a template may name: bos_token and the like, and those of extra_special_tokens."""
    if folder is None:
        return {}
    stored = tokenizer_config(folder)
    extra = [stored.get(key) for key in ("extra_special_tokens", "model_specific_special_tokens")]
    named = {key: value for key, value in stored.items() if key.endswith("_token")}
    for each in extra:
        named |= each if isinstance(each, dict) else {}  # a list has no names
    return token_texts(named, named)
