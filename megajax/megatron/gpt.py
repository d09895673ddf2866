"""Megatron-Core's GPTModel: how its parameters correspond to megajax's.

Megatron's matrices are [out, in]. `linear_qkv` has for each group of query heads its queries, its key and its value;
`linear_fc1` has the gate before the up-projection. In latent attention a query is [without positions; rotated], here
[rotated; without positions], and the pairs that are rotated are (2i, 2i + 1), here (i, i + R/2).
"""

from megajax.config import ModelConfig
from megajax.hf.reader import unpadded
from megajax.hf.tensors import Selected, Tensor, side_by_side, tensors_by_name, whole_shape
from megajax.layout.kinds import block_layers, extra_of, is_gated
from megajax.model import Transformer, parameters
from megajax.model.block import layer_state, state_by_name

LINEAR, HEADS = "out in -> in out", "(heads head) in -> in heads head"
MODULE = "transformer_layer."  # of a prediction module


def entries(model: ModelConfig) -> list[Tensor]:
    """An entry of each parameter, and of the layers' state; names as `distributed.MegatronTensors` has them."""
    out = [Tensor("embedding.tokens", "embedding.word_embeddings.weight")]
    if model.position == "learned":
        out.append(Tensor("embedding.positions", "embedding.position_embeddings.weight"))
    if not model.tie_embeddings:
        out.append(Tensor("head", "output_layer.weight", LINEAR))
    out += _norm(model, "final_norm", "decoder.final_layernorm")
    for kind in block_layers(model):
        out += _block(model, kind, f"blocks.{kind}.", "decoder.layers.{layer}.")
    if extra := extra_of(model):
        ours, theirs = f"blocks.{extra.name}.", "mtp.layers.{layer}."
        last = max(block_layers(model), key=lambda kind: block_layers(model)[kind][-1])
        out += _block(model, last, ours, theirs + MODULE)
        out += _norm(model, f"{ours}join.embedding_norm", f"{theirs}enorm")
        out += _norm(model, f"{ours}join.stream_norm", f"{theirs}hnorm")
        out.append(Tensor(f"{ours}join.projection", f"{theirs}eh_proj.weight", LINEAR))
        out += _norm(model, f"{ours}final_norm", f"{theirs}final_layernorm")
    return out


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of `entries`, without the vocabulary's padding."""
    shapes = {name: p.shape for name, p in parameters(Transformer(model)).items()}
    shapes |= {name: array.shape for name, array in state_by_name(layer_state(model)).items()}
    held = [tensor for tensor in entries(model) if tensor.ours in shapes]
    of_part = {t: unpadded(t.ours, shapes[t.ours], model)[t.stacked :] for t in held}
    parts = tensors_by_name(held, model).items()
    return {name: whole_shape((tensor, of_part[tensor]) for tensor, _ in own) for name, own in parts}


def _norm(model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
    out = [Tensor(ours, f"{theirs}.weight")]
    return out + ([Tensor(f"{ours}_bias", f"{theirs}.bias")] if model.has_norm_bias else [])


def _block(model: ModelConfig, kind: str, ours: str, theirs: str) -> list[Tensor]:
    feed_forward = "moe" if kind == "moe" else "mlp"
    out = _norm(model, f"{ours}attention.norm", f"{theirs}input_layernorm")
    out += _norm(model, f"{ours}{feed_forward}.norm", f"{theirs}pre_mlp_layernorm")
    attention = _latent_attention if model.is_latent else _attention
    out += attention(model, f"{ours}attention.", f"{theirs}self_attention.")
    return out + (_moe if kind == "moe" else _mlp)(model, f"{ours}{feed_forward}.", f"{theirs}mlp.")


def _attention(model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
    K, group = model.num_kv_heads, model.num_heads // model.num_kv_heads + 2
    columns = {
        "query": [k * group + i for k in range(K) for i in range(group - 2)],
        "key": [k * group + group - 2 for k in range(K)],
        "value": [k * group + group - 1 for k in range(K)],
    }
    out = [Tensor(f"{ours}output", f"{theirs}linear_proj.weight", "out (heads head) -> heads head out")]
    for name, indices in columns.items():
        heads = Selected("heads", tuple(indices), K * group)
        out.append(Tensor(f"{ours}{name}", f"{theirs}linear_qkv.weight", HEADS, selected=heads))
        if model.attention_bias:
            bias = "(heads head) -> heads head"
            out.append(Tensor(f"{ours}{name}_bias", f"{theirs}linear_qkv.bias", bias, selected=heads))
    if model.attention_bias is True:
        out.append(Tensor(f"{ours}output_bias", f"{theirs}linear_proj.bias"))
    if model.attention_sinks:
        out.append(Tensor(f"{ours}sinks", f"{theirs}core_attention.softmax_offset"))
    for name in ("query", "key") if model.qk_norm else ():
        out.append(Tensor(f"{ours}{name}_norm", f"{theirs}{name[0]}_layernorm.weight"))
        if model.qk_norm == "layernorm":
            out.append(Tensor(f"{ours}{name}_norm_bias", f"{theirs}{name[0]}_layernorm.bias"))
    return out


def _latent_attention(model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
    n, r, v = model.qk_nope_head_dim or 0, model.qk_rope_head_dim or 0, model.v_head_dim or 0
    latent = model.kv_lora_rank or 0
    pairs = [*range(0, r, 2), *range(1, r, 2)]  # their number of each of our rotated elements
    query = Selected("head", (*(n + i for i in pairs), *range(n)), n + r)
    out = [Tensor(f"{ours}output", f"{theirs}linear_proj.weight", "out (heads head) -> heads head out")]
    if model.q_lora_rank:
        out.append(Tensor(f"{ours}query_down", f"{theirs}linear_q_down_proj.weight", LINEAR))
        out.append(Tensor(f"{ours}query_norm", f"{theirs}q_layernorm.weight"))
        out.append(Tensor(f"{ours}query", f"{theirs}linear_q_up_proj.weight", HEADS, selected=query))
    else:
        out.append(Tensor(f"{ours}query", f"{theirs}linear_q_proj.weight", HEADS, selected=query))
    for name, rows in (("key_value_down", range(latent)), ("rotary_key", [latent + i for i in pairs])):
        own = Selected("out", tuple(rows), latent + r)
        out.append(Tensor(f"{ours}{name}", f"{theirs}linear_kv_down_proj.weight", LINEAR, selected=own))
    out.append(Tensor(f"{ours}key_value_norm", f"{theirs}kv_layernorm.weight"))
    up = f"{theirs}linear_kv_up_proj.weight"
    for name, first, width in (("key", 0, n), ("value", n, v)):
        own = Selected("head", tuple(range(first, first + width)), n + v)
        out.append(Tensor(f"{ours}{name}", up, HEADS, selected=own))
    return out


def _mlp(model: ModelConfig, ours: str, theirs: str, names: tuple[str, str, str] = ("gate", "up", "down")):
    """Of an MLP, an expert or a shared expert; Megatron's `linear_fc1` has gate and up."""
    gate, up, down = names
    width = model.ffn_hidden_size
    if "local_experts" in theirs:
        width = model.expert_ffn_hidden_size or 0
    elif "shared_experts" in theirs:
        width = model.shared_expert_ffn_hidden_size
    first, second = f"{theirs}linear_fc1", f"{theirs}linear_fc2"
    members = (gate, up) if is_gated(model) else (up,)
    out = side_by_side(f"{first}.weight", 0, {f"{ours}{name}": (LINEAR, width) for name in members})
    out.append(Tensor(f"{ours}{down}", f"{second}.weight", LINEAR))
    if model.mlp_bias:  # then there are no shared experts
        out += side_by_side(f"{first}.bias", 0, {f"{ours}{name}_bias": ("", width) for name in members})
        out.append(Tensor(f"{ours}{down}_bias", f"{second}.bias"))
    return out


def _moe(model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
    out = [Tensor(f"{ours}router", f"{theirs}router.weight", LINEAR)]
    if model.router.logit_bias:
        out.append(Tensor(f"{ours}router_bias", f"{theirs}router.bias"))
    if model.router.expert_bias:
        out.append(Tensor(f"{ours}expert_bias", f"{theirs}router.expert_bias"))
    out += _mlp(model, ours, f"{theirs}experts.local_experts.{{expert}}.")
    if model.shared_expert_ffn_hidden_size:
        out += _mlp(model, ours, f"{theirs}shared_experts.", ("shared_gate", "shared_up", "shared_down"))
    if model.shared_expert_gate:
        out.append(Tensor(f"{ours}shared_router", f"{theirs}shared_experts.gate_weight"))
    return out
