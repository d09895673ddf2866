"""Makes images_*.npz and their folders: outputs of models with images by transformers, for tests/hf/test_vision.py.

The environment is that of make_transformers_references.py. Run it as
`PYTHONPATH=tests/references python tests/data_files/make_vision_references.py`; with names as arguments, such as llava,
it makes these only. Each file holds `model`, JSON, the section of the config that describes the network; the batch:
`tokens` [2, S], `targets`, and the fields of images in megajax's order (docs/vision.md); `logits` [2, S, V] and `loss`,
the mean cross-entropy over the targets that are no image tokens, in FP32; and the gradients of the network's own
tensors, `gradient:NAME`. Sequences have several images of different places, and rows of patches end with padding.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_rows import Image, places, row_of, with_images
from make_transformers_references import randomise, write_folder
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
)

IMAGE = 90  # the image token's id


def patches_of(pixels: np.ndarray, where: np.ndarray, size: int) -> np.ndarray:
    """The pixels `[3, height, width]` of the patches at `where`, flattened."""
    cut = [pixels[:, r * size : (r + 1) * size, c * size : (c + 1) * size] for r, c in where]
    return np.stack([patch.reshape(-1) for patch in cut])


def llava(generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any], list[list[Image]], int]:
    """(network, section `model` without the sizes of the text model, images of each row, length of the text)."""
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=8, patch_size=4),
        text_config=LlamaConfig(**TEXT, rms_norm_eps=1e-5, rope_theta=1e4),
        image_token_index=IMAGE,
        image_seq_length=4,
    )
    tower = {"num_layers": 2, "grid": 2, "patch_size": 4, "class_token": True, "embedding_norm": True}
    tower |= {"final_norm": False, "patch_bias": False, "activation": "quick_gelu", "norm_epsilon": 1e-5}
    tower |= {"projector_ffn_hidden_size": 24, "ffn_hidden_size": 24}
    return LlavaForConditionalGeneration(config), {"vision": tower}, [[(2, 2), (2, 2)], [(2, 2)]], 16


def llava_siglip(generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any], list[list[Image]], int]:
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**vision, image_size=8, patch_size=4),
        text_config=LlamaConfig(**TEXT, rms_norm_eps=1e-5, rope_theta=1e4),
        image_token_index=IMAGE,
        vision_feature_select_strategy="full",
    )
    tower = {"num_layers": 2, "grid": 2, "patch_size": 4, "final_norm": False, "projector_ffn_hidden_size": 24}
    tower |= {"ffn_hidden_size": 24}
    return LlavaForConditionalGeneration(config), {"vision": tower}, [[(2, 2), (2, 2)], [(2, 2)]], 16


def gemma3(generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any], list[list[Image]], int]:
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = Gemma3TextConfig(
        **TEXT,
        head_dim=8,
        query_pre_attn_scalar=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        hidden_activation="gelu_pytorch_tanh",
    )
    config = Gemma3Config(
        text_config=text,
        vision_config=SiglipVisionConfig(**vision, image_size=16, patch_size=4, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=88,
        eoi_token_index=89,
    )
    tower = {"num_layers": 2, "grid": 4, "patch_size": 4, "merge": 2, "projector": "average", "ffn_hidden_size": 24}
    tower |= {"bidirectional": True}
    text = {"head_dim": 8, "attention_scale": 0.25, "sliding_window": 6, "layer_pattern": ["local", "global"]}
    text |= {"activation": "geglu", "qk_norm": True, "norm_placement": "both", "norm_zero_centred": True}
    text |= {"scale_embeddings": True, "tie_embeddings": True, "rope_theta": 1e6, "rope_local_theta": 1e4}
    text |= {"norm_epsilon": 1e-6}
    return Gemma3ForConditionalGeneration(config), text | {"vision": tower}, [[(4, 4), (4, 4)], [(4, 4)]], 16


def qwen2_5_vl(generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any], list[list[Image]], int]:
    vision = {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "patch_size": 2}
    vision |= {"window_size": 8, "fullatt_block_indexes": [1], "out_hidden_size": 24, "temporal_patch_size": 2}
    text = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 1]}}
    config = Qwen2_5_VLConfig(
        text_config=text | {"rms_norm_eps": 1e-6, "max_window_layers": 2},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=88,
        vision_end_token_id=89,
    )
    tower = {"num_layers": 2, "patch_size": 2, "temporal_patch_size": 2, "patch_bias": False, "merge": 2, "window": 4}
    tower |= {"global_layers": [1], "norm": "rmsnorm", "activation": "swiglu", "ffn_hidden_size": 24}
    text = {"norm_epsilon": 1e-6, "rope_theta": 1e6, "attention_bias": "qkv", "rope_sections": [1, 1, 1]}
    images = [[(6, 4), (2, 6)], [(4, 6)]]
    return Qwen2_5_VLForConditionalGeneration(config), text | {"vision": tower}, images, 24


def qwen2_vl(generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any], list[list[Image]], int]:
    vision = {"embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2, "depth": 2, "num_heads": 2, "patch_size": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 1]}
    config = Qwen2VLConfig(
        text_config=TEXT | {"rms_norm_eps": 1e-6, "max_window_layers": 2, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=88,
        vision_end_token_id=89,
    )
    tower = {"num_layers": 2, "patch_size": 2, "temporal_patch_size": 2, "patch_bias": False, "merge": 2}
    tower |= {"activation": "quick_gelu", "ffn_hidden_size": 32}
    text = {"norm_epsilon": 1e-6, "rope_theta": 1e6, "attention_bias": "qkv", "rope_sections": [1, 1, 1]}
    images = [[(6, 4), (2, 6)], [(4, 6)]]
    return Qwen2VLForConditionalGeneration(config), text | {"vision": tower}, images, 24


def qwen3_vl(generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any], list[list[Image]], int]:
    vision = {"hidden_size": 16, "intermediate_size": 24, "depth": 3, "num_heads": 2, "patch_size": 2}
    vision |= {"num_position_embeddings": 9, "deepstack_visual_indexes": [0, 1], "out_hidden_size": 24}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}
    config = Qwen3VLConfig(
        text_config=TEXT | {"num_hidden_layers": 3, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=88,
        vision_end_token_id=89,
    )
    tower = {"num_layers": 3, "patch_size": 2, "temporal_patch_size": 2, "merge": 2, "grid": 3, "interpolate": True}
    tower |= {"deepstack_layers": [0, 1], "ffn_hidden_size": 24}
    text = {"num_layers": 3, "head_dim": 8, "norm_epsilon": 1e-6, "rope_theta": 5e6, "qk_norm": True}
    text |= {"rope_sections": [2, 1, 1], "rope_interleaved": True}
    images = [[(6, 4), (2, 6)], [(4, 6)]]
    return Qwen3VLForConditionalGeneration(config), text | {"vision": tower}, images, 24


TEXT = {"vocab_size": 99, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2}
SAME = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 40, "vocab_size": 99}
PATCHES = {  # of a row
    "llava": 12,
    "llava_siglip": 12,
    "gemma3": 40,
    "qwen2_vl": 48,
    "qwen2_5_vl": 48,
    "qwen3_vl": 48,
}
QWEN = "qwen2_vl", "qwen2_5_vl", "qwen3_vl"


def inputs_of(name: str, vision: dict[str, Any], images: list[list[Image]], generator: torch.Generator):
    """(the network's inputs, rows of fields) for random pictures."""
    size, frames, merge = vision["patch_size"], vision.get("temporal_patch_size", 1), vision.get("merge", 1)
    rows, pixels, flat = [], [], []
    for row in images:
        found = []
        for image in row:
            height, width = (size * n for n in image)
            picture = torch.randn(3, height, width, generator=generator, dtype=torch.float64).numpy()
            where = places(image, vision.get("window"), merge)
            patches = patches_of(picture, where, size)
            if name in QWEN:  # flattened as (channel, frame, row, column), in the order of blocks
                patches = patches.reshape(len(patches), 3, 1, -1).repeat(frames, axis=2).reshape(len(patches), -1)
                blocks = places(image, None, merge)
                by_place = {tuple(at): patch for at, patch in zip(where.tolist(), patches, strict=True)}
                flat.append(np.stack([by_place[tuple(at)] for at in blocks.tolist()]))
            pixels.append(picture)
            found.append((patches, where))
        rows.append(row_of(found, vision))
    if name in QWEN:
        grids = torch.tensor([[1, *image] for row in images for image in row])
        return {"pixel_values": torch.from_numpy(np.concatenate(flat)), "image_grid_thw": grids}, rows
    return {"pixel_values": torch.from_numpy(np.stack(pixels))}, rows


def make(build: Callable[..., Any], seed: int) -> None:
    """One network, its file and its folder."""
    name, generator = build.__name__, torch.Generator().manual_seed(seed)
    network, model, images, length = build(generator)
    vision = model["vision"] | {"hidden_size": 16, "num_heads": 2, "image_token": IMAGE}
    vision["patches_per_row"] = PATCHES[name]
    network = network.double().eval()
    randomise(network, generator, centre=0 if name == "gemma3" else 1)
    for tensor, parameter in network.named_parameters():  # Gemma's own norms multiply by 1 + weight
        if name == "gemma3" and "vision_tower" in tensor and re.search(r"norm\d?\.weight", tensor):
            parameter.data += 1
    given, rows = inputs_of(name, vision, images, generator)
    tokens = torch.randint(IMAGE, (len(rows), length), generator=generator)
    index = with_images(tokens.numpy(), rows, IMAGE)
    targets = torch.where(tokens == IMAGE, -1, tokens).roll(-1, dims=1)
    targets[:, -1] = torch.randint(IMAGE, (len(tokens),), generator=generator)
    is_image = (tokens == IMAGE).int()
    fields: dict[str, np.ndarray] = {}
    if name == "gemma3":
        given["token_type_ids"] = is_image
    if name in QWEN:
        positions, _ = network.model.get_rope_index(tokens, is_image, image_grid_thw=given["image_grid_thw"])
        given["position_ids"] = positions
        fields["rope_positions"] = positions.permute(1, 2, 0).numpy()
    logits = network(input_ids=tokens, use_cache=False, **given).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    fields |= {field: np.stack([row[field] for row in rows]) for field in rows[0]} | {"image_index": index}
    gradients = {f"gradient:{n}": p.grad for n, p in network.named_parameters() if p.grad is not None}
    floats = {"logits": logits, "loss": loss} | gradients
    path = Path(__file__).parent / f"images_{name}.npz"
    np.savez_compressed(
        path,
        model=np.array(json.dumps(SAME | model | {"vision": vision})),
        tokens=tokens.numpy().astype(np.int32),
        targets=targets.numpy().astype(np.int32),
        **{n: a.astype(np.float32 if a.dtype == np.float64 else np.int32) for n, a in fields.items()},
        **{n: a.detach().numpy().astype(np.float32) for n, a in floats.items()},
    )
    print(path.name, path.stat().st_size)
    write_folder(network, path.with_suffix(".zip"))


if __name__ == "__main__":
    for seed, build in enumerate((llava, gemma3, qwen2_5_vl, llava_siglip, qwen3_vl, qwen2_vl)):
        if build.__name__ in (sys.argv[1:] or [build.__name__]):
            make(build, 30 + seed)
