"""Files of prompts: texts and chats."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.data.conversation import IMAGE, Chat, Completion, read_chat, read_prompt
from megajax.data.images import Images, PlacedPicture, SizedPicture
from megajax.data.json_lines import SUFFIXES, check_inputs, located_lines, matching_files, parse
from megajax.data.pictures import Picture, PictureError
from megajax.errors import InputError, file_reader, shown
from megajax.files import read_text, why_unreadable
from megajax.inference.language_model import LanguageModel
from megajax.schema.data import template_arguments


class PicturePrompt(NamedTuple):
    """The tokens of a prompt, and its pictures."""

    tokens: Sequence[int]
    pictures: Sequence[PlacedPicture]


class Located(NamedTuple):
    """A prompt, and the file and line that gave it: its pictures are relative to the file."""

    prompt: str | Chat | Completion
    file: str = ""
    location: str = "the prompt"


def with_images(prompt: str, images: Sequence[str]) -> str | Completion:
    """A text with pictures, which come before it unless IMAGE in it stands for each."""
    if not images:
        return prompt
    given = prompt if IMAGE in prompt else "\n".join([IMAGE] * len(images) + [prompt] * bool(prompt))
    if given.count(IMAGE) != len(images):
        raise InputError(f"the text has {given.count(IMAGE)} times {IMAGE}, but {len(images)} pictures are given.")
    return Completion(given, "", tuple(images))


def encode_prompt(model: LanguageModel, located: Located, arguments: Mapping[str, Any]) -> tuple[str, PicturePrompt]:
    """(the text of a prompt, its tokens and pictures); `arguments` are the chat template's.

    Raises InputError for a picture that cannot be used.
    """
    prompt, pictures = located.prompt, () if isinstance(located.prompt, str) else located.prompt.pictures
    image = model.images.text if pictures else None
    if isinstance(prompt, Chat):
        template = model.chat_template if image is None else model.chat_template.with_image(image.template)
        if model.config.prefix_lm and any(message["role"] == "assistant" for message in prompt.messages):
            problem = f"{located.location} has an answer, and this model (model.prefix_lm=true) was trained on prefixes"
            raise InputError(f"{problem} that end before the first one: leave it out.")
        text = template.render(prompt.messages, True, **{**arguments, **prompt.arguments})
    else:
        text = prompt if isinstance(prompt, str) else prompt.prompt
        text = text if image is None else text.replace(IMAGE, image.template)
    tokens = model.encode(text if image is None else image.written(text)[0], not isinstance(prompt, Chat))
    if image is None:
        return text, PicturePrompt(tokens, ())
    sized = [sized_picture(model.images, Picture(name, located.file, located.location)) for name in pictures]
    try:
        tokens, _, placed = model.images.expanded(tokens, np.zeros(len(tokens), bool), sized, len(sized))
    except ValueError as error:
        raise InputError(f"{located.location} {error}.") from None
    return text, PicturePrompt(tokens, placed)


def sized_picture(images: Images, picture: Picture) -> SizedPicture:
    """A picture of a prompt with its size. Raises InputError for one that cannot be used."""
    try:
        return images.sized(picture)
    except PictureError as error:
        raise InputError(f"{picture.location}: the picture {picture.title} {error}: give another one.") from None


@file_reader("path")
def read_prompts(path: str) -> list[Located]:
    """The prompts of a file: texts, one a line, or in files of JSON lines, arrays and Parquet `read_prompt`'s forms.

    Raises InputError for a file that cannot be read, and for a line that is no prompt.
    """
    prompts = _records(matching_files(path)) if path.endswith(SUFFIXES) else [Located(line) for line in _lines(path)]
    if not prompts:
        raise InputError(f"--prompts={path} has no prompts: write one a line.")
    return prompts


def _lines(path: str) -> list[str]:
    try:
        lines = read_text(Path(path)).split("\n")  # other line ends, such as U+2028, are text
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts={path} cannot be read ({why_unreadable(error)}): give a text file.") from None
    return [line for line in lines if line]


def _records(paths: Sequence[str]) -> list[Located]:
    check_inputs(paths)
    found = []
    for path in paths:
        for line, location in located_lines([path]):
            try:
                found.append(Located(read_prompt(parse(line, "write one JSON object a line")), path, location))
            except ValueError as error:
                raise InputError(f"{location} {error}.") from None
    return found


def as_chat(prompt: str | Chat | Completion, system: str | None) -> Chat:
    """A prompt as a chat: a text is the user's message; `system` begins a chat without a message of the system."""
    if isinstance(prompt, str):
        prompt = Completion(prompt, "")
    if isinstance(prompt, Completion):
        asked = [{"role": "user", "content": prompt.prompt}]
        prompt = read_chat({"messages": asked, "images": [*prompt.pictures]})
    if system is None or prompt.messages[0]["role"] in ("system", "developer"):
        return prompt
    return prompt._replace(messages=[{"role": "system", "content": system}, *prompt.messages])


def chosen_arguments(options: Namespace) -> dict[str, Any]:
    """The chat template's arguments that a command got (`console.add_template_arguments`), besides the training's."""
    try:
        return template_arguments(options.chat_template_args)
    except ValueError as error:
        raise InputError(f"--chat-template-args={shown(options.chat_template_args)} {error}.") from None
