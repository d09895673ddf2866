"""Megatron's GPTModel of a case, on a CPU; changes to megatron-core are all here.

- Latent attention without Transformer Engine: two arguments of its attention, and the norm of the latent without
  `q_lora_rank`.
- An expert with biases adds to its output in place, which autograd refuses: a copy.
- Counts of the routers' assignments, and the least distance between an expert that was chosen and one that was not.
- `Case.patches`: formulas of the `proof_` cases.
"""

# pyright: reportMissingImports=false
from typing import Any

import megatron.core.tensor_parallel.random as random_state
import megatron_parity.megatron_cpu  # noqa: F401, I001
import torch
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import router as routers
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron_parity.case import Case
from torch.nn import functional

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu2": squared_relu,
    "quick_gelu": quick_gelu,
}
COMMON = {
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float32, "init_method_std": 0.02},
    **{"use_cpu_initialization": True, "perform_initialization": True, "bias_dropout_fusion": False},
    **{"masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "bias_activation_fusion": False},
}
random_state._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
random_state._set_cuda_rng_state = lambda *_, **__: None  # there is no dropout


class LatentCoreAttention(DotProductAttention):
    """The attention of MLA: keys and values of other widths than the hidden size's."""

    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


LocalSpecProvider.core_attention = lambda self: LatentCoreAttention


def build(case: Case) -> tuple[TransformerConfig, GPTModel]:
    """The config and the model, with Megatron's own initial weights."""
    settings: dict[str, Any] = COMMON | {"calculate_per_token_loss": case.per_token} | case.config
    latent = settings.get("multi_latent_attention", False)
    settings["activation_func"] = ACTIVATIONS[settings.pop("activation")]
    config = (MLATransformerConfig if latent else TransformerConfig)(**settings)
    config.persist_layer_norm = False
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    else:
        spec = get_gpt_layer_local_spec(
            normalization=config.normalization, qk_layernorm=config.qk_layernorm, multi_latent_attention=latent
        )
    modules = None
    if config.mtp_num_layers:
        last = spec.layer_specs[-1] if hasattr(spec, "layer_specs") else spec
        modules = get_gpt_mtp_block_spec(config, last, use_transformer_engine=False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=case.padded or case.vocab,
        max_sequence_length=case.length,
        parallel_output=True,
        mtp_block_spec=modules,
        **case.gpt,
    )
    if latent and config.q_lora_rank is None:
        # With qk_layernorm it would normalise the input of linear_q_proj too; DeepSeek-V2-Lite has this norm only.
        for layer in model.decoder.layers:
            width, epsilon = config.kv_lora_rank, config.layernorm_epsilon
            layer.self_attention.kv_layernorm = WrappedTorchNorm(config=config, hidden_size=width, eps=epsilon)
    return config, model


def arrays(model: GPTModel) -> dict[str, torch.Tensor]:
    """Parameters and the routers' expert biases, by name."""
    biases = {name: own for name, own in model.named_buffers() if name.endswith("expert_bias")}
    return {**dict(model.named_parameters()), **biases}


# Routers

counts: dict[int, torch.Tensor] = {}  # of this step, by router
gaps: list[float] = []  # of this step: the least distances between an expert that was chosen and one that was not
_chosen: list[torch.Tensor] = []  # of the newest call, before any are dropped
_routing, _bias_update = TopKRouter.routing, TopKRouter._apply_expert_bias
_topk, _dropping = routers.topk_routing_with_score_function, routers.apply_router_token_dropping
_sinkhorn = routers.sinkhorn
_loss_scores, _reduce = routers.compute_routing_scores_for_aux_loss, mappings._reduce


def _counted_routing(self, logits, padding_mask=None):
    probabilities, chosen = _routing(self, logits, padding_mask)
    counts[id(self)] = counts.get(id(self), 0) + chosen.sum(0)
    _record_gaps(self, logits)
    return probabilities, chosen


def _record_gaps(router, logits: torch.Tensor) -> None:
    config, values = router.config, logits.detach().reshape(-1, router.num_experts).float()
    if config.moe_router_score_function == "sigmoid":
        values = torch.sigmoid(values) + (0 if router.expert_bias is None else router.expert_bias)
    if groups := config.moe_router_num_groups:
        grouped = values.view(len(values), groups, -1)
        best = grouped.topk(config.moe_router_topk // config.moe_router_group_topk, -1)[0].sum(-1)
        _record_gap(best, config.moe_router_group_topk)
        index = best.topk(config.moe_router_group_topk, -1)[1]
        index = index[..., None].expand(-1, -1, grouped.shape[-1])
        values = torch.gather(grouped, 1, index).reshape(len(values), -1)
    _record_gap(values, config.moe_router_topk)


def _record_gap(values: torch.Tensor, number: int) -> None:
    if number < values.shape[-1]:
        top = values.topk(number + 1, -1)[0]
        gaps.append(float((top[:, -2] - top[:, -1]).min()))


def _remembered_topk(*args, **kwargs):
    probabilities, chosen = _topk(*args, **kwargs)
    _chosen[:] = [chosen]
    return probabilities, chosen


def _copied_reduce(tensor, *args, **kwargs):
    out = _reduce(tensor, *args, **kwargs)
    return out.clone() if out is tensor else out


def _loss_scores_of_chosen(*args, **kwargs):
    return _chosen[0], _loss_scores(*args, **kwargs)[1]


def _rounded_dropping(probabilities, chosen, **kwargs):
    """Drops by probabilities with 10 bits of mantissa; of equal ones those of later tokens."""
    bits = probabilities.detach().contiguous().view(torch.int32).long()
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) >> 13 << 13  # to nearest, ties to even
    order = torch.arange(len(probabilities), 0, -1)[:, None]
    kept = _dropping((bits + order) * chosen.double(), chosen, **kwargs)[1]
    return probabilities * kept, kept


def _bias_update_of_chosen(self, routing_map, padding_mask=None):
    return _bias_update(self, _chosen[0], padding_mask=padding_mask)


def _sinkhorn_of_20_iterations(cost: torch.Tensor) -> torch.Tensor:
    cost = torch.softmax(cost, -1)
    by_expert = torch.ones(cost.shape[1])
    for _ in range(20):
        by_token = 1 / (cost.shape[0] * (cost @ by_expert) + 1e-8)
        by_expert = 1 / (cost.shape[1] * (by_token @ cost) + 1e-8)
    return cost * by_expert


TopKRouter.routing, mappings._reduce = _counted_routing, _copied_reduce
routers.topk_routing_with_score_function = _remembered_topk


def apply_patches(case: Case) -> None:
    """Replace the formulas that a case names; those of other cases are Megatron's again."""
    on = case.patches.__contains__
    scores = _loss_scores_of_chosen if on("counts of chosen experts") else _loss_scores
    routers.compute_routing_scores_for_aux_loss = scores
    routers.apply_router_token_dropping = _rounded_dropping if on("rounded priorities") else _dropping
    routers.sinkhorn = _sinkhorn_of_20_iterations if on("20 iterations of Sinkhorn") else _sinkhorn
    TopKRouter._apply_expert_bias = _bias_update_of_chosen if on("bias of chosen experts") else _bias_update
