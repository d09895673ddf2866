"""The kinds of layers that a model has, and the kind of each layer."""

from typing import Any, NamedTuple

from megajax.layout.extra_layers import ExtraLayers
from megajax.layout.prediction_modules import MODULES
from megajax.options.activations import ACTIVATIONS
from megajax.schema.fields import cached, shortest_pattern
from megajax.schema.model import LAYERS, ModelConfig

DENSE, MOE = "dense", "moe"
FIRST = "first"  # a dense layer that reads normalised embeddings (`model.embedding_norm`)
ATTENTION, MLP, GATED_DELTANET, KDA, MAMBA2 = "attention", "mlp", "gated_deltanet", "kda", "mamba2"
CROSS_ATTENTION = "cross_attention"
DECODER = "decoder"  # the layers of a model with an encoder of layers
ENCODER = "encoder"  # its stream
IMAGES = "images"  # the stream of a vision tower: image embeddings
EXTRA = (MODULES,)  # the registered layers after the model's; a model has those of one kind at most


class Declared(NamedTuple):
    """What checks ask about a built-in sublayer: they do not import its module, which needs jax."""

    lacks: frozenset[str] = frozenset()  # of `layout.sublayers.ABILITIES`
    in_order: bool = False  # `Sublayer.IN_ORDER`
    has_experts: bool = False  # `Sublayer.HAS_EXPERTS`
    streams: tuple[str, ...] = ()  # `Sublayer.STREAMS`


RECURRENT = Declared(frozenset({"bidirectional", "layer_pattern"}), in_order=True)
DECLARED = {
    ATTENTION: Declared(),
    MLP: Declared(),
    MOE: Declared(has_experts=True),
    CROSS_ATTENTION: Declared(frozenset({"drafts", "lora", "qk_clip"}), streams=(ENCODER,)),
    GATED_DELTANET: RECURRENT,
    KDA: RECURRENT,
    MAMBA2: RECURRENT,
}
# The built-in kinds of blocks, with the names of their sublayers in order.
BUILT_IN_BLOCKS = {
    DENSE: (ATTENTION, MLP),
    FIRST: (ATTENTION, MLP),
    MOE: (ATTENTION, MOE),
    DECODER: (ATTENTION, CROSS_ATTENTION, MLP),
    GATED_DELTANET: (GATED_DELTANET, MLP),
    f"{GATED_DELTANET}_moe": (GATED_DELTANET, MOE),
    KDA: (KDA, MLP),
    f"{KDA}_moe": (KDA, MOE),
    f"{MAMBA2}_mlp": (MAMBA2, MLP),
    f"{MAMBA2}_moe": (MAMBA2, MOE),
    "attention_mamba2": (ATTENTION, MAMBA2, MLP),
    # Of Nemotron-H, whose layers have one sublayer
    MAMBA2: (MAMBA2,),
    ATTENTION: (ATTENTION,),
    MLP: (MLP,),
    "experts": (MOE,),
}
# Sublayers that read the input of another one of their block, with its norm
PARALLEL = {"attention_mamba2": {MAMBA2: ATTENTION}}
# Sublayers without the norm before them
WITHOUT_NORM = {FIRST: (ATTENTION,)}
KIND_OF = {sublayers: kind for kind, sublayers in BUILT_IN_BLOCKS.items() if kind not in WITHOUT_NORM}
# The sublayers' classes of each kind by name, in order; `model.block.register_block` fills it.
KINDS: dict[str, dict[str, type[Any]]] = {}


class LayerKind(NamedTuple):
    """The properties of a layer that its program depends on."""

    block: str  # a kind of BUILT_IN_BLOCKS or a registered one: the key of its parts in `layout.kinds.KINDS`
    window: int | None  # number of tokens that it attends to; None: all
    rope: bool = True  # whether it has the positions of model.position=rope

    @property
    def has_experts(self) -> bool:
        """Whether a part of its block divides its weights over `mesh.experts_over`."""
        if self.block in BUILT_IN_BLOCKS:
            return any(DECLARED[name].has_experts for name in BUILT_IN_BLOCKS[self.block])
        return any(part.HAS_EXPERTS for part in KINDS.get(self.block, {}).values())


@cached
def layer_kinds(model: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    attention = attention_kinds(model)
    return tuple(LayerKind(block, *attention[i % len(attention)]) for i, block in enumerate(_blocks(model)))


@cached
def block_layers(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The layers of each kind of block in the model."""
    blocks = [kind.block for kind in layer_kinds(model)]
    return {name: tuple(i for i, block in enumerate(blocks) if block == name) for name in sorted(set(blocks))}


def extra_of(model: ModelConfig) -> ExtraLayers | None:
    """The declarations of the layers after the model's, if it has some."""
    return next((each for each in EXTRA if each.count(model)), None)


def extra_layers(model: ModelConfig) -> tuple[int, ...]:
    """The numbers of the layers after the model's: they continue its own."""
    extra = extra_of(model)
    return tuple(range(model.num_layers, model.num_layers + extra.count(model))) if extra else ()


def extra_kind(model: ModelConfig) -> LayerKind:
    """The kind of these layers: they have the parts and the attention of the model's last one."""
    extra = extra_of(model)
    assert extra is not None
    return layer_kinds(model)[-1]._replace(block=extra.name)


def without_extra() -> dict[str, int]:
    """The settings of a model without layers after its own."""
    return {each.layers: 0 for each in EXTRA}


def kind_of_layer(model: ModelConfig, layer: int) -> LayerKind:
    """The kind of a layer of the model or after it."""
    return layer_kinds(model)[layer] if layer < model.num_layers else extra_kind(model)


def stacked_layers(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The layers in each stack of parameters: those of each kind of block, and those after the model's."""
    extra = extra_of(model)
    return block_layers(model) | ({extra.name: extra_layers(model)} if extra else {})


def expert_layers(model: ModelConfig) -> tuple[int, ...]:
    """The layers with experts in the order of their metrics: by kind of block; extra layers after the last's."""
    kinds, found = layer_kinds(model), list[int]()
    for block, layers in block_layers(model).items():
        if kinds[layers[0]].has_experts:
            found += [*layers, *(extra_layers(model) if block == kinds[-1].block else ())]
    return tuple(found)


def mlp_widths(model: ModelConfig) -> tuple[str, ...]:
    """The keys of `model` for the widths of its MLPs and experts."""
    dense = ("ffn_hidden_size",) if has_sublayer(model, MLP) else ()
    return dense + (("shared_expert_ffn_hidden_size", "expert_ffn_hidden_size") if model.num_experts else ())


def has_sublayer(model: ModelConfig, name: str) -> bool:
    """Whether a layer of a built-in kind has this built-in sublayer."""
    return any(name in BUILT_IN_BLOCKS.get(block, ()) for block in block_layers(model))


def may_have(model: ModelConfig, *names: str) -> bool:
    """Whether a layer has one of these built-in sublayers, or is of a kind that is not built in."""
    return any(not {*names}.isdisjoint(BUILT_IN_BLOCKS.get(block, names)) for block in block_layers(model))


def reads_ffn_width(model: ModelConfig) -> bool:
    """Whether a layer may have an MLP of `model.ffn_hidden_size`."""
    return may_have(model, MLP) or model.encoder.kind == LAYERS


def deepstack_count(model: ModelConfig) -> int:
    """The number of the model's first layers after which image features are added (DeepStack)."""
    return 0 if model.vision is None else len(model.vision.deepstack_layers)


def is_gated(model: ModelConfig) -> bool:
    """Whether MLPs and experts have a gate."""
    return ACTIVATIONS[model.activation].is_gated


def is_mixed(model: ModelConfig) -> bool:
    """Whether the layers have blocks of several kinds."""
    return len(block_layers(model)) > 1


def layer_windows(model: ModelConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer of one period of `model.layer_pattern`."""
    if model.layer_pattern is None:
        return (model.sliding_window,)
    return tuple(model.sliding_window if kind == "local" else None for kind in model.layer_pattern)


def attention_kinds(model: ModelConfig) -> tuple[tuple[int | None, bool], ...]:
    """The (window, rope) of `LayerKind` for each layer of one period of both patterns."""
    windows, rope = layer_windows(model), [kind == "rope" for kind in model.rope_pattern or ("rope",)]
    layers = [(windows[i % len(windows)], rope[i % len(rope)]) for i in range(model.num_layers)]
    return shortest_pattern(tuple(layers), model.num_layers)


def _blocks(model: ModelConfig) -> list[str]:
    """The kind of block of each layer."""
    if model.block_pattern:
        return [model.block_pattern[i % len(model.block_pattern)] for i in range(model.num_layers)]
    if model.encoder.kind == LAYERS:
        return [DECODER] * model.num_layers
    experts, first, interval = model.num_experts is not None, model.first_dense_layers, model.moe_layer_interval
    blocks = [MOE if experts and i >= first and (i + 1) % interval == 0 else DENSE for i in range(model.num_layers)]
    return [FIRST, *blocks[1:]] if model.embedding_norm else blocks
