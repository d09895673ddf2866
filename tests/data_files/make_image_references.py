"""Makes images.npz: what transformers' processors make of pictures and chats, for tests/data/test_images.py.

The environment is that of make_transformers_references.py, with Pillow. Run it as `python
tests/data_files/make_image_references.py`. `processors` is JSON: of each case its file's values and the sizes of its
pictures, which `picture` of this file draws; `pixels:CASE:NUMBER` are theirs, [3, height, width] or Qwen's patches.
`windows` is the order of the merged patches of 12 x 10 in windows of 4. `chats` is JSON: of each family the folder's
files, the messages and the tokens; `rope` [3, tokens] are Qwen's positions of them. `generations` is JSON: of each tiny
model, its processor's values, and prompts with an image token for each picture, their sizes, and the tokens
that the model generates greedily, with the sum of their log-probabilities.
"""

import json
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.processing_utils import ProcessorMixin
from transformers.vision_utils import get_vision_window_index

ProcessorMixin.check_argument_for_proper_class = lambda *_: None  # a processor of videos needs torchvision

SIDE = {"height": 12, "width": 12}
SIZES = [(17, 30), (30, 17), (9, 9)]  # width, height
STATISTICS = "image_mean", "image_std"
CASES = {
    "clip": (CLIPImageProcessorPil, {"size": {"shortest_edge": 12}, "crop_size": SIDE}, SIZES),
    "clip_pads": (CLIPImageProcessorPil, {"size": {"shortest_edge": 9}, "crop_size": SIDE}, SIZES),
    "siglip": (SiglipImageProcessorPil, {"size": SIDE}, SIZES),
    "llava": (LlavaImageProcessorPil, {"size": {"shortest_edge": 12}, "crop_size": SIDE, "do_pad": True}, SIZES),
    "gemma3": (Gemma3ImageProcessorPil, {"size": SIDE}, SIZES),
    "qwen": (
        Qwen2VLImageProcessorPil,
        {"patch_size": 4, "size": {"shortest_edge": 128, "longest_edge": 640}},
        [*SIZES, (70, 13), (5, 60)],
    ),
    "qwen3": (
        Qwen2VLImageProcessorPil,
        {"patch_size": 4, "size": {"shortest_edge": 128, "longest_edge": 640}} | {n: [0.5] * 3 for n in STATISTICS},
        SIZES[:2],
    ),
}
IMAGE = 90  # token of the tiny models
TINY = {
    "llava": (CLIPImageProcessorPil, {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}),
    "gemma3": (Gemma3ImageProcessorPil, {"size": {"height": 16, "width": 16}}),
    "qwen2_5_vl": (Qwen2VLImageProcessorPil, {"patch_size": 2, "size": {"shortest_edge": 16, "longest_edge": 96}}),
    "qwen3_vl": (Qwen2VLImageProcessorPil, {"patch_size": 2, "size": {"shortest_edge": 16, "longest_edge": 96}}),
}
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA = (
    "{% for m in messages %}{{ m.role | upper }}: {% for c in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>\n{% endfor %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% for c in m.content %}{% if c.type == 'image' %}<start_of_image>{% else %}{{ c.text | trim }}{% endif %}"
    "{% endfor %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
FAMILIES = {
    "qwen": (QWEN, [f"<|{n}|>" for n in "im_start im_end vision_start vision_end image_pad video_pad".split()], {}),
    "llava": (LLAVA, ["<s>", "</s>", "<image>"], {}),
    "gemma3": (
        GEMMA,
        ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
}
TEXT = {"type": "text"}
MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    {"role": "user", "content": [TEXT | {"text": "And"}, {"type": "image"}, TEXT | {"text": "this?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A dog, é."}]},
]


def picture(width: int, height: int) -> Image.Image:
    """Waves of colours."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 3 + y / 5), np.cos(x / 2), np.sin(y / 4 + x * y / 90)], axis=-1)
    return Image.fromarray(np.uint8(127.5 + 127.5 * waves))


def tokenizer_of(special: list[str]) -> Tokenizer:
    """Bytes, and the special tokens behind them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def family(name: str, processors: dict) -> dict:
    """A family's folder and the tokens of MESSAGES with two pictures."""
    template, special, named = FAMILIES[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(special), extra_special_tokens=named)
    image = processors["llava" if name == "llava" else name]
    if name == "qwen":
        processor = Qwen2_5_VLProcessor(image, tokenizer, None, template)
    elif name == "llava":
        processor = LlavaProcessor(image, tokenizer, 4, "default", template, num_additional_image_tokens=1)
    else:
        processor = Gemma3Processor(image, tokenizer, template, image_seq_length=9)
    pictures = [picture(17, 30), picture(30, 17)]
    text = processor.apply_chat_template(MESSAGES, tokenize=False)
    found = processor(images=[pictures] if name == "gemma3" else pictures, text=[text], return_tensors="np")
    folder = {
        "tokenizer.json": json.loads(tokenizer.backend_tokenizer.to_str()),
        "tokenizer_config.json": {"extra_special_tokens": named},
        "preprocessor_config.json": image.to_dict(),
    }
    given = {"folder": folder, "template": template, "messages": MESSAGES, "ids": found["input_ids"][0].tolist()}
    if name == "qwen":
        given["grids"] = found["image_grid_thw"].tolist()
    return given


def rope(given: dict) -> np.ndarray:
    """Qwen2.5-VL's positions of a family's tokens."""
    import torch

    ids = torch.tensor([given["ids"]])
    image = given["folder"]["tokenizer.json"]["added_tokens"][4]["id"]
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    stand_in = SimpleNamespace(config=config)
    stand_in.get_vision_position_ids = lambda *a, **k: Qwen2_5_VLModel.get_vision_position_ids(stand_in, *a, **k)
    types = (ids == image).int()
    grids = torch.tensor(given["grids"])
    return Qwen2_5_VLModel.get_rope_index(stand_in, ids, types, image_grid_thw=grids)[0][:, 0].numpy()


def generations(name: str, kind: type, values: dict) -> dict:
    """What a tiny model of make_vision_references.py generates."""
    import torch

    processor = kind(**values)
    with TemporaryDirectory() as folder, zipfile.ZipFile(Path(__file__).with_name(f"images_{name}.zip")) as zipped:
        zipped.extractall(folder)
        found = next(Path(folder).rglob("config.json")).parent
        network = AutoModelForImageTextToText.from_pretrained(found, dtype=torch.float32).eval()
    cases = []
    for words, sizes in (([3, IMAGE, 5, 88, IMAGE, 89, 7], [(17, 30), (30, 17)]), ([2, 4, IMAGE, 6], [(9, 9)])):
        inputs = processor([picture(*size) for size in sizes], return_tensors="pt")
        counts = [4] * len(sizes)
        if "qwen" in name:
            counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
        inputs, numbers = {k: v for k, v in inputs.items() if k != "num_crops"}, iter(counts)
        ids = torch.tensor([[id for word in words for id in [word] * (next(numbers) if word == IMAGE else 1)]])
        if name != "llava":
            key = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
            inputs[key] = (ids == IMAGE).int()
        new = network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            **inputs,
        )
        inputs |= {n: torch.nn.functional.pad(inputs[n], (0, 12)) for n in inputs if n.endswith("type_ids")}
        found = network(input_ids=new, **inputs).logits[0, ids.shape[1] - 1 : -1].double().log_softmax(-1)
        likelihood = float(found.max(-1).values.sum().detach())  # of the likeliest tokens
        generated = new[0, ids.shape[1] :].tolist()
        cases.append({"prompt": words, "sizes": sizes, "generated": generated, "log_likelihood": likelihood})
    return {"values": processor.to_dict(), "cases": cases}


def main() -> None:
    """Write the file."""
    import torch

    arrays, cases, processors = {}, {}, {}
    for name, (kind, values, sizes) in CASES.items():
        processors[name] = processor = kind(**values)
        cases[name] = {"values": processor.to_dict(), "sizes": sizes}
        for i, size in enumerate(sizes):
            pixels = processor(picture(*size))["pixel_values"]
            arrays[f"pixels:{name}:{i}"] = np.asarray(pixels if "qwen" in name else pixels[0])
    chats = {name: family(name, processors) for name in FAMILIES}
    windows, _ = get_vision_window_index(torch.tensor([[1, 24, 20]]), 2, 32, 4)
    arrays |= {"windows": windows.numpy(), "rope": rope(chats["qwen"]).astype(np.int32)}
    tiny = {name: generations(name, *given) for name, given in TINY.items()}
    texts = {"processors": cases, "chats": chats, "generations": tiny}
    arrays |= {name: np.frombuffer(json.dumps(value, default=str).encode(), np.uint8) for name, value in texts.items()}
    np.savez_compressed(Path(__file__).with_name("images.npz"), **arrays)


if __name__ == "__main__":
    main()
