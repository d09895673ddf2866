"""Checks of the section `model.vision`."""

from megajax.config.sentences import divisors, fail, format_axis, format_keys, listed
from megajax.options.context import with_whole_heads
from megajax.schema.config import Config

AT = "model.vision"


def check_vision(config: Config) -> None:
    """Raise ConfigError for a tower, or positions of images, that no mesh can run."""
    model, vision = config.model, config.model.vision
    if (sections := model.rope_sections) is not None and 2 * sum(sections) != model.rotary_dim:
        key = "model.rope_sections"
        problem = f"{format_keys(config, key)} has {sum(sections)} pairs"
        fail(config, problem, f"make their sum {model.rotary_dim // 2}, half of {model.rotary_dim}", key)
    if sections is not None and model.rope_interleaved and sections[0] < max(sections[1:]):
        keys = "model.rope_interleaved", "model.rope_sections"
        problem = f"{format_keys(config, keys[0])} gives row and column no more pairs than time, but"
        fail(config, f"{problem} {format_keys(config, keys[1])}", "make the first number the largest", *keys)
    if vision is None:
        return
    if vision.patches_per_row % vision.block:
        keys = f"{AT}.patches_per_row", f"{AT}.merge"
        problem = f"{format_keys(config, keys[0])} is not a multiple of the {vision.block} patches of an embedding"
        fail(config, f"{problem} ({format_keys(config, keys[1])})", f"make {keys[0]} one", *keys)
    if vision.fixed_grid is None and vision.hidden_size // vision.num_heads % 4:
        keys = f"{AT}.hidden_size", f"{AT}.num_heads"
        problem = f"{format_keys(config, keys[0])} / {format_keys(config, keys[1])} is not a multiple of 4"
        fail(config, f"{problem}, as rotary positions by row and column need", f"change it, or set {AT}.grid", *keys)
    for key, layers in {"global_layers": vision.global_layers, "deepstack_layers": vision.deepstack_layers}.items():
        if any(layer >= vision.num_layers for layer in layers):
            problem = f"{format_keys(config, f'{AT}.{key}')} names a layer that the tower does not have"
            fail(config, problem, f"use 0 to {vision.num_layers - 1}", f"{AT}.{key}", f"{AT}.num_layers")
    key, layers = f"{AT}.deepstack_layers", vision.deepstack_layers
    if [*layers] != sorted({*layers}):
        fail(config, f"{format_keys(config, key)} is not in increasing order", "sort it, each layer once", key)
    if len(layers) > model.num_layers:
        keys = key, "model.num_layers"
        problem = f"{format_keys(config, key)} has {len(layers)} layers, one for each of the model's first ones, but"
        fail(config, f"{problem} {format_keys(config, keys[1])}", "remove some", *keys)


def check_vision_on_mesh(config: Config, sizes: dict[str, int]) -> None:
    """Raise ConfigError for a tower that a mesh cannot divide."""
    vision, tower = config.model.vision, config.of_vision
    if vision is None or tower is None:
        return
    widths = {"num_heads": vision.num_heads, "ffn_hidden_size": vision.ffn_hidden_size}
    widths |= {"projector_ffn_hidden_size": vision.projector_ffn_hidden_size} if vision.projector == "mlp" else {}
    for name, width in widths.items():
        if width % sizes["tensor"]:
            problem = f"{format_axis(config, sizes, 'tensor')} does not divide {format_keys(config, f'{AT}.{name}')}"
            fail(config, problem, f"use mesh.tensor={listed(divisors(width))}", "mesh.tensor", f"{AT}.{name}")
    context, key = sizes["context"], f"{AT}.patches_per_row"
    each = vision.block * context * sizes["tensor"]
    if vision.patches_per_row % each:
        axes = " x ".join(format_axis(config, sizes, axis) for axis in ("context", "tensor"))
        problem = f"{axes} does not divide {format_keys(config, key)} into parts of whole image embeddings"
        fail(config, problem, f"make {key} a multiple of {each}", key, "mesh.context", "mesh.tensor")
    heads, strategy = vision.num_heads // sizes["tensor"], tower.context_strategy(sizes)
    if heads % strategy.head_shards(context):
        setting = format_keys(config, "communication.context")
        problem = f"{setting} divides the heads of {format_keys(config, f'{AT}.num_heads')} over"
        problem += f" {format_axis(config, sizes, 'context')}, which does not divide the {heads} of a device"
        others = listed(with_whole_heads())
        fail(config, problem, f"use communication.context={others}", "communication.context", f"{AT}.num_heads")
