"""Functions on arrays with plain arguments: no config, no collectives, no modules."""

from megajax.ops import cross_entropy_kernel, router
from megajax.ops.attention import (
    AttentionSettings,
    PackedDocuments,
    attention,
    attention_of_rows,
    cross_attention,
    documents_of,
    same_documents,
    two_sided_ends,
    visible_ranges,
)
from megajax.ops.cached_attention import cached_attention
from megajax.ops.cross_entropy import LossImplementation, Vocabulary, chunk_log_probs, chunk_loss_and_grad
from megajax.ops.delta_rule import gated_delta_rule, recurrent_gated_delta_rule
from megajax.ops.dropout import dropout
from megajax.ops.expert_mlp import Biases, ExpertKernels, ExpertMatrices, ExpertMlp, Route
from megajax.ops.experts import SortedRoute, apply_experts
from megajax.ops.gated_norm import GatedNorm, gated_norm
from megajax.ops.grouped_matmul import GroupedImplementation
from megajax.ops.linear_recurrence import LinearAttentionImplementation, Prepare, StateBefore
from megajax.ops.mlp_activation import ElementwiseImplementation, activate
from megajax.ops.norms import layer_norm, rms_norm
from megajax.ops.partial_attention import Implementation
from megajax.ops.relative_bias import bias_of_pairs, relative_bias
from megajax.ops.rope import apply_rope, rope_attention_factor, rope_frequencies, rope_score_factor, section_axes
from megajax.ops.short_convolution import short_convolution
from megajax.ops.state_space import recurrent_state_space, state_space

# The loss of a chunk of tokens by `kernels.loss`: plain operations, and the GPU kernel
CHUNK_LOSSES = {"reference": chunk_loss_and_grad, "pallas": cross_entropy_kernel.chunk_loss_and_grad}

__all__ = [
    "CHUNK_LOSSES",
    "AttentionSettings",
    "Biases",
    "PackedDocuments",
    "ElementwiseImplementation",
    "ExpertKernels",
    "ExpertMatrices",
    "ExpertMlp",
    "GatedNorm",
    "GroupedImplementation",
    "Implementation",
    "LinearAttentionImplementation",
    "LossImplementation",
    "Prepare",
    "Route",
    "SortedRoute",
    "StateBefore",
    "Vocabulary",
    "activate",
    "apply_experts",
    "apply_rope",
    "attention",
    "attention_of_rows",
    "bias_of_pairs",
    "cached_attention",
    "chunk_log_probs",
    "chunk_loss_and_grad",
    "cross_attention",
    "documents_of",
    "dropout",
    "gated_delta_rule",
    "gated_norm",
    "two_sided_ends",
    "layer_norm",
    "recurrent_gated_delta_rule",
    "recurrent_state_space",
    "rms_norm",
    "rope_attention_factor",
    "rope_frequencies",
    "rope_score_factor",
    "relative_bias",
    "router",
    "same_documents",
    "section_axes",
    "short_convolution",
    "state_space",
    "visible_ranges",
]
