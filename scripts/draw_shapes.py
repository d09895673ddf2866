"""Draws pictures of two coloured shapes, each with a sentence, as training data of a small captioner.

python scripts/draw_shapes.py FOLDER

FOLDER gets `train.jsonl` and `valid.jsonl`, lines of chats that name their pictures, the pictures as PNG files, and the
files of a tokenizer: a token for each word, and a chat template. Every tenth sentence is in `valid.jsonl` only, so a
model that writes it has learned colours, shapes and places, not pictures.
"""

import argparse
import json
import random
from itertools import product
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 50),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
RELATIONS = ("above", "left of")
SPECIAL = ("<image>", "<end>", "<pad>")
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<image> {% else %}{{ message.content }} <end>"
    "{% endif %}{% endfor %}"
)
SIDE = 32  # pixels


def draw(chance: random.Random, first: tuple[str, str], second: tuple[str, str], relation: str) -> Image.Image:
    """A picture of two shapes (colour, shape), with places and sizes by chance."""
    grey = chance.randrange(180, 256)
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    pen, half, middle = ImageDraw.Draw(image), SIDE // 2, chance.randint(11, SIDE - 12)
    for i, (colour, shape) in enumerate((first, second)):
        radius = chance.randrange(5, 8)
        along, across = chance.randint(radius + 1, half - radius) + i * half, middle + chance.randint(-2, 2)
        x, y = (along, across) if relation == "left of" else (across, along)
        box, fill = (x - radius, y - radius, x + radius, y + radius), COLOURS[colour]
        if shape == "circle":
            pen.ellipse(box, fill)
        elif shape == "square":
            pen.rectangle(box, fill)
        else:
            pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill)
    return image


def write_tokenizer(folder: Path) -> None:
    """A token for each word, and the chat template."""
    words = [*SPECIAL, "a", *COLOURS, *SHAPES, "above", "left", "of"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), "utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


def write(folder: Path, train: int, valid: int, seed: int = 0) -> None:
    """All files of the docstring, with these numbers of pictures; the same for a seed."""
    chance = random.Random(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    kinds = list(product(COLOURS, SHAPES))
    scenes = [(first, second, relation) for first in kinds for second in kinds for relation in RELATIONS]
    chance.shuffle(scenes)
    held_out = len(scenes) // 10
    for split, count, own in (("train", train, scenes[held_out:]), ("valid", valid, scenes[:held_out])):
        lines = []
        for number in range(count):
            first, second, relation = own[number % len(own)]
            caption = f"a {' '.join(first)} {relation} a {' '.join(second)}"
            name = f"pictures/{split}_{number}.png"
            draw(chance, first, second, relation).save(folder / name)
            asked = {"role": "user", "content": [{"type": "image", "path": name}]}
            lines.append(json.dumps({"messages": [asked, {"role": "assistant", "content": caption}]}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    """Write the files of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the files go")
    parser.add_argument("--train", type=int, default=8000, help="pictures of train.jsonl (default: 8000)")
    parser.add_argument("--valid", type=int, default=400, help="pictures of valid.jsonl (default: 400)")
    options = parser.parse_args()
    write(options.folder, options.train, options.valid)


if __name__ == "__main__":
    main()
