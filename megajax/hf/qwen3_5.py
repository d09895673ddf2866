"""Qwen3.5's text models: Qwen3-Next's layers with an MLP or experts in all of them, and other tensors.

Published folders also have a vision tower, and may have all experts of a layer in one tensor.
"""

from megajax.config import ModelConfig
from megajax.hf.defaults import Json
from megajax.hf.llama import HEADS, Llama
from megajax.hf.qwen3_next import QKV, Qwen3Next, head_widths
from megajax.hf.tensors import Tensor, side_by_side


class Qwen35MoeText(Qwen3Next):
    """Qwen3.5's and Qwen3.6's language models with experts."""

    model_type, architecture = "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"
    modules = "mtp_num_hidden_layers"

    def read_options(self, config: Json) -> Json:
        # Keys of Qwen3-Next that transformers does not read in this model_type
        fixed = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
        return super().read_options(config | fixed)

    def projections(self, model: ModelConfig, ours: str, theirs: str) -> list[Tensor]:
        heads, widths = model.linear_attention.num_key_heads, head_widths(model)
        return [
            *side_by_side(
                f"{theirs}in_proj_qkv.weight", 0, {f"{ours}{name}": (HEADS, heads * widths[name]) for name in QKV}
            ),
            Tensor(f"{ours}gate", f"{theirs}in_proj_z.weight", HEADS),
            Tensor(f"{ours}strength", f"{theirs}in_proj_b.weight", HEADS),
            Tensor(f"{ours}decay", f"{theirs}in_proj_a.weight", HEADS),
        ]


class Qwen35Text(Qwen35MoeText):
    """Qwen3.5's dense language models."""

    model_type, architecture = "qwen3_5_text", "Qwen3_5ForCausalLM"

    def read_blocks(self, config: Json) -> list[str]:
        return super().read_blocks(config | {"mlp_only_layers": [*range(config["num_hidden_layers"])]})

    def read_experts(self, config: Json) -> Json:
        return {}

    def write(self, model: ModelConfig) -> Json:
        return Llama.write(self, model)

    def write_experts(self, model: ModelConfig) -> Json:
        return {}
