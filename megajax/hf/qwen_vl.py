"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: config.json, tensors."""

from megajax.config import ModelConfig
from megajax.hf.defaults import DEFAULTS, Json
from megajax.hf.llama import HEADS, Qwen2, check_fixed
from megajax.hf.tensors import Tensor, side_by_side
from megajax.hf.vision_language import BIAS, INTO, LAYER, OURS, THREE, VisionLanguage, both, linear, mlp_projector
from megajax.schema.vision import VisionConfig

PATCH_IN_TIME = "embed channel time row column"


class Qwen25VlText(Qwen2):
    """The text model of Qwen2.5-VL: positions of time, row and column."""

    model_type, architecture = "qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration"
    sections = 16, 24, 24  # by default
    older_rope = "type", "mrope"  # in `rope_scaling`, where nothing else is scaled

    def read_rope(self, config: Json) -> Json:
        config, sections = dict(config), None
        for key in ("rope_scaling", "rope_parameters"):
            own = dict(config.get(key) or {})
            sections = own.pop("mrope_section", None) or sections
            config[key] = {n: "default" if v == "mrope" else v for n, v in own.items()}
        return super().read_rope(config) | {"rope_sections": [*(sections or self.sections)]}

    def write_rope(self, model: ModelConfig) -> Json:
        if model.rope_sections is None:
            raise ValueError("it has positions of time, row and column")
        sections = {"mrope_section": [*model.rope_sections]}
        out = super().write_rope(model)
        key, name = self.older_rope
        older = out["rope_scaling"] or {key: name}
        return out | {"rope_scaling": older | sections, "rope_parameters": out["rope_parameters"] | sections}


class Qwen3VlText(Qwen25VlText):
    """The text model of Qwen3-VL: norms of queries and keys, and positions that take turns in the pairs."""

    model_type, architecture = "qwen3_vl_text", "Qwen3VLForConditionalGeneration"
    sections = 24, 20, 20
    older_rope = "rope_type", "default"

    def read_rope(self, config: Json) -> Json:
        config = dict(config)
        for key in ("rope_scaling", "rope_parameters"):
            own = dict(config.get(key) or {})
            check_fixed(own, {"mrope_interleaved": True})
            config[key] = {name: value for name, value in own.items() if name != "mrope_interleaved"}
        return super().read_rope(config) | {"rope_interleaved": True}

    def write_rope(self, model: ModelConfig) -> Json:
        own = {key: part for key, part in super().write_rope(model).items() if isinstance(part, dict)}
        return super().write_rope(model) | {key: part | {"mrope_interleaved": True} for key, part in own.items()}

    def read_options(self, config: Json) -> Json:
        check_fixed(config, {"attention_bias": False})
        return {"qk_norm": True}

    def write_options(self, model: ModelConfig) -> Json:
        return {"attention_bias": False}


class Qwen25Vl(VisionLanguage):
    """Qwen2.5-VL: a tower with windows and rotary positions, for images of any size."""

    model_type, architecture = "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"
    text, tower_type, image_token = Qwen25VlText(), "qwen2_5_vl_vision", "image_token_id"
    of_text, of_tower = "", "visual."
    older = {r"model\.visual\.": "visual.", r"model\.language_model\.": "model."}

    def with_text_config(self, config: Json) -> Json:
        vision = config.get("vision_config") or {}
        if vision.get("model_type") == self.model_type:  # as some were published
            config = config | {"vision_config": vision | {"model_type": self.tower_type}}
        if config.get("text_config"):
            return super().with_text_config(config)
        apart = ("text_config", "vision_config", "model_type", "architectures")
        text = {key: value for key, value in config.items() if key not in apart}
        return super().with_text_config(config | {"text_config": text})  # the published layout

    def read_tower(self, config: Json, tower: Json) -> Json:
        size, patch, merge = tower["window_size"], tower["patch_size"], tower["spatial_merge_size"]
        check_fixed(tower, {"in_chans": 3, "spatial_patch_size": patch})
        if size % (patch * merge):
            raise ValueError(f"vision_config.window_size={size} with patches of {patch} x {merge}")
        own = {"norm": "rmsnorm", "patch_bias": False, "window": size // patch}
        return self.read_sizes(config, tower) | own | {"global_layers": [*tower["fullatt_block_indexes"]]}

    def read_sizes(self, config: Json, tower: Json) -> Json:
        """The keys that all towers of Qwen have."""
        width = (DEFAULTS[self.text.model_type] | config["text_config"])["hidden_size"]
        if tower.get("out_hidden_size", width) != width:
            raise ValueError(f"vision_config.out_hidden_size={tower['out_hidden_size']} with hidden_size={width}")
        rope = tower.get("rope_parameters") or {}
        check_fixed(rope, {"rope_type": "axial"})
        sizes = {"num_layers": tower["depth"], "num_heads": tower["num_heads"], "merge": tower["spatial_merge_size"]}
        times = {"temporal_patch_size": tower["temporal_patch_size"]}
        return sizes | times | {"rope_theta": rope.get("rope_theta", 10000.0)}

    def write_tower(self, model: ModelConfig, vision: VisionConfig) -> tuple[Json, Json]:
        return {}, self.write_sizes(model, vision) | {
            "spatial_patch_size": vision.patch_size,
            "window_size": (vision.window or 0) * vision.patch_size,
            "fullatt_block_indexes": [*vision.global_layers],
            "in_chans": 3,
        }

    def write_sizes(self, model: ModelConfig, vision: VisionConfig) -> Json:
        """The inverse of `read_sizes`."""
        return {
            "depth": vision.num_layers,
            "num_heads": vision.num_heads,
            "temporal_patch_size": vision.temporal_patch_size,
            "spatial_merge_size": vision.merge,
            "out_hidden_size": model.hidden_size,
            "in_channels": 3,
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
        }

    def tower_tensors(self, model: ModelConfig, vision: VisionConfig) -> list[Tensor]:
        block, merger = f"{self.of_tower}blocks.{{layer}}.", f"{self.of_tower}merger."
        out = [
            *self.attention_tensors(vision, block),
            Tensor("vision.final_norm", f"{merger}ln_q.weight"),
            *mlp_projector(f"{merger}mlp.0", f"{merger}mlp.2"),
            Tensor(f"{LAYER}attention.norm", f"{block}norm1.weight"),
            Tensor(f"{LAYER}mlp.norm", f"{block}norm2.weight"),
        ]
        for name in ("gate", "up", "down"):
            out += linear(f"{LAYER}mlp.{name}", f"{block}mlp.{name}_proj")
        return out

    def attention_tensors(self, vision: VisionConfig, block: str) -> list[Tensor]:
        """The embedding of patches, and attention."""
        width = vision.hidden_size
        weights = {f"{LAYER}attention.{name}": (HEADS, width) for name in THREE}
        biases = {f"{LAYER}attention.{name}_bias": (BIAS, width) for name in THREE}
        return [
            Tensor("vision.patch", f"{self.of_tower}patch_embed.proj.weight", PATCH_IN_TIME + OURS),
            *side_by_side(f"{block}attn.qkv.weight", 0, weights),
            *side_by_side(f"{block}attn.qkv.bias", 0, biases),
            Tensor(f"{LAYER}attention.output", f"{block}attn.proj.weight", INTO),
            Tensor(f"{LAYER}attention.output_bias", f"{block}attn.proj.bias"),
        ]


class Qwen2VlText(Qwen25VlText):
    """The text model of Qwen2-VL, the same."""

    model_type, architecture = "qwen2_vl_text", "Qwen2VLForConditionalGeneration"


class Qwen2Vl(Qwen25Vl):
    """Qwen2-VL: a tower with rotary positions, whose patches see all of their image."""

    model_type, architecture = "qwen2_vl", "Qwen2VLForConditionalGeneration"
    text, tower_type = Qwen2VlText(), "qwen2_vl_vision"

    def complete_tower(self, config: Json) -> Json:
        tower = super().complete_tower(config)
        width = tower["embed_dim"]  # `hidden_size` is that of the output
        sizes = {"hidden_size": width, "intermediate_size": width * tower["mlp_ratio"]}
        return tower | sizes | {"out_hidden_size": tower["hidden_size"]}

    def read_tower(self, config: Json, tower: Json) -> Json:
        check_fixed(tower, {"in_chans": 3, "spatial_patch_size": tower["patch_size"]})
        return self.read_sizes(config, tower) | {"patch_bias": False}

    def write_tower(self, model: ModelConfig, vision: VisionConfig) -> tuple[Json, Json]:
        ratio, rest = divmod(vision.ffn_hidden_size, vision.hidden_size)
        if rest:
            raise ValueError("it has a tower whose MLP is a multiple of its width")
        sizes = {"hidden_size": model.hidden_size, "embed_dim": vision.hidden_size, "mlp_ratio": ratio}
        others = {"spatial_patch_size": vision.patch_size, "in_chans": 3}
        return {}, self.write_sizes(model, vision) | sizes | others

    def tower_tensors(self, model: ModelConfig, vision: VisionConfig) -> list[Tensor]:
        block, merger = f"{self.of_tower}blocks.{{layer}}.", f"{self.of_tower}merger."
        return [
            *self.attention_tensors(vision, block),
            *both(f"{LAYER}attention.norm", f"{block}norm1"),
            *both(f"{LAYER}mlp.norm", f"{block}norm2"),
            *linear(f"{LAYER}mlp.up", f"{block}mlp.fc1"),
            *linear(f"{LAYER}mlp.down", f"{block}mlp.fc2"),
            *both("vision.final_norm", f"{merger}ln_q"),
            *mlp_projector(f"{merger}mlp.0", f"{merger}mlp.2"),
        ]


class Qwen3Vl(Qwen25Vl):
    """Qwen3-VL's dense models: a tower with stretched and rotary positions, and DeepStack."""

    model_type, architecture = "qwen3_vl", "Qwen3VLForConditionalGeneration"
    text, tower_type = Qwen3VlText(), "qwen3_vl_vision"
    of_text, of_tower = "model.language_model.", "model.visual."
    older = {r"visual\.": of_tower, r"model\.(?!language_model\.|visual\.)": of_text}  # transformers reads no others

    def text_name(self, theirs: str) -> str:
        return f"{self.of_text}{own}" if (own := theirs.removeprefix("model.")) != theirs else theirs

    def read_tower(self, config: Json, tower: Json) -> Json:
        rows, layers = tower["num_position_embeddings"], [*tower["deepstack_visual_indexes"]]
        if (grid := round(rows**0.5)) ** 2 != rows or not grid:
            raise ValueError(f"vision_config.num_position_embeddings={rows} is not the square of a number")
        if layers != sorted({*layers}):
            raise ValueError(f"vision_config.deepstack_visual_indexes={layers} is not in increasing order")
        own = {"grid": grid, "interpolate": True, "deepstack_layers": layers}
        return self.read_sizes(config, tower) | own

    def write_tower(self, model: ModelConfig, vision: VisionConfig) -> tuple[Json, Json]:
        if vision.grid is None:
            raise ValueError("it has a table of positions")
        layers = {"deepstack_visual_indexes": [*vision.deepstack_layers]}
        return {}, self.write_sizes(model, vision) | layers | {"num_position_embeddings": vision.grid**2}

    def tower_tensors(self, model: ModelConfig, vision: VisionConfig) -> list[Tensor]:
        tower, block = self.of_tower, f"{self.of_tower}blocks.{{layer}}."
        out = [
            *self.attention_tensors(vision, block),
            Tensor("vision.patch_bias", f"{tower}patch_embed.proj.bias"),
            Tensor("vision.positions", f"{tower}pos_embed.weight"),
            *both(f"{LAYER}attention.norm", f"{block}norm1"),
            *both(f"{LAYER}mlp.norm", f"{block}norm2"),
            *linear(f"{LAYER}mlp.up", f"{block}mlp.linear_fc1"),
            *linear(f"{LAYER}mlp.down", f"{block}mlp.linear_fc2"),
            *both("vision.final_norm", f"{tower}merger.norm"),
            *mlp_projector(f"{tower}merger.linear_fc1", f"{tower}merger.linear_fc2"),
        ]
        for i in range(len(vision.deepstack_layers)):
            ours, merger = f"vision.projector.deepstack.{i}.", f"{tower}deepstack_merger_list.{i}."
            out += both(f"{ours}norm", f"{merger}norm")
            out += mlp_projector(f"{merger}linear_fc1", f"{merger}linear_fc2", ours)
        return out
