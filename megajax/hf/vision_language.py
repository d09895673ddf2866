"""Models that read images: LLaVA (CLIP or SigLIP, and Llama) and Gemma 3: config.json, tensors.

Their config.json has the text model's in `text_config` and the tower's in `vision_config`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from megajax.config import ModelConfig
from megajax.errors import InputError
from megajax.hf.defaults import DEFAULTS, Json
from megajax.hf.families import Gemma3Text
from megajax.hf.llama import BIAS, HEADS, INTO, LINEAR, Llama, check_fixed
from megajax.hf.tensors import Family, Tensor
from megajax.layout.kinds import DENSE
from megajax.schema.vision import VisionConfig

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
PATCH = "embed (channel time) row column"
OURS = " -> channel time row column embed"
LAYER = f"vision.blocks.{DENSE}."
THREE = ("query", "key", "value")
ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "silu": "swiglu"}


def both(ours: str, theirs: str) -> list[Tensor]:
    """The entries of a vector's weight and bias."""
    return [Tensor(ours, f"{theirs}.weight"), Tensor(f"{ours}_bias", f"{theirs}.bias")]


def linear(ours: str, theirs: str) -> list[Tensor]:
    """The entries of a linear layer's weight and bias."""
    return [Tensor(ours, f"{theirs}.weight", LINEAR), Tensor(f"{ours}_bias", f"{theirs}.bias")]


class VisionLanguage(Family):
    """A text model with a vision tower. `text` is the family of the text model."""

    text: Llama
    tower_type: str  # of vision_config, by default
    image_token = "image_token_index"
    of_text, of_tower = "language_model.", "vision_tower.vision_model."  # before the names of tensors
    older: Mapping[str, str] = {  # other beginnings of names, as patterns
        r"model\.(?=language_model\.|vision_tower\.|multi_modal_projector\.)": "",
        r"vision_tower\.(?!vision_model\.)": "vision_tower.vision_model.",
        r"language_model\.(?!model\.|lm_head\.)": "language_model.model.",
        r"lm_head\.": "language_model.lm_head.",
    }
    names: Mapping[str, str] = {}

    def stored_names(self, names: Iterable[str], folder: Path) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            published = name
            for older, new in self.older.items():
                published = re.sub(f"^{older}", new, published)
            if published in found:
                raise InputError(
                    f"{folder} has the tensors {found[published]} and {name}, which are the same: copy it again."
                )
            found[published] = name
        return found

    def with_text_config(self, config: Json) -> Json:
        """config.json with the text model's keys in `text_config`."""
        text = {"model_type": self.text.model_type} | (config.get("text_config") or {})
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config and key not in text}
        return config | {"text_config": text | tied}

    def read(self, config: Json) -> Json:
        tower = self.complete_tower(config)
        model = self.text.read(config["text_config"])
        check_fixed(tower, {"num_channels": 3, "in_channels": 3, "attention_dropout": 0.0})
        if (activation := tower["hidden_act"]) not in ACTIVATIONS:
            raise ValueError(f"vision_config.hidden_act={activation} is not one of {', '.join(ACTIVATIONS)}")
        vision = {"activation": ACTIVATIONS[activation], "patch_size": tower["patch_size"]}
        vision |= {"hidden_size": tower["hidden_size"], "ffn_hidden_size": tower["intermediate_size"]}
        vision |= {"image_token": config[self.image_token]} | self.read_tower(config, tower)
        return model | {"vision": vision}

    def write(self, model: ModelConfig) -> Json:
        if (vision := model.vision) is None:
            raise ValueError("it has a vision tower")
        act = next((name for name, ours in ACTIVATIONS.items() if ours == vision.activation), "gelu")
        tower = {"model_type": self.type_of_tower(vision), "hidden_act": act, "patch_size": vision.patch_size}
        tower |= {"hidden_size": vision.hidden_size, "intermediate_size": vision.ffn_hidden_size}
        whole, own = self.write_tower(model, vision)
        return whole | {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            self.image_token: vision.image_token,
            "tie_word_embeddings": model.tie_embeddings,
            "text_config": self.text.write(model),
            "vision_config": tower | own,
        }

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        assert model.vision is not None
        text = [Tensor(**{**vars(t), "theirs": self.text_name(t.theirs)}) for t in self.text.tensors(model)]
        return text + self.tower_tensors(model, model.vision)

    def text_name(self, theirs: str) -> str:
        """The name of a tensor of the text model."""
        return self.of_text + theirs

    @property
    def tower_types(self) -> tuple[str, ...]:
        """The values of model_type in `vision_config`, that of a config.json without one first."""
        return (self.tower_type,)

    def type_of_tower(self, vision: VisionConfig) -> str:
        return self.tower_type

    def complete_tower(self, config: Json) -> Json:
        """The `vision_config` of a config.json with the defaults of its model_type."""
        own = config.get("vision_config") or {}
        return DEFAULTS.get(own.get("model_type", self.tower_type), {}) | own

    # A family has these

    def read_tower(self, config: Json, tower: Json) -> Json:
        """Keys of `model.vision` from config.json and its complete `vision_config`."""
        raise NotImplementedError

    def write_tower(self, model: ModelConfig, vision: VisionConfig) -> tuple[Json, Json]:
        """(keys of config.json, keys of its `vision_config`)."""
        raise NotImplementedError

    def tower_tensors(self, model: ModelConfig, vision: VisionConfig) -> list[Tensor]:
        """The entries of the tower's and the projector's parameters."""
        raise NotImplementedError


def read_vit(tower: Json) -> Json:
    """The `vision_config` of CLIP and SigLIP."""
    size, patch = tower["image_size"], tower["patch_size"]
    if type(size) is not int or type(patch) is not int or size % patch:
        raise ValueError(f"vision_config.image_size={size} is no multiple of patch_size={patch}")
    sizes = {"num_layers": tower["num_hidden_layers"], "num_heads": tower["num_attention_heads"]}
    return sizes | {"grid": size // patch, "norm_epsilon": tower["layer_norm_eps"]}


def write_vit(vision: VisionConfig) -> Json:
    """The inverse of `read_vit`."""
    if vision.grid is None:
        raise ValueError("it has a table of positions")
    sizes: Json = {"num_hidden_layers": vision.num_layers, "num_attention_heads": vision.num_heads}
    return sizes | {"image_size": vision.grid * vision.patch_size, "layer_norm_eps": vision.norm_epsilon}


def vit_tensors(vision: VisionConfig, prefix: str) -> list[Tensor]:
    """The tower of CLIP and SigLIP without its norms outside the layers."""
    layer = f"{prefix}encoder.layers.{{layer}}."
    out = [
        Tensor("vision.patch", f"{prefix}embeddings.patch_embedding.weight", PATCH + OURS),
        Tensor("vision.positions", f"{prefix}embeddings.position_embedding.weight"),
        *both(f"{LAYER}attention.norm", f"{layer}layer_norm1"),
        *both(f"{LAYER}mlp.norm", f"{layer}layer_norm2"),
        Tensor(f"{LAYER}attention.output", f"{layer}self_attn.out_proj.weight", INTO),
        Tensor(f"{LAYER}attention.output_bias", f"{layer}self_attn.out_proj.bias"),
    ]
    for name in THREE:
        out.append(Tensor(f"{LAYER}attention.{name}", f"{layer}self_attn.{name[0]}_proj.weight", HEADS))
        out.append(Tensor(f"{LAYER}attention.{name}_bias", f"{layer}self_attn.{name[0]}_proj.bias", BIAS))
    for name, theirs in (("up", "fc1"), ("down", "fc2")):
        out += linear(f"{LAYER}mlp.{name}", f"{layer}mlp.{theirs}")
    return out


def mlp_projector(first: str, second: str, ours: str = "vision.projector.") -> list[Tensor]:
    """The projector `mlp` as two linear layers."""
    return linear(f"{ours}up", first) + linear(f"{ours}down", second)


class Llava(VisionLanguage):
    """LLaVA 1.5: CLIP's tower, or SigLIP's, of which the last layers may be unused, and Llama."""

    model_type, architecture = "llava", "LlavaForConditionalGeneration"
    text, tower_type = Llama(), CLIP

    @property
    def tower_types(self) -> tuple[str, ...]:
        return CLIP, SIGLIP

    def type_of_tower(self, vision: VisionConfig) -> str:
        return CLIP if vision.class_token else SIGLIP

    def read_tower(self, config: Json, tower: Json) -> Json:
        is_clip = tower.get("model_type", CLIP) == CLIP
        check_fixed(config, {"projector_hidden_act": "gelu", "multimodal_projector_bias": True})
        check_fixed(config, {"vision_feature_select_strategy": "default" if is_clip else "full"})
        vision, layer = read_vit(tower), config["vision_feature_layer"]
        last = vision["num_layers"]
        used = 0 if type(layer) is not int else layer if layer >= 0 else last + 1 + layer
        if not 1 <= used <= last:  # transformers puts the outputs of several side by side
            raise ValueError(f"vision_feature_layer={layer} is not one of {last} layers")
        width = (DEFAULTS[self.text.model_type] | config["text_config"])["hidden_size"]
        vision |= {"num_layers": used, "class_token": is_clip, "patch_bias": not is_clip, "embedding_norm": is_clip}
        return vision | {"final_norm": False, "projector_ffn_hidden_size": width}

    def write_tower(self, model: ModelConfig, vision: VisionConfig) -> tuple[Json, Json]:
        strategy = "default" if vision.class_token else "full"
        whole = {"vision_feature_layer": -1, "vision_feature_select_strategy": strategy}
        whole |= {"multimodal_projector_bias": True, "projector_hidden_act": "gelu"}
        return whole | {"image_seq_length": (vision.grid or 0) ** 2}, write_vit(vision)

    def unused(self, config: Json) -> tuple[str, ...]:
        tower = self.complete_tower(config)
        used = self.read_tower(config, tower)["num_layers"]
        layers = (f"encoder.layers.{i}." for i in range(used, tower["num_hidden_layers"]))
        others = "post_layernorm.", "head.", "embeddings.position_ids"
        return tuple(f"{self.of_tower}{name}" for name in (*layers, *others))

    def tower_tensors(self, model: ModelConfig, vision: VisionConfig) -> list[Tensor]:
        of_patches = [Tensor("vision.patch_bias", f"{self.of_tower}embeddings.patch_embedding.bias")]
        of_class = [
            Tensor("vision.class_embedding", f"{self.of_tower}embeddings.class_embedding"),
            *both("vision.embedding_norm", f"{self.of_tower}pre_layrnorm"),
        ]
        return [
            *vit_tensors(vision, self.of_tower),
            *(of_class if vision.class_token else of_patches),
            *mlp_projector("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
        ]


class Gemma3(VisionLanguage):
    """Gemma 3 from 4B on: SigLIP's tower, whose patches are averaged, and attention to both sides within images."""

    model_type, architecture = "gemma3", "Gemma3ForConditionalGeneration"
    text, tower_type = Gemma3Text(), SIGLIP

    def read_tower(self, config: Json, tower: Json) -> Json:
        vision, tokens = read_vit(tower), config["mm_tokens_per_image"]
        side = round(tokens**0.5)
        if side < 1 or side**2 != tokens or vision["grid"] % side:
            raise ValueError(f"mm_tokens_per_image={tokens} with {vision['grid']} rows of patches")
        return vision | {"merge": vision["grid"] // side, "projector": "average", "bidirectional": True}

    def write_tower(self, model: ModelConfig, vision: VisionConfig) -> tuple[Json, Json]:
        side = (vision.grid or 0) // vision.merge
        return {"mm_tokens_per_image": side**2}, write_vit(vision) | {"vision_use_head": False}

    def unused(self, config: Json) -> tuple[str, ...]:
        return (f"{self.of_tower}head.",)  # with vision_use_head, transformers' default; Gemma 3 does not call it

    def tower_tensors(self, model: ModelConfig, vision: VisionConfig) -> list[Tensor]:
        return [
            *vit_tensors(vision, self.of_tower),
            Tensor("vision.patch_bias", f"{self.of_tower}embeddings.patch_embedding.bias"),
            *both("vision.final_norm", f"{self.of_tower}post_layernorm"),
            Tensor("vision.projector.norm", "multi_modal_projector.mm_soft_emb_norm.weight"),
            Tensor("vision.projector.matrix", "multi_modal_projector.mm_input_projection_weight"),
        ]
