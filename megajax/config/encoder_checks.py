"""Checks of the section `model.encoder`."""

from megajax.config.extensions import settings_of
from megajax.config.sentences import fail, format_axis, format_keys, listed
from megajax.layout.kinds import ENCODER, block_layers, extra_of, layer_kinds
from megajax.layout.sublayers import read_streams
from megajax.options.registered import ENCODER_KIND, ENCODERS, NO_ENCODER
from megajax.schema.config import Config
from megajax.schema.model import LAYERS


def check_encoder(config: Config) -> None:
    """Raise ConfigError for an unknown encoder, wrong settings, and sublayers that read another stream."""
    kind = config.model.encoder.kind
    if kind in ENCODERS:
        settings_of(config, ENCODERS[kind], "model.encoder")
    elif kind not in (NO_ENCODER, LAYERS):
        known = listed([NO_ENCODER, LAYERS, *sorted(ENCODERS)])
        cure = f"use {known}, or name the module that registers it in run.extensions"
        fail(config, f"{format_keys(config, ENCODER_KIND)} is not a registered encoder", cure, ENCODER_KIND)
    _check_streams(config, ENCODER if kind == LAYERS else kind)


def _check_streams(config: Config, given: str) -> None:
    """The layers read the stream that an encoder gives, and no other."""
    kinds = {block: read_streams(block) for block in block_layers(config.model)}
    streams = {stream: (block, part) for block, read in kinds.items() for stream, part in read.items()}
    if given != NO_ENCODER and given not in streams:
        problem = f"no sublayer reads the stream of {format_keys(config, ENCODER_KIND)}"
        cure = f"add a kind of block that reads it to model.block_pattern, or remove {ENCODER_KIND}"
        fail(config, problem, cure, ENCODER_KIND)
    for stream, (block, part) in streams.items():
        if stream != given:
            problem = f"{part} (block {block}) reads the stream {stream}"
            problem += f", but {format_keys(config, ENCODER_KIND)}"
            cure = f"set {ENCODER_KIND}={LAYERS if stream == ENCODER else stream}, or remove {block} from"
            fail(config, problem, f"{cure} model.block_pattern", "model.block_pattern")


def check_encoder_on_mesh(config: Config, sizes: dict[str, int]) -> None:
    """Raise ConfigError for an encoder on a mesh that it cannot run on."""
    if config.model.encoder.kind == NO_ENCODER:
        return
    last, extra = layer_kinds(config.model)[-1].block, extra_of(config.model)
    if sizes["pipeline"] > 1 and extra and read_streams(last):
        axis, modules = format_axis(config, sizes, "pipeline"), format_keys(config, extra.key)
        problem = f"{axis}, whose stages share the tokens of {modules}"
        problem += f", but these read the stream of {format_keys(config, ENCODER_KIND)}"
        fail(config, problem, f"set mesh.pipeline=1 or {extra.key}=0", "mesh.pipeline", extra.key)
    for name, length in _lengths(config).items():
        if length % sizes["context"]:
            problem = f"{format_axis(config, sizes, 'context')} does not divide the {length} tokens of {name}"
            problem += f", a field of {format_keys(config, ENCODER_KIND)}"
            fail(config, problem, "change the settings of the encoder, or mesh.context", "mesh.context", ENCODER_KIND)


def _lengths(config: Config) -> dict[str, int]:
    """The length of an encoder's sequences, by batch field."""
    if (length := config.model.encoder.sequence_length) is not None:
        return {"encoder_tokens": length}
    registered = ENCODERS[config.model.encoder.kind]
    encoder = registered(config.model, settings_of(config, registered, "model.encoder"))
    return {name: length for name, (_, length, *_) in encoder.fields().items()}
