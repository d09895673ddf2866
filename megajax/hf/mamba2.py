"""Mamba-2 in config.json and in tensors, as Granite 4, Bamba, Falcon-H1 and Nemotron-H have it."""

import math

from megajax.config import ModelConfig
from megajax.hf.defaults import Json
from megajax.hf.llama import BIAS, HEADS, INTO, check_fixed
from megajax.hf.tensors import Tensor, side_by_side
from megajax.layout.kinds import MAMBA2, has_sublayer

CONVOLUTION = "(heads head) () whole -> whole heads head"
# config.json and `model.mamba2`
SIZES = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "num_groups",
    "mamba_d_state": "state_dim",
    "mamba_d_conv": "conv_kernel",
}
FIXED: Json = {"mamba_conv_bias": True, "mamba_proj_bias": False}
LIMITS, INFINITY = "time_step_limit", {"__float__": "Infinity"}


def read_mamba2(config: Json) -> Json:
    """`model.mamba2`."""
    check_fixed(config, FIXED)
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    if config["mamba_d_head"] == "auto":
        config = config | {"mamba_d_head": inner // config["mamba_n_heads"]}
    check_whole(config, "mamba_d_head")
    check_product(config, ("mamba_n_heads", "mamba_d_head"), inner)
    return {ours: config[theirs] for theirs, ours in SIZES.items()} | read_limits(config)


def check_whole(config: Json, *keys: str) -> None:
    """Raise ValueError for a value that is no whole number."""
    if wrong := next((key for key in keys if type(config[key]) is not int), None):
        raise ValueError(f"{wrong}={config[wrong]} is not a whole number")


def check_product(config: Json, keys: tuple[str, str], product: int) -> None:
    """Raise ValueError unless two keys' product is `product`."""
    if config[keys[0]] * config[keys[1]] != product:
        raise ValueError(f"{keys[0]}={config[keys[0]]} times {keys[1]}={config[keys[1]]} is not {product}")


def read_limits(config: Json) -> Json:
    """The least step; transformers' new tokens have no limits."""
    limits = config.get(LIMITS, [0.0, INFINITY])
    if not isinstance(limits, list) or len(limits) != 2 or limits[1] not in (INFINITY, math.inf):
        raise ValueError(f"{LIMITS}={limits} has another upper limit than {INFINITY}")
    return {"min_step": limits[0]} if limits[0] else {}


def write_limits(model: ModelConfig) -> Json:
    return {LIMITS: [model.mamba2.min_step, INFINITY]}


def write_mamba2(model: ModelConfig) -> Json:
    """The keys of config.json for `model.mamba2`."""
    return FIXED | {theirs: getattr(model.mamba2, ours) for theirs, ours in SIZES.items()} | write_limits(model)


def write_expanded(model: ModelConfig) -> Json:
    """These of a family whose heads together are a multiple of hidden_size; transformers checks them without layers."""
    if not has_sublayer(model, MAMBA2):
        return {"mamba_n_heads": 1, "mamba_d_head": model.hidden_size, "mamba_expand": 1}
    return write_mamba2(model) | {"mamba_expand": expansion(model)}


def expansion(model: ModelConfig) -> int:
    """The width of all heads together as a multiple of that of the residual stream; ValueError if it is none."""
    inner = model.mamba2.num_heads * model.mamba2.head_dim
    if inner % model.hidden_size:
        raise ValueError(f"its heads' width {inner} is a multiple of hidden_size")
    return inner // model.hidden_size


def mamba2_tensors(model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
    """Those of one kind of block."""
    c = model.mamba2
    inner, states = c.num_heads * c.head_dim, c.num_groups * c.state_dim
    parts = {"value": inner, "key": states, "query": states}
    projected = {"gate": inner} | parts | {"step": c.num_heads}
    projections = {f"{ours}{name}": (HEADS, n) for name, n in projected.items()}
    windows = {f"{ours}{name}_convolution": (CONVOLUTION, n) for name, n in parts.items()}
    biases = {f"{ours}{name}_bias": (BIAS, n) for name, n in parts.items()}
    out = [
        *side_by_side(f"{theirs}in_proj.weight", 0, projections),
        *side_by_side(f"{theirs}conv1d.weight", 0, windows),
        *side_by_side(f"{theirs}conv1d.bias", 0, biases),
        Tensor(f"{ours}decay_rate", f"{theirs}A_log"),
        Tensor(f"{ours}step_bias", f"{theirs}dt_bias"),
        Tensor(f"{ours}skip", f"{theirs}D"),
        Tensor(f"{ours}output", f"{theirs}out_proj.weight", INTO),
    ]
    if c.output_norm != "none":
        out.append(Tensor(f"{ours}output_norm", f"{theirs}norm.weight", BIAS))
    return out
