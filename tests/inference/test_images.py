"""Generation with pictures: greedy tokens are transformers' (data_files/make_image_references.py)."""

import io
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from PIL import Image

import megajax
from megajax import chat, evaluate, generate
from megajax.data.image_processing import read_processor
from megajax.data.images import Images, ImageText
from megajax.data.pictures import Picture, PictureFiles
from megajax.inference import generation
from megajax.inference.comm import Prefill, WholeSequences
from megajax.inference.generation import generator
from megajax.inference.prompts import PicturePrompt
from megajax.inference.sampling import Sampling
from megajax.inference.scoring import ScoredWindow, Scorer
from megajax.kernel_choice import Kernels

FILES = Path(__file__).parents[1] / "data_files"
IMAGE = 90


@pytest.fixture(scope="module")
def references() -> dict:
    with np.load(FILES / "images.npz") as arrays:
        return json.loads(arrays["generations"].tobytes())


def picture(path: Path, width: int, height: int) -> str:
    """Writes that of make_image_references.py; its name."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 3 + y / 5), np.cos(x / 2), np.sin(y / 4 + x * y / 90)], axis=-1)
    Image.fromarray(np.uint8(127.5 + 127.5 * waves)).save(path / f"{width}_{height}.png")
    return f"{width}_{height}.png"


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("llava", "gemma3", "qwen3_vl")), "qwen2_5_vl"]
)
def test_greedy_tokens_and_their_scores_are_those_of_transformers(name, references, tmp_path, capsys, monkeypatch):
    shutil.unpack_archive(FILES / f"images_{name}.zip", tmp_path)
    given, model = references[name], megajax.from_hf(tmp_path, dtype="float32")
    vision = model.config.vision
    assert vision is not None
    processor = read_processor(given["values"], name, vision)
    has_rope = model.config.rope_sections is not None
    images = model.__dict__["images"] = Images(vision, processor, ImageText("", ""), has_rope, PictureFiles(tmp_path))
    model.stop_tokens = ()
    prompts = []
    for case in given["cases"]:  # of unlike lengths and numbers of pictures, in one batch
        names = [picture(tmp_path, *size) for size in case["sizes"]]
        sized = [images.sized(Picture(each, str(tmp_path / "prompts"), "")) for each in names]
        tokens, _, placed = images.expanded(case["prompt"], np.zeros(len(case["prompt"]), bool), sized, 0)
        prompts.append(PicturePrompt(tokens, placed))
    [found] = generator(model, Sampling(temperature=0)).tokens(prompts, 12)
    assert found == [case["generated"] for case in given["cases"]]
    if name == "llava":
        _check_commands(tmp_path, given, capsys, monkeypatch)
    if name in ("qwen3_vl", "gemma3"):
        rows = zip(prompts, given["cases"], strict=True)
        windows = [ScoredWindow([*p.tokens, *c["generated"]], len(p.tokens), None, p.pictures) for p, c in rows]
        scores = [score.log_likelihood for score in Scorer(model).scores(windows)]
        assert scores == pytest.approx([case["log_likelihood"] for case in given["cases"]], rel=1e-5)


def test_tokens_of_a_picture_see_both_sides_in_scored_texts_and_in_prompts():
    mesh, positions, ends = megajax.build_mesh({}, jax.devices()[:1]), jnp.arange(4)[None], jnp.array([[0, 3, 3, 0]])
    for comm in (WholeSequences(mesh, Kernels(), 4), Prefill(mesh, Kernels(), 4, jnp.array([4]), 4, 1)):
        found = comm.token_positions(positions, ends)
        assert found.index is positions and found.two_sided_ends is ends


def _add_tokenizer(folder: Path, given: dict) -> None:
    """A tokenizer whose words are numbers, and a chat template."""
    words = {"<image>" if i == IMAGE else str(i): i for i in range(99)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(given["values"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": False}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %} {% endfor %}"
    )


def test_pictures_of_a_message_without_an_answer_are_those_of_the_next_one(references, tmp_path, capsys, monkeypatch):
    shutil.unpack_archive(FILES / "images_llava.zip", tmp_path)
    _add_tokenizer(tmp_path, references["llava"])
    asked, answers, continue_texts = [], iter(["", "7", "7", "7"]), generation.continue_texts

    def answer(model, prompts, *how, on_text, **settings):
        if len(prompts[0].tokens) > 1000:
            return continue_texts(model, prompts, *how, on_text=on_text, **settings)
        asked.append([placed.sized.picture.name for placed in prompts[0].pictures])
        on_text(next(answers))

    name = str(tmp_path / picture(tmp_path, *references["llava"]["cases"][0]["sizes"][0]))
    lines = [f"/image {name}", "/image none.png", "<image> <image>", "5 " * 5000, "5", "5", "5"]
    lines = iter([*lines, f"/image {name}", "/reset", "5", "/exit"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(generation, "continue_texts", answer)
    assert chat.main([str(tmp_path), "--dtype", "float32"]) == 0
    assert asked == [[name], [name], [name], []]  # the third message follows that with the picture
    *kept, dropped = capsys.readouterr().err.splitlines()[1:]
    problems = "none.png does not exist", "2 times <image>", "shorten it", "no answer"
    for sentence, problem in zip(kept, problems, strict=True):
        assert problem in sentence and f" The next message has {name}." in sentence
    assert dropped == f"megajax: the next message is without {name}."


def _check_commands(folder: Path, given: dict, capsys, monkeypatch) -> None:
    """`generate --image`, and pictures in `chat` and `evaluate`, with a tokenizer whose words are numbers."""
    _add_tokenizer(folder, given)
    case = given["cases"][0]
    files = [argument for size in case["sizes"] for argument in ("--image", str(folder / picture(folder, *size)))]
    prompt = " ".join("<image>" if id == IMAGE else str(id) for id in case["prompt"])
    how = ["--tokens", "12", "--temperature", "0", "--dtype", "float32"]
    assert generate.main([str(folder), "--prompt", prompt, *files, *how]) == 0
    expected = " ".join(map(str, case["generated"]))
    assert capsys.readouterr().out.split() == [*prompt.split(), *expected.split()]
    with pytest.raises(SystemExit):
        generate.main([str(folder), "--prompt", prompt, *files[:-1], str(folder / "none.png"), *how])
    assert f"the picture {folder / 'none.png'} does not exist" in capsys.readouterr().err
    said = "".join(f"/image {name}\n" for name in files[3::2]) + f"{prompt}\n/reset\n/image none.png\n5\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said.encode())))
    with pytest.raises(SystemExit):  # the last picture; the first one is that of an option
        chat.main([str(folder), *files[:2], *how])
    out, err = capsys.readouterr()
    assert out.split() == expected.split() and "the picture none.png does not exist" in err
    asked = {"role": "user", "content": prompt}
    answer = {"role": "assistant", "content": expected}
    (folder / "chats.jsonl").write_text(json.dumps({"messages": [asked, answer], "images": files[1::2]}))
    assert evaluate.main([str(folder), "--data", str(folder / "chats.jsonl"), "--dtype", "float32"]) == 0
    found = capsys.readouterr().out.split("\n")[1].split()
    assert found[1:4] == ["1", "12", "answers"]
    assert float(found[4]) == pytest.approx(-case["log_likelihood"] / 12, abs=1e-4)
