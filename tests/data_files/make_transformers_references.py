"""Makes the reference outputs (tiny_*.npz) that the model's tests compare with, using transformers on torch.

Needs an environment of its own, on the CPU (no torch for the CPU alone is published for Python 3.12):
Python 3.11 with torch 2.13.0, transformers 5.23.0 and numpy 2.4.6. Run it as
`python tests/data_files/make_transformers_references.py`; it writes beside itself, the same bytes each time. With names
as arguments (`tiny_llama tiny_gpt2`) it makes these files only.

Each file holds
- `model`: JSON, the `model` section of the config that describes the network;
- the weights under their canonical names and layouts, float32, the vocabulary not padded; the layers' state too, as
  `blocks.KIND.NAME`;
- `tokens` [2, 17] int32, `logits` [2, 17, V] float32, and `loss`, the mean cross-entropy (nats) over the
  2·16 predictions of a next token, by an encoder from the first 16 tokens;
- `gradient:NAME`, the loss's gradient with respect to the weight NAME, for some telling weights.

For the models of FOLDERS it also writes NAME.zip: the folder that transformers' `save_pretrained` writes for the model.

Weights are normal with std 0.1, plus 1 for norm weights (not those to which the model adds 1), biases too, so that each
of them counts; they are rounded to multiples of 2^-12, which keeps the files small. Outputs are computed in float64,
except where transformers itself goes to float32 (RMSNorm, softmax, RoPE's angles), then stored as float32.
"""

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import deepseek_references as deepseek
import family_references as families
import hybrid_references as hybrids
import kimi_references as kimi
import llama_references as llama
import mamba_references as mamba
import numpy as np
import torch
from llama_references import Reference
from transformers import PreTrainedModel

Arrays = dict[str, np.ndarray]

TELLING = (
    "embedding.tokens",
    "blocks.dense.attention.query",
    "blocks.dense.attention.key",
    "blocks.dense.mlp.norm",
    "blocks.moe.attention.query",
    "blocks.moe.moe.norm",
    "blocks.moe.moe.router",
    "blocks.moe.moe.gate",
    "blocks.moe.moe.router_bias",
    "blocks.moe.moe.up_bias",
    "blocks.moe.moe.down_bias",
    "blocks.moe.attention.sinks",
    "final_norm",
)
FOLDERS = (
    "tiny_gpt2",
    "tiny_llama",
    "tiny_llama_tied",
    "tiny_mistral",
    "tiny_qwen2",
    "tiny_qwen3_local",
    "tiny_mixtral",
    "tiny_qwen3_moe_mixed",
    "tiny_gpt_oss",
    "tiny_gemma2",
    "tiny_gemma3_text",
    "tiny_phi3",
    "tiny_olmo2",
    "tiny_nemotron",
    "tiny_smollm3",
    "tiny_deepseek_v2",
    "tiny_deepseek_v3",
    "tiny_qwen3_next",
    "tiny_nemotron_h",
    "tiny_kimi_linear",
    "tiny_qwen3_5_text",
    "tiny_qwen3_5_moe_text",
    "tiny_granitemoehybrid",
    "tiny_granite_dense",
    "tiny_bamba",
    "tiny_falcon_h1",
    "tiny_mamba2",
    "tiny_modernbert",
)
LATENT = tuple(
    f"blocks.moe.attention.{name}"
    for name in ("query_down", "key_value_down", "rotary_key", "query_norm", "key_value_norm", "key", "value", "output")
)
DELTA_NET = tuple(
    f"blocks.gated_deltanet_moe.gated_deltanet.{name}"
    for name in (
        *("query", "key", "value", "gate", "strength", "decay", "query_convolution", "value_convolution"),
        *("decay_rate", "decay_bias", "output_norm", "output", "norm"),
    )
)
MAMBA = tuple(
    f"blocks.mamba2.mamba2.{name}"
    for name in (
        *("gate", "value", "key", "query", "step", "value_convolution", "query_convolution", "key_bias"),
        *("decay_rate", "step_bias", "skip", "output_norm", "output", "norm"),
    )
)
KDA = tuple(
    f"blocks.kda_moe.kda.{name}"
    for name in (
        *("query", "key", "value", "strength", "decay_down", "decay_up", "gate_down", "gate_up", "key_convolution"),
        *("decay_rate", "decay_bias", "output_norm", "output", "norm"),
    )
)
PARALLEL = tuple(w.replace("mamba2.", "attention_mamba2.", 1) for w in MAMBA)
PARALLEL += tuple(f"blocks.attention_mamba2.{name}" for name in ("attention.norm", "attention.key", "mlp.down"))
PARALLEL += ("blocks.mamba2_moe.mamba2.output", "blocks.mamba2_moe.moe.shared_down")
MODERNBERT = ("embedding.norm", "head_dense", "head_norm", "head_bias", "blocks.first.attention.query")
MODERNBERT += ("blocks.first.mlp.gate", "blocks.dense.attention.norm", "blocks.dense.attention.value")
# Gradients of norms that other models lack; the other families have the logits only.
TELLING_OF_FAMILY = {
    "tiny_gpt_oss": TELLING,
    "tiny_gemma3_text": (*TELLING, "blocks.dense.attention.post_norm", "blocks.dense.attention.query_norm"),
    "tiny_olmo2": (*TELLING, "blocks.dense.mlp.post_norm", "blocks.dense.attention.key_norm"),
    "tiny_deepseek_v2": (*TELLING, *LATENT, "blocks.moe.moe.shared_up"),
    "tiny_deepseek_v3": (*TELLING, *LATENT, "blocks.moe.moe.shared_up"),
    "tiny_nemotron_h": (*MAMBA, "embedding.tokens", "blocks.experts.moe.up", "blocks.attention.attention.query"),
    "tiny_kimi_linear": (*KDA, *LATENT, "embedding.tokens", "blocks.kda.mlp.up", "blocks.moe.attention.query"),
    **{
        f"tiny_{name}": (*TELLING, *MAMBA, *(w.replace("mamba2.", "mamba2_mlp.", 1) for w in MAMBA), *PARALLEL)
        for name in ("granitemoehybrid", "granite_dense", "bamba", "falcon_h1", "mamba2")
    },
    "tiny_modernbert": (*TELLING, *MODERNBERT),
    "tiny_qwen3_next": (*TELLING, *DELTA_NET, "blocks.moe.attention.gate", "blocks.moe.moe.shared_router"),
}
SEQUENCES, LENGTH = 2, 17
STATE = "e_score_correction_bias"  # of layers, not a parameter


def randomise(network: PreTrainedModel, generator: torch.Generator, centre: float) -> None:
    """Every parameter normal with std 0.1 in multiples of 2^-12, norm weights around `centre`."""
    for name, parameter in network.named_parameters():
        values = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith("weight") and parameter.ndim == 1:
            values += centre
        if name.endswith("gate_up_proj_bias"):
            values *= 50  # beyond the limit of GPT-OSS's activation
        parameter.data.copy_(torch.round(values * 2**12) / 2**12)
    for state in layer_state(network).values():
        values = 0.1 * torch.randn(state.shape, generator=generator, dtype=torch.float64)
        state.copy_(torch.round(values * 2**12) / 2**12)


def layer_state(network: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The layers' state by name."""
    return {name: buffer for name, buffer in network.named_buffers() if name.endswith(STATE)}


def write_folder(network: PreTrainedModel, path: Path) -> None:
    """The folder of a network, FP32, in an archive of the same bytes each time."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        network.float().save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED)


def of_weight(name: str, multipliers: dict[str, float] = {}) -> float:  # noqa: B006
    """The factor of a weight."""
    return multipliers.get(name.split(".", 2)[-1] if name.startswith("blocks.") else name, 1.0)


def make(build: Callable[[], Reference], seed: int) -> tuple[PreTrainedModel, Arrays]:
    """One network and its file's contents."""
    network, model, convert, *multipliers = build()
    generator = torch.Generator().manual_seed(seed)
    network = network.double().eval()
    randomise(network, generator, centre=0 if model.get("norm_zero_centred") else 1)
    tokens = torch.randint(model["vocab_size"], (SEQUENCES, LENGTH), generator=generator)
    is_causal = model.get("causal", True)
    logits = network(tokens, **{"use_cache": False} if is_causal else {}).logits
    first = logits[:, :-1] if is_causal else network(tokens[:, :-1]).logits  # which the last token changes
    loss = torch.nn.functional.cross_entropy(first.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()

    parameters, state = dict(network.named_parameters()), layer_state(network)
    tensors = {name: parameter.detach() for name, parameter in parameters.items()} | state
    weights = convert(tensors, model)
    factors = {name: of_weight(name, *multipliers) for name in weights}
    weights = {name: weight * factors[name] for name, weight in weights.items()}
    assert sum(weight.numel() for weight in weights.values()) == sum(tensor.numel() for tensor in tensors.values())
    gradients = convert({name: parameter.grad for name, parameter in parameters.items()} | state, model)
    gradients = {name: gradient / factors[name] for name, gradient in gradients.items()}
    outputs = {"logits": logits.detach(), "loss": loss.detach()}
    telling = TELLING_OF_FAMILY.get(build.__name__, () if build.__module__ == families.__name__ else TELLING)
    floats = weights | outputs | {f"gradient:{name}": gradients[name] for name in telling if name in gradients}
    return network, {
        "model": np.array(json.dumps(model)),
        "tokens": tokens.numpy().astype(np.int32),
        **{name: tensor.numpy().astype(np.float32) for name, tensor in floats.items()},
    }


def main() -> None:
    builders = (
        llama.tiny_gpt2,
        llama.tiny_gpt_neox,
        llama.tiny_llama,
        llama.tiny_llama_tied,
        llama.tiny_mistral,
        llama.tiny_qwen3,
        llama.tiny_qwen3_local,
        llama.tiny_mixtral,
        llama.tiny_qwen3_moe,
        llama.tiny_qwen3_moe_mixed,
        llama.tiny_qwen2,
        families.tiny_gpt_oss,
        families.tiny_gemma2,
        families.tiny_gemma3_text,
        families.tiny_phi3,
        families.tiny_olmo2,
        families.tiny_nemotron,
        families.tiny_smollm3,
        deepseek.tiny_deepseek_v2,
        deepseek.tiny_deepseek_v3,
        hybrids.tiny_qwen3_next,
        hybrids.tiny_nemotron_h,
        kimi.tiny_kimi_linear,
        hybrids.tiny_qwen3_5_text,
        hybrids.tiny_qwen3_5_moe_text,
        mamba.tiny_granitemoehybrid,
        mamba.tiny_granite_dense,
        mamba.tiny_bamba,
        mamba.tiny_falcon_h1,
        hybrids.tiny_mamba2,
        families.tiny_modernbert,
    )
    for seed, build in enumerate(builders):
        if build.__name__ not in (sys.argv[1:] or [build.__name__]):
            continue
        path = Path(__file__).parent / f"{build.__name__}.npz"
        network, arrays = make(build, seed)
        np.savez_compressed(path, **arrays)
        print(path.name, path.stat().st_size)
        if build.__name__ in FOLDERS:
            write_folder(network, path.with_suffix(".zip"))


if __name__ == "__main__":
    main()
