"""The network of a line: shapes, norms, positions, attention."""

import math
from collections.abc import Callable
from typing import Any

from megajax.config.sentences import divisors, listed
from megajax.schema.fields import shortest_pattern
from megajax.tools.from_megatron.arguments import YARN
from megajax.tools.from_megatron.parallel import layer_count
from megajax.tools.from_megatron.translation import Translation

GPT2_TOKENS = 50257  # of GPT2BPETokenizer
CLAMPED = (1.0, 7.0)  # the linear offset and the clamp of clamped_swiglu
LATENT_EPSILON = 1e-6  # of the norms of latents, here


def translate_model(t: Translation) -> None:
    """All keys of the model but those of experts."""
    t.put("model.num_layers", layer_count(t), "num_layers", "encoder_num_layers")
    t.use("decoder_num_layers")
    for key, name in (("hidden_size", "hidden_size"), ("num_heads", "num_attention_heads")):
        t.put(f"model.{key}", t.arguments.required(name), name)
    _vocabulary(t)
    _mlp(t)
    _norms(t)
    if t["multi_latent_attention"]:
        _latent_attention(t)
    else:
        _attention(t)
    _logits(t)
    _positions(t)
    _windows(t)
    if t.given("attention_backend", "use_flash_attn"):
        plain = t["attention_backend"] in ("unfused", "local")
        t.put("kernels.attention", "reference" if plain else "auto", "attention_backend", "use_flash_attn")
    t.put("model.tie_embeddings", not t["untie_embeddings_and_output_weights"], "untie_embeddings_and_output_weights")
    t.put("model.dropout", t["hidden_dropout"], "hidden_dropout")
    if t["attention_dropout"]:
        t.differs("attention-dropout", "attention_dropout")
    t.put("model.init_std", t["init_method_std"], "init_method_std")
    _width(t)
    if t["mtp_num_layers"]:
        t.put("model.mtp_layers", t["mtp_num_layers"], "mtp_num_layers")
        t.put("model.mtp_loss_weight", t["mtp_loss_scaling_factor"], "mtp_loss_scaling_factor")
        masked = t["eod_mask_loss"] and t["calculate_per_token_loss"]
        if t["num_experts"] or masked or t["reset_attention_mask"]:
            t.differs("mtp-mask", "mtp_num_layers")


def _vocabulary(t: Translation) -> None:
    """The padded size: Megatron's softmax has the padding too."""
    multiple = t["make_vocab_size_divisible_by"] * t["tensor_model_parallel_size"]
    names = ("make_vocab_size_divisible_by", "tensor_model_parallel_size")
    if (size := t["padded_vocab_size"]) is not None:
        t.put("model.vocab_size", size, "padded_vocab_size")
        t.put("model.vocab_multiple", math.gcd(size, multiple), "padded_vocab_size", *names)
        return
    size = t["vocab_size"]
    if size is None and t["tokenizer_type"] == "GPT2BPETokenizer":
        size = GPT2_TOKENS
    if size is None:
        tokenizer = t.arguments.shown("tokenizer_type") if t.given("tokenizer_type") else "the tokenizer"
        cure = "add --vocab-size with the number of tokens to the line"
        raise t.arguments.fail(f"the size of the vocabulary is only in the files of {tokenizer}", cure)
    t.use("pad_vocab_size", "tokenizer_type")
    multiple = multiple if t["pad_vocab_size"] else 1
    padded = -(-size // multiple) * multiple
    source = "vocab_size" if t["vocab_size"] is not None else "tokenizer_type"
    t.put("model.vocab_size", padded, source, *(names if padded != size else ()))
    t.put("model.vocab_multiple", multiple, "pad_vocab_size", *names, note="Megatron's default x tensor-parallel size")


def _mlp(t: Translation) -> None:
    hidden, width = t["hidden_size"], t["ffn_hidden_size"]
    if width is None:  # Megatron's rules
        width = int(4 * hidden * 2 / 3 / 64) * 64 if t["swiglu"] else 4 * hidden
    t.put("model.ffn_hidden_size", width, "ffn_hidden_size", note="Megatron's default for its activation")
    names = ("swiglu", "squared_relu", "quick_geglu", "openai_gelu")
    chosen = [name for name in names[:3] if t[name]]
    if len(chosen) > 1:
        raise t.arguments.fail(
            " and ".join(t.arguments.shown(name) for name in chosen) + " exclude each other", "remove one"
        )
    if t["quick_geglu"]:
        clamp = ("glu_linear_offset", "activation_func_clamp_value")
        if (t[clamp[0]], t[clamp[1]]) != CLAMPED:
            t.refuse(
                "it exists as in GPT-OSS, with --glu-linear-offset 1.0 and --activation-func-clamp-value 7.0",
                "quick_geglu",
            )
        t.put("model.activation", "clamped_swiglu", "quick_geglu", *clamp)
    elif t["glu_linear_offset"] or t["activation_func_clamp_value"] is not None:
        t.refuse("they exist with --quick-geglu only", *t.given("glu_linear_offset", "activation_func_clamp_value"))
    elif t["swiglu"] or t["squared_relu"]:
        t.put("model.activation", "swiglu" if t["swiglu"] else "relu2", *names)
    else:
        _gelu(t)
    biases = t["add_bias_linear"]
    t.put("model.mlp_bias", biases, "add_bias_linear")


def _gelu(t: Translation) -> None:
    """Megatron's GELU is exact unless it is fused with a bias."""
    exact = not t["openai_gelu"] and not (t["add_bias_linear"] and t["bias_gelu_fusion"])
    names = ("openai_gelu", "bias_gelu_fusion")
    if exact:
        t.put("model.activation", "gelu_exact", *names, "add_bias_linear")
    else:
        t.put("model.activation", "gelu", *names)


def _norms(t: Translation) -> None:
    layer_norm = t["normalization"] == "LayerNorm"
    t.put("model.norm", "layernorm" if layer_norm else "rmsnorm", "normalization")
    t.put("model.norm_epsilon", t["layernorm_epsilon"], "layernorm_epsilon")
    if t["layernorm_zero_centered_gamma"]:
        t.put("model.norm_zero_centred", True, "layernorm_zero_centered_gamma")
    latent = t["multi_latent_attention"]
    if latent and not t["qk_layernorm"]:
        t.refuse(
            "latents are always normalised: add --qk-layernorm if the model is trained anew", "multi_latent_attention"
        )
    if latent:
        t.use("qk_layernorm")
        if t["layernorm_epsilon"] != LATENT_EPSILON or t["q_lora_rank"] is None:
            t.differs("latent-norms", "layernorm_epsilon")
    elif t["qk_layernorm"]:
        t.put("model.qk_norm", "layernorm" if layer_norm else True, "qk_layernorm")


def _attention(t: Translation) -> None:
    heads = t["num_attention_heads"]
    groups = t["num_query_groups"] if t["group_query_attention"] else heads
    names = ("group_query_attention", "num_query_groups") if t["group_query_attention"] else ()
    t.put("model.num_kv_heads", groups, *names, note="Megatron's default: as many as --num-attention-heads")
    width = t["kv_channels"]
    if width is None and t["hidden_size"] % heads:
        raise t.arguments.fail(f"{heads} heads do not divide a hidden size of {t['hidden_size']}", "add --kv-channels")
    width = t["hidden_size"] // heads if width is None else width
    t.put("model.head_dim", width, "kv_channels", note="Megatron's default: --hidden-size / --num-attention-heads")
    _biases(t)


def _logits(t: Translation) -> None:
    """The softmax of attention's logits, and their clip."""
    if t["softmax_type"] != "vanilla" and t["multi_latent_attention"]:
        t.refuse("latent attention has no sinks: leave it out if the model is trained anew", "softmax_type")
    elif t["softmax_type"] == "off-by-one":
        t.refuse("sinks are learned: --softmax-type learnable", "softmax_type")
    elif t["softmax_type"] == "learnable":
        t.put("model.attention_sinks", True, "softmax_type")
        t.differs("router-bias", "softmax_type")
    if t["qk_clip"]:
        t.put("model.qk_clip", t["qk_clip_threshold"], "qk_clip", "qk_clip_threshold", "qk_clip_alpha")
        if t["qk_clip_alpha"] != 0.5:
            t.refuse("alpha is 0.5", "qk_clip_alpha")


def _biases(t: Translation) -> None:
    biases = True if t["add_bias_linear"] else "qkv" if t["add_qkv_bias"] else False
    t.put("model.attention_bias", biases, "add_bias_linear", "add_qkv_bias")


def _latent_attention(t: Translation) -> None:
    if t["group_query_attention"]:
        raise t.arguments.fail("--group-query-attention excludes --multi-latent-attention", "remove one of them")
    t.put("model.kv_lora_rank", t["kv_lora_rank"], "kv_lora_rank", "multi_latent_attention")
    if t["q_lora_rank"] is not None:
        t.put("model.q_lora_rank", t["q_lora_rank"], "q_lora_rank")
    for key, name in (
        ("qk_nope_head_dim", "qk_head_dim"),
        ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
        ("v_head_dim", "v_head_dim"),
    ):
        t.put(f"model.{key}", t[name], name)
    t.use("kv_channels")
    _biases(t)


def _positions(t: Translation) -> None:
    kind = "rope" if t["use_rotary_position_embeddings"] else t["position_embedding_type"]
    names = ("position_embedding_type", "use_rotary_position_embeddings")
    if kind in ("mrope", "relative"):
        t.refuse("positions are rotary, learned or absent", "position_embedding_type")
        return
    if t["multi_latent_attention"] and kind != "rope":
        t.refuse("latent attention has rotary positions: add --position-embedding-type rope", "multi_latent_attention")
        return
    if kind == "learned_absolute":
        t.put("model.position", "learned", *names)
        t.put("model.max_positions", t.arguments.required("max_position_embeddings"), "max_position_embeddings")
        return
    t.put("model.position", "none" if kind == "none" else "rope", *names)
    t.use("add_position_embedding", "max_position_embeddings")
    if kind == "none":
        return
    t.put("model.rope_theta", float(t["rotary_base"]), "rotary_base")
    if t["multi_latent_attention"]:
        if t["rope_type"] == "rope" and t["rotary_percent"] != 1:
            t.refuse("all of --qk-pos-emb-head-dim is rotated", "rotary_percent")
        _yarn(t, t["rope_type"] != "rope", *YARN.values())
        return
    t.put("model.rope_fraction", t["rotary_percent"], "rotary_percent")
    if kind == "yarn":
        _yarn(t, True, *_yarn_of_flags(t))
    elif t["use_rope_scaling"]:
        scaling = {"kind": "llama3", "factor": t["rope_scaling_factor"], "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, "original_max_positions": 8192}
        t.put("model.rope_scaling", scaling, "use_rope_scaling", "rope_scaling_factor")
    elif t["rotary_seq_len_interpolation_factor"] is not None:
        scaling = {"kind": "linear", "factor": float(t["rotary_seq_len_interpolation_factor"])}
        t.put("model.rope_scaling", scaling, "rotary_seq_len_interpolation_factor")
    _rope_pattern(t)


def _yarn_of_flags(t: Translation) -> list[Any]:
    t.use(*(f"yarn_{name}" for name in YARN))
    return [default if t[f"yarn_{name}"] is None else t[f"yarn_{name}"] for name, default in YARN.items()]


def _yarn(t: Translation, is_on: bool, original: int, fast: float, slow: float) -> None:
    """YaRN, which a factor of 1 leaves out."""
    factor, mscale, all_dim = t["rotary_scaling_factor"], t["mscale"], t["mscale_all_dim"]
    names = ("rotary_scaling_factor", "mscale", "mscale_all_dim", "rope_type")
    t.use(*names, "yarn_correction_range_round_to_int")
    if not is_on or factor <= 1:
        return
    scaling = {
        "kind": "yarn",
        "factor": factor,
        "original_max_positions": original,
        "beta_fast": fast,
        "beta_slow": slow,
    }
    if not t["yarn_correction_range_round_to_int"]:
        scaling["truncate"] = False
    if all_dim:
        scaling |= {"mscale": mscale, "mscale_all_dim": all_dim}
    else:  # mscale alone is a factor of queries and keys
        scaling["attention_factor"] = round(0.1 * mscale * math.log(factor) + 1, 12)
    if all_dim and not t["multi_latent_attention"]:  # its square is the factor of scores of latent attention only
        scaling.pop("mscale")
        scaling.pop("mscale_all_dim")
        scaling["attention_factor"] = round(
            (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1), 12
        )
    t.put(
        "model.rope_scaling",
        scaling,
        *names,
        *(f"yarn_{name}" for name in YARN),
        "yarn_correction_range_round_to_int",
    )


def _rope_pattern(t: Translation) -> None:
    found, layers = t.arguments.layer_list("no_rope_freq"), layer_count(t)
    if isinstance(found, int) and found > 0 and layers % found:
        problem = f"{t.arguments.shown('no_rope_freq')} does not divide the model's {layers} layers"
        raise t.arguments.fail(problem, f"use {listed(divisors(layers))}, or a list of 0 and 1 such as [0]*3+[1]*1")
    if skipped := by_layer(t, "no_rope_freq", lambda i, n: i == n - 1):
        pattern = tuple("none" if skip else "rope" for skip in skipped)
        t.put("model.rope_pattern", list(shortest_pattern(pattern, len(pattern))), "no_rope_freq")


def by_layer(t: Translation, name: str, rule: Callable[[int, int], bool]) -> list[int] | None:
    """The number of each layer, of a list or a frequency n, by whose `rule` layer i of each n has 1; None without.

    Raises `InputError` for a list that has not a number for each layer, and for a frequency below 1.
    """
    found, layers = t.arguments.layer_list(name), layer_count(t)
    if isinstance(found, int):
        if found < 1:
            raise t.arguments.fail(f"{t.arguments.shown(name)} is no frequency", "use 1 or more")
        return [int(rule(i % found, found)) for i in range(layers)]
    if found is not None and len(found) != layers:
        problem = f"{t.arguments.shown(name)} has {len(found)} layers, the model {layers}"
        raise t.arguments.fail(problem, "correct it")
    return found


def _windows(t: Translation) -> None:
    """Local attention, and the layers that have it."""
    if t["window_size"] is None:
        return
    try:
        left, right = (int(part) for part in str(t["window_size"]).strip("()[] ").replace(" ", "").split(","))
    except ValueError:
        raise t.arguments.fail(f"{t.arguments.shown('window_size')} is no pair such as (127,0)", "correct it") from None
    if left < 0:
        t.use("window_size", "window_attn_skip_freq")
        return
    if right not in (0, -1):
        t.refuse("tokens never attend to later ones: the second number is 0", "window_size")
    t.put("model.sliding_window", left + 1, "window_size")
    if kinds := by_layer(t, "window_attn_skip_freq", lambda i, n: i < n - 1):
        pattern = tuple("local" if each else "global" for each in kinds)
        t.put("model.layer_pattern", list(shortest_pattern(pattern, len(pattern))), "window_attn_skip_freq")


def _width(t: Translation) -> None:
    """µP, in which Megatron's attention scale is 1 / width of a head."""
    if not t["use_mup"]:
        return
    base = t["mup_base_hidden_size"] or t["hidden_size"]
    t.put("model.mup_base_width", base, "use_mup", "mup_base_hidden_size")
    t.refuse("Megatron's µP scales embeddings, logits and Adam otherwise: set model.mup_base_width yourself", "use_mup")
