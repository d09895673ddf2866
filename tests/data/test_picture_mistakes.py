"""Processors, pictures and shards that cannot be used are sentences, and the nearest ones are read."""

import json
import struct
import tarfile
import zlib
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import megajax
from megajax.data import pictures
from megajax.data.image_processing import ImageProcessor, read_processor
from megajax.data.images import Images, ImageText, SizedPicture, image_text
from megajax.data.loader import open_datasets
from megajax.data.pictures import MOST_BYTES, Picture, PictureError, PictureFiles, decode
from megajax.data.shards import Shard
from megajax.data.tokenizers import load_tokenizer
from megajax.errors import InputError
from megajax.schema.vision import VisionConfig

TOWER = {"image_token": 258, "patches_per_row": 9, "num_layers": 1, "hidden_size": 8, "num_heads": 2, "patch_size": 4}
GRID, FREE = VisionConfig.model_validate(TOWER | {"grid": 3}), VisionConfig.model_validate(TOWER | {"merge": 2})


@pytest.mark.parametrize(
    ("vision", "values", "sentence"),
    [
        (GRID, {}, "p.json has the processor without a name: megajax has those of CLIP, Siglip, Llava, Gemma3, Qwen2"),
        (GRID, {"image_processor_type": "ViTImageProcessor"}, "has the processor ViTImageProcessor: megajax has those"),
        (
            GRID,
            {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True},
            "p.json has do_pan_and_scan, .*: remove it",
        ),
        (
            GRID,
            {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 12, "width": 16}},
            "p.json makes pictures of 16 x 12 pixels, but model.vision.grid=3 with patches of 4 needs 12 x 12: correct",
        ),
        (
            GRID,
            {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False, "size": 12},
            "p.json makes pictures of unlike sizes, but model.vision.grid=3 with patches of 4 needs 12 x 12: correct",
        ),
        (
            FREE,
            {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False, "size": 12},
            "p.json makes pictures of any number of pixels: give it a crop_size",
        ),
    ],
)
def test_a_processor_that_does_not_fit_is_a_sentence(vision, values, sentence):
    with pytest.raises(InputError, match=sentence):
        read_processor(values, "p.json", vision)


def test_the_nearest_processors_are_read():
    cropped = {"image_processor_type": "CLIPImageProcessor", "crop_size": 12}
    for vision in (GRID, FREE):
        assert read_processor(cropped, "p.json", vision).fixed_size == (12, 12)
    whole = {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": False}
    assert read_processor(whole | {"size": {"height": 12, "width": 12}}, "p.json", GRID).fixed_size == (12, 12)


QWEN = {"patch_size": 4, "temporal_patch_size": 1, "merge_size": 2}
OTHERS = {  # a processor, what FREE needs in its file, and keys that it reads with other values than the usual ones
    "CLIPImageProcessor": (
        {},
        {"do_resize": False, "do_center_crop": False, "do_rescale": False, "do_normalize": False, "size": 9},
    ),
    "CLIPImageProcessorFast": ({}, {"crop_size": 9, "resample": 0, "rescale_factor": 0.5, "image_mean": [0.1] * 3}),
    "LlavaImageProcessor": (
        {},
        {"do_pad": True, "image_std": [0.1] * 3, "crop_size": {"height": 8}, "size": {"shortest_edge": 8}},
    ),
    "SiglipImageProcessor": ({}, {"size": {"height": 8}, "do_pan_and_scan": True}),
    "Gemma3ImageProcessor": ({}, {"size": {"width": 8}, "resample": 0}),
    "Qwen2VLImageProcessor": (
        QWEN,
        {"min_pixels": 64, "max_pixels": 4096, "size": {"longest_edge": 4096}} | dict.fromkeys(QWEN, 3),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_key_of_a_processors_file_changes_it_or_is_refused(name):
    needed, others = OTHERS[name]
    usual = {"image_processor_type": name} | needed
    processor = read_processor(usual, "p.json", FREE)
    for key, value in others.items():
        with suppress(InputError):  # as one that does not fit the model
            assert read_processor(usual | {key: value}, "p.json", FREE) != processor, key


@pytest.mark.parametrize(
    ("processor", "largest", "beyond", "side"),
    [
        (ImageProcessor(shortest=4, crop=(4, 4)), (1, 4096), (1, 4097), "16,388"),
        (ImageProcessor(), (16384, 1), (16385, 1), "16,385"),
        (ImageProcessor(shortest=4, pads=True), (2, 16384), (2, 16385), "16,385"),
    ],
)
def test_a_picture_that_becomes_too_long_is_left_out_before_its_tokens_are_stored(processor, largest, beyond, side):
    """It is one of the bad pictures that are counted, and not an error at the step that reads it."""
    width, height = largest
    assert processor.size(height, width, 4)
    width, height = beyond
    sentence = f"of {width} x {height} pixels becomes {side} pixels long, more than 16,384"
    with pytest.raises(PictureError, match=sentence):
        processor.size(height, width, 4)
    with pytest.raises(PictureError, match=sentence):
        processor(Image.new("RGB", beyond), 4)


@pytest.fixture
def images(tmp_path) -> Images:
    Image.new("RGB", (5, 7)).save(tmp_path / "a.png")
    return Images(GRID, ImageProcessor(exact=(12, 12)), ImageText("<i>", "<i>"), False, PictureFiles(tmp_path))


@pytest.mark.parametrize("scheme", ["http", "https", "s3", "gs", "gcs", "az", "abfs", "hf", "file"])
def test_a_picture_may_be_at_an_address_of_a_store_and_nowhere_else(tmp_path, monkeypatch, scheme):
    """Others of fsspec, such as `github`, `ssh` or a chain with `::`, may start programs or ask for passwords."""
    opened = list[str]()
    monkeypatch.setattr(pictures, "RemoteFile", lambda url, _: opened.append(url) or Whole())
    files = PictureFiles(tmp_path)
    assert files.image(Picture(f"{scheme}://host/a.png", "x.jsonl", "x.jsonl, line 1")).size == (5, 7)
    assert opened == [f"{scheme}://host/a.png"]
    for other in ("ssh", "github", "ftp", "simplecache::http", scheme.upper() + "X"):
        with pytest.raises(PictureError, match="its URL does not begin with one of http, https, s3"):
            files.image(Picture(f"{other}://host/a.png", "x.jsonl", "x.jsonl, line 1"))
    assert len(opened) == 1


class Whole:
    """A remote file, an image of 5 x 7 pixels."""

    def __init__(self):
        Image.new("RGB", (5, 7)).save(stored := BytesIO(), "png")
        self.data, self.size = stored.getvalue(), len(stored.getvalue())

    def read(self, start: int, stop: int) -> bytes:
        return self.data[start:stop]


def test_all_that_decides_a_pictures_tokens_names_the_stored_chats(images):
    vision = VisionConfig.model_validate(TOWER | {"merge": 2, "patches_per_row": 12})
    decide = {"image_token": 5, "patches_per_row": 16, "patch_size": 2, "merge": 1, "class_token": True}
    keys = [replace(images, vision=vision.model_copy(update={key: value})).key for key, value in decide.items()]
    keys += [replace(images, vision=vision.model_copy(update={"num_layers": 2})).key]  # decides nothing of it
    keys += [replace(images, vision=vision, processor=ImageProcessor(exact=(12, 12), pads=True)).key]
    keys += [replace(images, vision=vision, text=ImageText(*both)).key for both in (("<j>", "<i>"), ("<i>", "<j>"))]
    unlike = {json.dumps(key) for key in keys}
    assert len(unlike) == len(keys) and json.dumps(replace(images, vision=vision).key) == json.dumps(keys[len(decide)])


def test_a_picture_whose_patches_do_not_fit_is_a_sentence(images, tmp_path):
    picture = Picture("a.png", str(tmp_path / "x.jsonl"), "x.jsonl, line 1")

    def of(**changes) -> Images:
        return replace(images, vision=images.vision.model_copy(update=changes))

    assert images.sized(picture) == SizedPicture(picture, 3, 3)  # of patches_per_row=9
    for changes, sentence in (
        ({"patches_per_row": 8}, "has 9 patches, but model.vision.patches_per_row=8"),
        ({"merge": 2}, "has 3 x 3 patches, which model.vision.merge does not divide"),
    ):
        with pytest.raises(PictureError, match=sentence):
            of(**changes).sized(picture)
    with pytest.raises(InputError, match="line 1: the picture a.png has another size than .* remove data.index_cache"):
        images.entries_of(SizedPicture(picture, 3, 2))
    counted, sized = np.ones(2, bool), SizedPicture(picture, 3, 3)
    with pytest.raises(ValueError, match="has 2 times the text <i>, but its pictures are 1: remove the text"):
        images.expanded([258, 258], counted, [sized], 0)
    assert len(images.expanded([258, 7], counted, [sized], 1)[0]) == 10


def test_a_conversation_of_a_shard_may_name_a_file_outside_it(images, tmp_path):
    picture = Picture(str(tmp_path / "a.png"), str(tmp_path / "x.tar"), "x.tar, member a.json")
    assert images.files.image(picture).size == (5, 7)


def test_a_file_that_cannot_be_a_picture_is_a_sentence(images, tmp_path):
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    for name, sentence in (
        ("large.png", "has 134,217,729 bytes, more than 134,217,728"),
        (f"file://{tmp_path}/large.png", "has 134,217,729 bytes, more than 134,217,728"),  # as at any URL
        (300 * "a", r"cannot be read \(File name too long\)"),
    ):
        with pytest.raises(PictureError, match=sentence):
            images.files.image(Picture(name, str(tmp_path / "x.jsonl"), "x.jsonl, line 1"))
    member = tarfile.TarInfo("large.png")
    member.size = MOST_BYTES + 1
    with (tmp_path / "x.tar").open("wb") as file:
        file.write(member.tobuf())
        file.truncate(MOST_BYTES + 10_240)
    with pytest.raises(PictureError, match="x.tar, member large.png has 134,217,729 bytes, more than 134,217,728"):
        images.files.image(Picture("large.png", str(tmp_path / "x.tar"), "x.tar, member a.json"))
    header = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    with pytest.raises(PictureError, match="has more than 67,108,864 pixels"):
        decode(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT")


def test_a_tokenizer_without_the_image_token_is_a_sentence():
    with pytest.raises(InputError, match="the tokenizer byte has no added token with the id 258: set model.vision.ima"):
        image_text(load_tokenizer("byte"), "byte", None, 258)


def test_shards_that_cannot_be_read_are_sentences(tmp_path):
    path = str(tmp_path / "a.tar")
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("a.json")
        member.size = len(chat := json.dumps({"messages": []}).encode())
        tar.addfile(member, BytesIO(chat))
    shard = Shard(path)
    assert shard.read("./a.json", 100) == chat
    with pytest.raises(InputError, match="a.tar has no member b.json"):
        shard.read("b.json", 100)
    with open(path, "r+b") as file:
        file.truncate(shard.members["a.json"].start + 3)
    with pytest.raises(InputError, match="a.tar ends within the member a.json: copy it again"):
        shard.read("a.json", 100)
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(InputError, match="a.tar is not a complete tar file without compression .*: unpack its compre"):
        Shard(path)
    config = megajax.Config.model_validate(
        {
            "run": {"steps": 1, "dir": str(tmp_path / "run")},
            "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 264},
            "batch": {"global_size": 1, "sequence_length": 8},
            "data": {"kind": "chat", "train": path, "tokenizer": "byte"},
        }
    )
    with pytest.raises(InputError, match="a.tar is a shard of pictures, but the model reads text only: set model.vis"):
        open_datasets(config)


@pytest.mark.parametrize("named", [True, False])
def test_gemma3_s_pictures_stand_between_the_two_tokens_that_its_tokenizer_names(tmp_path, named):
    """As Gemma3Processor writes them; without either name a picture is its own token alone."""
    tokenizer = SimpleNamespace(added_tokens=["<soft>", "<eos>"], token_id={"<soft>": 7, "<eos>": 1}.get)
    borders, alone = {"boi_token": "<start>", "eoi_token": "<end>"}, ImageText("<soft>", "<soft>")
    for given in (borders, *({key: borders[key]} for key in borders)):
        config = {"extra_special_tokens": given} if named else given
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        expected = ImageText("<start>", "\n\n<start><soft><end>\n\n") if given is borders else alone
        assert image_text(tokenizer, "t", tmp_path, 7) == expected
