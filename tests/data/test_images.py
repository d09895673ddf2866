"""Pictures: pixels, patches, tokens and positions are transformers'; batches are a function of the data; errors."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

import megajax
from megajax.data import inspect
from megajax.data.chat_samples import ChatSamples
from megajax.data.describe import describe_data
from megajax.data.image_processing import (
    ImageProcessor,
    cut_patches,
    default_file,
    default_processor,
    patch_order,
    read_processor,
    smart_size,
)
from megajax.data.inspect import write_pictures
from megajax.data.loader import find_images, make_loader, open_datasets
from megajax.data.pictures import PictureError, PictureFiles, decode, embedded
from megajax.data.shards import Shard
from megajax.errors import InputError
from megajax.schema.batch_schedule import BatchSizes
from megajax.schema.vision import VisionConfig
from megajax.training.modalities import Modalities

REFERENCE = Path(__file__).parents[1] / "data_files/images.npz"
TOWER = {"image_token": 258, "patches_per_row": 36, "num_layers": 1, "hidden_size": 8, "num_heads": 2, "patch_size": 4}
VISION = {
    "llava": TOWER | {"grid": 3, "class_token": True, "patches_per_row": 40},
    "gemma3": TOWER | {"grid": 3, "image_token": 260},
    "qwen": TOWER | {"merge": 2, "window": 4, "temporal_patch_size": 2, "image_token": 260, "patches_per_row": 128},
}
ROPE = {"qwen": {"rope_sections": [1, 1, 2]}}
NAMES = ["first.png", "second.png"]
ENDINGS = ["png", "jpg", "jpeg", "webp", "gif", "bmp", "JPG", "PNG", "1.png"]  # of the members of a shard


@pytest.fixture(scope="module")
def reference() -> dict:
    with np.load(REFERENCE) as arrays:
        found = dict(arrays)
    return found | {name: json.loads(found[name].tobytes()) for name in ("processors", "chats")}


def picture(width: int, height: int) -> Image.Image:
    """That of make_image_references.py."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 3 + y / 5), np.cos(x / 2), np.sin(y / 4 + x * y / 90)], axis=-1)
    return Image.fromarray(np.uint8(127.5 + 127.5 * waves))


def write_folder(path: Path, given: dict) -> None:
    for name, content in given["folder"].items():
        (path / name).write_text(json.dumps(content))
    (path / "chat_template.jinja").write_text(given["template"])
    for name, size in zip(NAMES, [(17, 30), (30, 17)], strict=True):
        picture(*size).save(path / name)


def write_lines(path: Path, records: list) -> str:
    (path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return "chats.jsonl"


def config_of(path: Path, family: str, train: str, length: int = 128, **data):
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 264}
    train = train if "://" in train else str(path / train)
    files = {"kind": "chat", "train": train, "tokenizer": str(path / "tokenizer.json")}
    return megajax.Config.model_validate(
        {
            "run": {"steps": 3, "dir": str(path / "run"), "seed": 5},
            "model": sizes | {"vision": VISION[family]} | ROPE.get(family, {}),
            "batch": {"global_size": 2, "sequence_length": length},
            "data": files | {"packing": "sequential", "order": "sequential"} | data,
        }
    )


def named(messages: list) -> list:
    """Messages whose parts of type image name NAMES, in turn."""
    names, found = iter(NAMES), []
    for message in messages:
        parts = [part | {"path": next(names)} if part["type"] == "image" else part for part in message["content"]]
        found.append(message | {"content": parts})
    return found


def test_pixels_are_those_of_transformers(reference):
    for name, case in reference["processors"].items():
        merge = 2 if "qwen" in name else 1
        vision = SimpleNamespace(patch_size=4, temporal_patch_size=2, merge=merge, fixed_grid=3 if merge == 1 else None)
        processor = read_processor(case["values"], name, vision)  # type: ignore[arg-type]
        for i, size in enumerate(case["sizes"]):
            pixels, expected = processor(picture(*size), 8), reference[f"pixels:{name}:{i}"]
            assert pixels.shape[1:] == processor.size(size[1], size[0], 8)
            if merge == 2:
                rows, columns = (side // 4 for side in pixels.shape[1:])
                pixels = cut_patches(pixels, 4, 2)[patch_order(rows, columns, 2)]
            np.testing.assert_array_equal(pixels, expected, err_msg=f"{name} {size}")
    np.testing.assert_array_equal(patch_order(12, 10, 1, 4), reference["windows"])
    stretched, wide = VISION["qwen"] | {"grid": 3, "interpolate": True}, {"temporal_patch_size": 3, "merge": 4}
    for given in (*VISION.values(), stretched, VISION["qwen"] | wide):
        vision = VisionConfig.model_validate(given)  # what an export writes of a run that had no file
        assert read_processor(default_file(vision), "a", vision) == default_processor(vision)
    means = [default_processor(VisionConfig.model_validate(given)).mean for given in (VISION["qwen"], stretched)]
    assert means == [(0.48145466, 0.4578275, 0.40821073), (0.5, 0.5, 0.5)], "of Qwen2-VL and Qwen3-VL"


@pytest.mark.parametrize("kind", ["CLIP", "Siglip", "Llava", "Gemma3", "Qwen2VL"])
def test_a_processor_that_only_has_its_name_has_the_values_of_transformers(kind):
    """As printed by transformers 5."""
    clip = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
    half = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    expected = {
        "CLIP": clip | {"shortest": 224, "crop": (224, 224)},
        "Siglip": half | {"exact": (224, 224)},
        "Llava": clip | {"shortest": 224, "crop": (224, 224)},
        "Gemma3": half | {"exact": (224, 224), "resample": Image.Resampling.BILINEAR},
        "Qwen2VL": clip | {"pixels": (3136, 1003520)},
    }[kind]
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge": 2}
    own = VisionConfig.model_validate(TOWER | sizes | ({} if kind == "Qwen2VL" else {"merge": 1, "grid": 16}))
    values = {"image_processor_type": f"{kind}ImageProcessor"}
    older = ({"feature_extractor_type": f"{kind}FeatureExtractor"}, {"image_processor_type": f"{kind}FeatureExtractor"})
    for names in (values, {"image_processor_type": f"{kind}ImageProcessorFast"}, *older):
        assert read_processor(names, "a", own) == ImageProcessor(**{"resample": 3, "scale": 1 / 255} | expected), names
    for number in range(6):  # of Pillow's filters; 0 is the nearest pixel
        assert read_processor(values | {"resample": number}, "a", own).resample == number
    for key, other in {"patch_size": 7, "temporal_patch_size": 1, "merge": 1}.items() if kind == "Qwen2VL" else ():
        with pytest.raises(InputError, match=f"but model.vision.{key}={other}"):
            read_processor(values, "a", own.model_copy(update={key: other}))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_each_format_is_read_as_pillow_reads_it(kind):
    file = io.BytesIO()
    picture(17, 30).save(file, kind)
    np.testing.assert_array_equal(np.asarray(decode(file.getvalue())), np.asarray(Image.open(file).convert("RGB")))


def test_a_format_whose_files_may_hold_anything_is_a_sentence():
    picture(17, 30).save(file := io.BytesIO(), "TIFF")
    with pytest.raises(PictureError, match="is no picture of the formats JPEG, PNG, WEBP, GIF, BMP"):
        decode(file.getvalue())


def test_a_picture_is_turned_as_its_camera_was_and_has_a_size_within_the_limits():
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # its right side is the top
    picture(17, 30).save(file, "png", exif=exif)
    np.testing.assert_array_equal(np.asarray(decode(file.getvalue())), np.rot90(np.asarray(picture(17, 30)), -1))
    # 144 pixels are below the limit, but not the 256 of the nearest multiples of 8.
    assert smart_size(12, 12, 8, 64, 200) == (8, 8)
    assert smart_size(1600, 8, 8, 64, 1 << 20) == (1600, 8)  # 200 times as long as wide, as in transformers
    with pytest.raises(PictureError, match="more than 200 times as long as wide"):
        smart_size(8, 1601, 8, 64, 1 << 20)


@pytest.mark.parametrize(("class_token", "expected"), [(True, [3, 1]), (False, [4])])
def test_patches_of_a_row_count_class_entries_and_other_towers_have_other_rows(
    reference, tmp_path, class_token, expected
):
    """38 patches have room for four pictures of 9, but only three with a class entry each."""
    write_folder(tmp_path, reference["chats"]["llava"])
    chat = [
        {"role": "user", "content": [{"type": "image", "path": "first.png"}]},
        {"role": "assistant", "content": "A"},
    ]
    config = config_of(tmp_path, "llava", write_lines(tmp_path, [{"messages": chat}] * 4), packing="first_fit")

    def rows(**changes) -> list[int]:
        tower = {"patches_per_row": 38, "class_token": class_token} | changes
        vision = config.model.vision.model_copy(update=tower)
        own = config.model_copy(update={"model": config.model.model_copy(update={"vision": vision})})
        samples = open_datasets(own)["train"]
        assert isinstance(samples, ChatSamples)
        return [len(samples.pictures(i)) for i in range(len(samples))]

    for other in ({"class_token": not class_token}, {"patches_per_row": 20}):
        assert rows(**other) != expected  # stored in the same directory
    assert rows() == expected


@pytest.mark.parametrize("family", VISION)
def test_tokens_and_fields_are_those_of_transformers(reference, tmp_path, family):
    given = reference["chats"][family]
    write_folder(tmp_path, given)
    train = write_lines(tmp_path, [{"messages": named(given["messages"])}] * 3)
    config = config_of(tmp_path, family, train, length=2 * len(given["ids"]) + 5)
    ids, image = np.array(given["ids"]), VISION[family]["image_token"]
    batch = next(make_loader(config, split="train", rows=np.arange(2)))
    for row, copies in ((0, 2), (1, 1)):  # two conversations, then one
        tokens = batch["tokens"][row]
        np.testing.assert_array_equal(tokens[: copies * len(ids)], np.tile(ids, copies))
        is_image, indices = tokens == image, batch["image_index"][row]
        np.testing.assert_array_equal(indices >= 0, is_image)
        assert batch["loss_mask"][row].any() and not batch["loss_mask"][row][batch["targets"][row] == image].any()
        segments = batch["patch_segments"][row]
        assert segments.max() == 2 * copies - 1 and (np.diff(segments[segments >= 0]) >= 0).all()
        _check_patches(batch, row, config.model.vision, reference, family)
    if family == "qwen":
        expected = reference["rope"].T
        rope = batch["rope_positions"][0]
        np.testing.assert_array_equal(rope[: 2 * len(ids)], np.tile(expected, (2, 1)))


def _check_patches(batch, row: int, vision, reference, family: str) -> None:
    """Each image token's embedding is made of the patches of its block, which have transformers' pixels."""
    case, seen = ("llava" if family == "llava" else family), 0
    tokens, indices = batch["tokens"][row], batch["image_index"][row]
    places = np.flatnonzero(tokens == vision.image_token)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    block = vision.merge**2
    for number, run in enumerate(runs):
        width, height = [(17, 30), (30, 17)][number % 2]
        pixels = reference[f"pixels:{case}:{number % 2}"]
        if family != "qwen":
            pixels = cut_patches(pixels, 4, 1)
        entries = (indices[run][:, None] * block + np.arange(block)).reshape(-1)
        np.testing.assert_array_equal(batch["patches"][row][entries], pixels)  # Qwen's are block after block too
        assert (batch["patch_segments"][row][entries] == number).all()
        seen += len(entries)
        columns = {"qwen": 4 if height > width else 8}.get(family, 3)
        order = patch_order(len(pixels) // columns, columns, vision.merge)
        np.testing.assert_array_equal(batch["patch_positions"][row][entries], np.stack(np.divmod(order, columns), 1))
    classes = batch["patch_segments"][row] >= 0
    classes[(indices[places][:, None] * block + np.arange(block)).reshape(-1)] = False
    assert classes.sum() == len(runs) * vision.class_token
    assert (batch["patch_positions"][row][classes] == -1).all() and not batch["patches"][row][classes].any()


def test_pictures_are_named_in_other_forms_too(reference, tmp_path):
    """<image> of LLaVA's files, prompt and completion, OpenAI's URLs, and a template that reads only text."""
    given = reference["chats"]["llava"]
    write_folder(tmp_path, given)
    turns = [("human", "<image>\nWhat is it?"), ("gpt", "A cat."), ("human", "And\n<image>"), ("gpt", "A dog.")]
    spoken = [{"from": speaker, "value": text} for speaker, text in turns]
    url = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/first.png"}}
    parts = [
        {"role": "user", "content": [url, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "image", "image": "second.png"}]},
        {"role": "assistant", "content": "A dog."},
    ]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    text = "user: <image>\nWhat is it?\nassistant: A cat.\nuser: And\n<image>\nassistant: A dog.\n"
    prompt = {"prompt": text[:-7], "completion": text[-7:], "images": NAMES}
    inside = [{"bytes": embedded((tmp_path / name).read_bytes()), "path": "elsewhere.png"} for name in NAMES]
    records = [{"conversations": spoken, "images": NAMES}, {"messages": parts}, prompt, prompt | {"images": inside}]
    (tmp_path / "chat_template.jinja").write_text(template)
    samples = open_datasets(config_of(tmp_path, "llava", write_lines(tmp_path, records), packing="none"))["train"]
    rows = [samples[i][: int(samples.document_lengths(i)[0])] for i in range(4)]
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[2], rows[3])
    np.testing.assert_array_equal(rows[0], rows[2][:-1])  # a completion ends with the end of a text
    assert [placed.sized.picture.name for placed in samples.pictures(1)] == [url["image_url"]["url"], "second.png"]
    assert (rows[0] == 258).sum() == 18
    files = PictureFiles(tmp_path / "run/index_cache")
    for beside, contained in zip(samples.pictures(2), samples.pictures(3), strict=True):
        assert len(contained.sized.picture.name) < 50  # the bytes are in the cache
        assert files.image(contained.sized.picture) == files.image(beside.sized.picture)


def test_pictures_in_parquet_files_are_those_beside_the_file(reference, tmp_path):
    """As Hugging Face's datasets write them: a column of {"bytes", "path"}."""
    write_folder(tmp_path, reference["chats"]["llava"])
    inside = [{"bytes": (tmp_path / name).read_bytes(), "path": None} for name in NAMES]
    record = {"prompt": "<image> and <image>", "completion": "A cat."}
    parquet.write_table(pyarrow.Table.from_pylist([record | {"images": inside}]), tmp_path / "chats.parquet")
    write_lines(tmp_path, [record | {"images": NAMES}])
    batches = []
    for train in ("chats.parquet", "chats.jsonl"):
        config = config_of(tmp_path, "llava", train)
        batches.append(
            next(make_loader(config, split="train", rows=np.arange(1), samples=open_datasets(config)["train"]))
        )
    assert batches[0]["patches"].any()
    np.testing.assert_equal(*batches)


def test_shards_give_the_batches_of_lines_and_resume_exactly(reference, tmp_path):
    given = reference["chats"]["qwen"]
    write_folder(tmp_path, given)
    records = []
    with tarfile.open(tmp_path / "some.tar", "w") as tar:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        for i in range(9):
            encoded = io.BytesIO()
            picture(17 + 3 * i, 30).save(encoded, "png")
            (tmp_path / f"{i}.png").write_bytes(encoded.getvalue())
            add(f"a/{i}.{ENDINGS[i]}", encoded.getvalue())
            answer = {"role": "assistant", "content": f"Number {i}"}
            asked = {"type": "image", "path": f"{i}.png"}
            records.append({"messages": [{"role": "user", "content": [asked]}, answer]})
            if i == 4:  # in LLaVA's form, with another picture of the same key
                turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": answer["content"]}]
                name = f"a/{i}.{ENDINGS[i]}"
                add(f"a/{i}.json", json.dumps({"image": name, "conversations": turns}).encode())
                add(f"a/{i}.mask.png", encoded.getvalue())
            elif i % 2:
                add(f"a/{i}.txt", answer["content"].encode())
            else:
                asked = {"role": "user", "content": "<image>"}
                add(f"a/{i}.json", json.dumps({"messages": [asked, answer]}).encode())
    data = {"packing": "first_fit", "order": "shuffled"}
    configs = [config_of(tmp_path, "qwen", name, **data) for name in ("some.tar", write_lines(tmp_path, records))]
    shard, lines = (make_loader(config, split="train", rows=np.arange(2)) for config in configs)
    batches = [next(shard) for _ in range(6)]
    for batch in batches:
        for name, values in next(lines).items():
            np.testing.assert_array_equal(batch[name], values, err_msg=name)
        assert all((row >= 0).sum() <= 128 for row in batch["patch_segments"])
    assert any((batch["patch_segments"].max(axis=1) > 0).any() for batch in batches)  # several pictures in a row
    assert write_pictures(configs[0], open_datasets(configs[0])["train"], 0, tmp_path / "shown")
    [(sized, _), *_] = open_datasets(configs[0])["train"].pictures(0)
    seen = np.asarray(Image.open(tmp_path / "shown/sample_0_picture_0.png"))  # only resized
    whole = Image.open(tmp_path / f"{Path(sized.picture.name).name.split('.')[0]}.png")
    resized = whole.resize((sized.columns * 4, sized.rows * 4), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(seen, np.asarray(resized))
    for scale in (1 / 127.5, None):  # of other processors
        images = find_images(configs[0])
        other = replace(images, processor=replace(images.processor, scale=scale))
        np.testing.assert_array_equal(np.asarray(other.shown(*other.entries_of(sized))), np.asarray(resized))
    sizes, values = BatchSizes.constant(2), {"tokens_per_second_per_device": 256.0}  # as many as a batch has
    run = SimpleNamespace(config=configs[0], sizes=sizes)
    Modalities(open_datasets(configs[0])["train"]).on_log(run, 3, values)  # type: ignore[arg-type]
    image = (batches[2]["image_index"] >= 0).sum()
    assert values["image_tokens_per_second_per_device"] == image
    assert values["text_tokens_per_second_per_device"] == batches[2]["is_real"].sum() - image
    remote = make_loader(
        config_of(tmp_path, "qwen", f"file://{tmp_path}/some.tar", **data), split="train", rows=np.arange(2)
    )
    np.testing.assert_array_equal(next(remote)["patches"], batches[0]["patches"])
    resumed = make_loader(configs[0].model_copy(), split="train", rows=np.arange(1, 2), start_step=4)
    for name, values in next(resumed).items():
        np.testing.assert_array_equal(values[0], batches[4][name][1], err_msg=name)


def test_a_member_of_a_shard_may_have_the_largest_size(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("a.png")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"12345"))
    shard = Shard(str(tmp_path / "a.tar"))
    assert shard.read("a.png", 5) == b"12345"
    with pytest.raises(InputError, match="member a.png has 5 bytes, more than 4"):
        shard.read("a.png", 4)


def test_a_conversation_is_cut_before_a_picture_that_does_not_fit(reference, tmp_path):
    """Into the row of tokens, or of patches: a picture takes nine, and its class entry."""
    given = reference["chats"]["llava"]
    write_folder(tmp_path, given)
    train, whole = write_lines(tmp_path, [{"messages": named(given["messages"])}]), len(given["ids"])
    places = np.flatnonzero(np.array(given["ids"]) == 258)  # two pictures of nine tokens
    last, second = places[-1], places[9]
    rows = (last, 20, 2, last + 1), (last - 1, 20, 1, second), (whole, 20, 2, whole), (whole, 19, 1, second)
    for length, patches, number, tokens in rows:
        config = config_of(tmp_path, "llava", train, length=int(length))
        vision = config.model.vision.model_copy(update={"patches_per_row": patches})
        model = config.model.model_copy(update={"vision": vision})
        config = config.model_copy(update={"model": model})
        samples = (opened := open_datasets(config))["train"]
        said = any(
            f"1 cut after {length + 1} tokens or before a picture" in each for each in describe_data(config, opened)
        )
        assert said == (tokens < whole)
        assert len(samples.pictures(0)) == number and samples.document_lengths(0)[0] == tokens
        assert samples.cut == (tokens < whole)
        np.testing.assert_array_equal(samples[0][:tokens], given["ids"][:tokens])


def test_bad_pictures_are_named_and_counted(reference, tmp_path, monkeypatch):
    write_folder(tmp_path, reference["chats"]["llava"])
    whole = (tmp_path / "first.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "run.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    names = ["first.png", "missing.png", "cut.png", "text.png", "run.eps", "bomb.png", "reference://a/b.png"]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A"}]}
    asked = [[{"type": "image"}] if i else [{"type": "image"}, {"type": "image"}] for i in range(len(names))]
    pictures = [[name] if i else [name, name] for i, name in enumerate(names)]
    records = [
        {"messages": [{"role": "user", "content": parts}, answer], "images": each}
        for parts, each in zip(asked, pictures, strict=True)
    ]
    train = write_lines(tmp_path, records)
    config = config_of(tmp_path, "llava", train)
    with pytest.warns(UserWarning) as warned:
        opened = open_datasets(config)
    [message] = [str(each.message) for each in warned if "bad pictures" in str(each.message)]
    for line, reason in enumerate(["does not exist", "damaged or incomplete", "no picture", "no picture", "pixels"], 2):
        name = f"{tmp_path / train}, line {line}, picture 1: {names[line - 1]} "
        assert any(name in each and reason in each for each in message.split("\n")), (name, reason, message)
    assert "6 conversations with bad pictures left out" in message and "1 more" in message
    assert any("6 left out because of their pictures" in each for each in describe_data(config, opened))
    with pytest.warns(UserWarning, match="After correcting them, remove .*index_cache/") as again:
        open_datasets(config)  # of the stored tokens
    assert str(again[0].message) == message
    (moved := tmp_path / "moved").mkdir()
    (moved / train).write_bytes((tmp_path / train).read_bytes())
    elsewhere = config.model_copy(update={"data": config.data.model_copy(update={"train": f"{moved}/{train}"})})
    with pytest.warns(UserWarning), pytest.raises(InputError, match="no conversation whose pictures can be used"):
        open_datasets(elsewhere)  # beside that file are no pictures
    (tmp_path / "first.png").unlink()  # after its tokens were stored
    with pytest.raises(InputError, match="line 1: the picture first.png does not exist"):
        next(make_loader(config, split="train", rows=np.arange(1), samples=opened["train"]))
    write_lines(tmp_path, records[1:])
    with pytest.warns(UserWarning), pytest.raises(InputError, match="no conversation whose pictures can be used"):
        open_datasets(config)
    picture(9, 9).save(tmp_path / "first.png")
    write_lines(
        tmp_path,
        [
            {"messages": [{"role": "system", "content": [{"type": "image"}]}, *records[1]["messages"]]}
            | {"images": ["first.png"] * 2}
        ],
    )
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(template.replace("in messages %}", "in messages[1:] %}"))
    with pytest.raises(InputError, match="line 1 has 2 pictures, but the chat template writes 0"):
        open_datasets(config)
    write_lines(tmp_path, [{"messages": [{"role": "user", "content": "<image>"}, answer], "images": NAMES}])
    with pytest.raises(InputError, match='line 1 has 2 "images", but positions in the messages for 1 of them'):
        open_datasets(config)


def test_a_folder_for_pictures_that_cannot_be_made_is_found_before_the_data(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(config_of(tmp_path, "qwen", "none.jsonl").to_yaml())
    with pytest.raises(SystemExit):
        inspect.main([f"{tmp_path}/c.yaml", f"--pictures={tmp_path}/c.yaml/x"])
    assert f"--pictures={tmp_path}/c.yaml/x cannot be written" in capsys.readouterr().err
