"""Random models of transformers through megajax and back: `python dev/random_models.py [--seed 1] [--seconds 300]`.

Draws a config of a family that megajax reads, makes the model with random weights, and writes its folder. A folder that
`hf import` refuses is counted. Of each other one megajax's logits must be those of transformers, and so must the logits
of transformers for the folder that `hf export` writes. Prints the config of each that differs or crashes; exit status 1
if there is one. Needs torch and transformers.
"""

import argparse
import collections
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import jax
import numpy as np

from megajax.checkpoint.manager import find_checkpoint
from megajax.checkpoint.storage import SUBDIRECTORY
from megajax.checkpoint.weights import run_config
from megajax.errors import UserError
from megajax.hf.compare import run_logits
from megajax.hf.exporting import export_step
from megajax.hf.importing import import_folder

VOCABULARY, TOKENS = 200, 40  # more tokens than windows and the original positions of scaled RoPE
TOLERANCE = 1e-4  # of the logits, ‖ours - theirs‖ / ‖theirs‖
Json = dict[str, Any]
Draw = random.Random


def maybe(draw: Draw, probability: float, **settings: Any) -> Json:
    return settings if draw.random() < probability else {}


def rope(draw: Draw) -> Json:
    kind = draw.choice(("default", "linear", "dynamic", "llama3", "yarn"))
    out: Json = {"rope_type": kind, "rope_theta": draw.choice((1e4, 5e5))}
    out |= {} if kind == "default" else {"factor": draw.choice((2.0, 4.0))}
    out |= {"original_max_position_embeddings": 16} if kind in ("llama3", "yarn") else {}
    if kind == "llama3":
        out |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        out |= maybe(draw, 0.3, mscale=0.7, mscale_all_dim=1.0) | maybe(draw, 0.3, beta_fast=16.0, beta_slow=2.0)
    return out


def common(draw: Draw) -> Json:
    """The keys of most families; heads of 8 or 16."""
    config: Json = {"num_hidden_layers": draw.choice((2, 3, 4)), "num_attention_heads": draw.choice((4, 8))}
    config |= {"num_key_value_heads": draw.choice((1, 2, 4)), "intermediate_size": draw.choice((96, 128))}
    config |= {"hidden_size": 64, "max_position_embeddings": 64}
    config |= maybe(draw, 0.3, tie_word_embeddings=draw.random() < 0.5)
    return config | maybe(draw, 0.7, rope_parameters=rope(draw))


def kinds(draw: Draw, layers: int) -> list[str]:
    return [draw.choice(("sliding_attention", "full_attention")) for _ in range(layers)]


def gpt2(draw: Draw) -> Json:
    config = {"n_embd": 64, "n_layer": draw.choice((2, 3)), "n_head": 4, "n_positions": 64}
    config |= maybe(draw, 0.3, n_inner=96) | maybe(draw, 0.2, scale_attn_weights=False)
    config |= maybe(draw, 0.2, tie_word_embeddings=False) | maybe(draw, 0.1, scale_attn_by_inverse_layer_idx=True)
    return config | maybe(draw, 0.2, activation_function=draw.choice(("gelu", "gelu_pytorch_tanh")))


def llama(draw: Draw) -> Json:
    config = common(draw) | maybe(draw, 0.3, attention_bias=True) | maybe(draw, 0.3, mlp_bias=True)
    return config | maybe(draw, 0.3, head_dim=draw.choice((8, 32)))


def mistral(draw: Draw) -> Json:
    return common(draw) | {"sliding_window": draw.choice((None, 5, 8))}


def mixtral(draw: Draw) -> Json:
    return mistral(draw) | {"num_local_experts": 4, "num_experts_per_tok": draw.choice((1, 2, 3))}


def qwen(draw: Draw) -> Json:
    config = common(draw)
    layers = config["num_hidden_layers"]
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": draw.choice((0, 1, layers))}
    config |= maybe(draw, 0.5, **windows, **maybe(draw, 0.5, layer_types=kinds(draw, layers)))
    return config | maybe(draw, 0.1, attention_bias=True)


def qwen3_moe(draw: Draw) -> Json:
    config = qwen(draw) | {"num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": draw.random() < 0.5}
    config |= {"num_experts_per_tok": draw.choice((1, 2, 4)), "decoder_sparse_step": draw.choice((1, 1, 2))}
    return config | maybe(draw, 0.3, head_dim=16) | maybe(draw, 0.3, mlp_only_layers=[0])


def smollm3(draw: Draw) -> Json:
    config = qwen(draw)
    return config | maybe(draw, 0.6, no_rope_layers=[draw.choice((0, 1)) for _ in range(config["num_hidden_layers"])])


def gemma(draw: Draw) -> Json:
    config = common(draw) | {"head_dim": 16, "query_pre_attn_scalar": draw.choice((16, 24)), "sliding_window": 6}
    config.pop("rope_parameters", None)  # its layout has one for each kind of layer
    config |= maybe(draw, 0.4, layer_types=kinds(draw, config["num_hidden_layers"]))
    config |= maybe(draw, 0.3, attention_bias=True) | maybe(draw, 0.2, attn_logit_softcapping=draw.choice((None, 20.0)))
    return config | maybe(draw, 0.3, final_logit_softcapping=draw.choice((None, 10.0)))


def partly_rotated(draw: Draw) -> Json:
    config = common(draw) | maybe(draw, 0.3, sliding_window=6)
    positions = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw.choice((0.5, 1.0))}
    return config | {"rope_parameters": positions}


def nemotron(draw: Draw) -> Json:
    return partly_rotated(draw) | maybe(draw, 0.3, attention_bias=True) | maybe(draw, 0.3, mlp_bias=True)


def olmo2(draw: Draw) -> Json:
    return common(draw) | maybe(draw, 0.3, attention_bias=True)


def gpt_oss(draw: Draw) -> Json:
    return common(draw) | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6}


def deepseek(draw: Draw) -> Json:
    config = common(draw) | {"q_lora_rank": draw.choice((None, 24)), "kv_lora_rank": 16, "qk_nope_head_dim": 16}
    config |= {"qk_rope_head_dim": 8, "v_head_dim": draw.choice((12, 16)), "n_routed_experts": 8}
    config |= {"num_experts_per_tok": draw.choice((1, 2, 4)), "moe_intermediate_size": 48}
    config |= {"n_shared_experts": draw.choice((1, 2)), "first_k_dense_replace": draw.choice((0, 1))}
    groups = draw.choice((1, 2, 4))
    config |= {"n_group": groups, "topk_group": draw.choice((1, min(2, groups)))}
    config |= {"routed_scaling_factor": draw.choice((1.0, 2.5)), "num_key_value_heads": config["num_attention_heads"]}
    return config


def deepseek_v2(draw: Draw) -> Json:
    return deepseek(draw) | {"topk_method": draw.choice(("greedy", "group_limited_greedy"))}


def deepseek_v3(draw: Draw) -> Json:
    return deepseek(draw) | {"norm_topk_prob": draw.random() < 0.7}


def mixers(draw: Draw, layers: int) -> list[str]:
    return [draw.choice(("linear_attention", "full_attention")) for _ in range(layers)]


def qwen3_5(draw: Draw) -> Json:
    config = common(draw) | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": draw.choice((2, 4))}
    config |= {"linear_key_head_dim": 8, "linear_value_head_dim": draw.choice((6, 8))}
    positions = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw.choice((0.25, 0.5, 1.0))}
    config |= {"linear_conv_kernel_dim": draw.choice((2, 4)), "rope_parameters": positions}
    return config | {"layer_types": mixers(draw, config["num_hidden_layers"])}


def with_experts(draw: Draw) -> Json:
    experts = {"num_experts": 8, "num_experts_per_tok": draw.choice((1, 2, 4)), "moe_intermediate_size": 48}
    return qwen3_5(draw) | experts | {"shared_expert_intermediate_size": draw.choice((32, 48))}


def qwen3_next(draw: Draw) -> Json:
    return with_experts(draw) | {"norm_topk_prob": draw.random() < 0.5} | maybe(draw, 0.4, mlp_only_layers=[1])


def multipliers(draw: Draw, *names: str) -> Json:
    return {name: draw.uniform(0.3, 3) for name in names if draw.random() < 0.7}


def mamba(draw: Draw) -> Json:
    config = common(draw) | {"mamba_n_heads": 8, "mamba_d_head": draw.choice((16, "auto")), "mamba_d_state": 8}
    config |= {"mamba_n_groups": draw.choice((1, 2, 4)), "mamba_d_conv": draw.choice((2, 4))}
    return config | maybe(draw, 0.3, time_step_limit=(0.2, draw.choice((float("inf"), 2.0))))


def granite(draw: Draw) -> Json:
    config = mamba(draw) | {"attention_multiplier": draw.choice((0.1, 0.5)), "shared_intermediate_size": 48}
    config |= {"num_local_experts": draw.choice((0, 4)), "position_embedding_type": draw.choice((None, "rope"))}
    config |= multipliers(draw, "embedding_multiplier", "logits_scaling", "residual_multiplier")
    return config | {"layer_types": mixers(draw, config["num_hidden_layers"])} | maybe(draw, 0.3, attention_bias=True)


def bamba(draw: Draw) -> Json:
    biases = maybe(draw, 0.3, attention_bias=True) | maybe(draw, 0.3, mlp_bias=True)
    return mamba(draw) | biases | {"attn_layer_indices": draw.choice((None, [0], [1], [0, 1]))}


def falcon_h1(draw: Draw) -> Json:
    names = ("embedding", "lm_head", "attention_in", "attention_out", "key", "ssm_in", "ssm_out")
    config = mamba(draw) | {"mamba_d_ssm": 128} | multipliers(draw, *(f"{name}_multiplier" for name in names))
    config |= maybe(draw, 0.7, ssm_multipliers=[draw.uniform(0.3, 3) for _ in range(5)])
    config |= maybe(draw, 0.7, mlp_multipliers=[draw.uniform(0.3, 3) for _ in range(2)])
    config |= maybe(draw, 0.3, attention_bias=True) | maybe(draw, 0.3, mlp_bias=True)
    return config | {"mamba_rms_norm": draw.random() < 0.6, "mamba_norm_before_gate": draw.random() < 0.5}


def mamba2(draw: Draw) -> Json:
    config = {"num_hidden_layers": draw.choice((2, 3)), "hidden_size": 64, "num_heads": 8, "head_dim": 16}
    config |= {"n_groups": draw.choice((1, 2, 4)), "state_size": 8, "conv_kernel": draw.choice((2, 4))}
    return config | maybe(draw, 0.3, tie_word_embeddings=True) | maybe(draw, 0.2, use_conv_bias=False)


FAMILIES: dict[str, Callable[[Draw], Json]] = {
    **{"gpt2": gpt2, "llama": llama, "mistral": mistral, "mixtral": mixtral, "qwen2": qwen, "qwen3": qwen},
    **{"qwen3_moe": qwen3_moe, "smollm3": smollm3, "gemma2": gemma, "gemma3_text": gemma, "phi3": partly_rotated},
    **{"nemotron": nemotron, "olmo2": olmo2, "gpt_oss": gpt_oss},
    **{"deepseek_v2": deepseek_v2, "deepseek_v3": deepseek_v3, "qwen3_next": qwen3_next, "qwen3_5_text": qwen3_5},
    **{"qwen3_5_moe_text": with_experts, "granitemoehybrid": granite, "bamba": bamba, "falcon_h1": falcon_h1},
    "mamba2": mamba2,
}


def their_model(family: str, settings: Json):
    """A model of transformers, also with random norms, biases and sinks. ValueError for what transformers refuses."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoConfig, AutoModelForCausalLM  # type: ignore[import-not-found]

    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "vocab_size": VOCABULARY}
    try:
        config = AutoConfig.for_model(family, **settings, **ids, initializer_range=0.2)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception as error:
        raise ValueError(str(error)) from None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "e_score_correction" in name:
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    import torch  # type: ignore[import-not-found]

    with torch.inference_mode():
        return model(
            torch.from_numpy(tokens), use_cache=False
        ).logits.numpy()  # which transformers has not for all layers


def outcome(family: str, settings: Json, folder: Path) -> tuple[str, str]:
    """(a word, the differences, the sentence or the traceback)."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, TOKENS))
    try:
        model = their_model(family, settings)
        model.save_pretrained(folder / "theirs")
        expected = logits_of(model, tokens)
    except ValueError as error:
        return "refused by transformers", str(error)
    try:
        import_folder(folder / "theirs", folder / "run")
        run, step = find_checkpoint(str(folder / "run"), "RUN")
        config = run_config(run, "RUN")
        ours = run_logits(run / SUBDIRECTORY / str(step), config.model, tokens)[..., :VOCABULARY]
        export_step(run, step, config, folder / "back", "float32")
        back = AutoModelForCausalLM.from_pretrained(
            folder / "back", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        whole = np.linalg.norm(expected)
        apart = [float(np.linalg.norm(found - expected) / whole) for found in (ours, logits_of(back, tokens))]
        return "agrees" if max(apart) < TOLERANCE else "differs", f"megajax {apart[0]:.1e}, exported {apart[1]:.1e}"
    except UserError as error:
        return "refused", str(error).replace(str(folder), "FOLDER")
    except Exception:
        return "crashes", traceback.format_exc()
    finally:
        jax.clear_caches()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--refusals", action="store_true", help="print these sentences too")
    options = parser.parse_args()
    import torch  # type: ignore[import-not-found]

    warnings.simplefilter("ignore")
    torch.manual_seed(options.seed)
    draw, counts, end = random.Random(options.seed), collections.Counter(), time.monotonic() + options.seconds
    while time.monotonic() < end:
        family = draw.choice(list(FAMILIES))
        settings = FAMILIES[family](draw)
        with tempfile.TemporaryDirectory() as scratch:
            word, shown = outcome(family, settings, Path(scratch))
        counts[family, word] += 1
        if word in ("differs", "crashes") or (word == "refused" and options.refusals):
            print(f"{word}: {family} {json.dumps(settings)}\n{shown}", flush=True)
    for family in FAMILIES:
        words = [f"{count} {word}" for (own, word), count in sorted(counts.items()) if own == family]
        print(f"{family}: {', '.join(words)}")
    return 1 if any(word in ("differs", "crashes") for _, word in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
