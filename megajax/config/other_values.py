"""Other frameworks' names for the values of our choices, as data for load.py. Rows as in other_names.py:

`names | our value | note`; without a value the note says why there is none. Capitals, dashes, dots and underscores do
not count. Every name of a choice that other frameworks have too.
"""

import difflib
import re
from collections.abc import Sequence

from megajax.config.missing_features import missing_feature
from megajax.config.other_name import OtherName, rows
from megajax.config.sentences import listed

FLOATS = """\
bf16, bfloat, torch.bfloat16, jnp.bfloat16, bf16-mixed, bf16-true | bfloat16
fp32, f32, float, single, full, torch.float32, fp32-mixed | float32
tf32 | float32 | which is true FP32
fp64, float64, double, f64 | | there is no FP64
"""
HALF = "fp16, half, f16, torch.float16, 16-mixed | float16\n"
FP8 = "fp8, float8, e4m3, float8_e4m3fn | | precision.fp8.recipe is the setting of FP8\n"

# By our key, N in place of an index.
OTHER_VALUES = {
    key: rows(text)
    for key, text in {
        "model.activation": """
silu, swish, llama, silu-glu, silu_linear | swiglu | which is gated by SiLU
gelu_glu, gated-gelu, gelu_pytorch_tanh_glu, gegelu, gemma | geglu
gelu_new, gelu_tanh, gelu_pytorch_tanh, openai-gelu, gelu_fast, gelu_python, approximate_gelu | gelu | which is its tanh
    approximation
gelu_erf, erf_gelu, gelu_none | gelu_exact | which is that with erf
squared_relu, relu_squared, sqrelu, relu_square | relu2
tanh, reglu, mish, leaky_relu, elu, sigmoid | | MLPs do not have it
""",
        "model.vision.activation": """
silu, swish, silu-glu | swiglu | which is gated by SiLU
gelu_new, gelu_pytorch_tanh, gelu_tanh | gelu | which is its tanh approximation
gelu_erf, gelu_none | gelu_exact | which is that with erf
""",
        "model.vision.norm": """
rms | rmsnorm
ln, torch.nn.LayerNorm | layernorm
""",
        "model.vision.projector": """
mlp2x_gelu, patch_merger | mlp
average_pooling, avg_pool | average
""",
        "model.norm": """
rms, zero_centered_rmsnorm, t5norm | rmsnorm
ln, torch.nn.LayerNorm, non_parametric_ln | layernorm
""",
        "model.norm_placement": """
pre, pre_norm, pre_ln | before
post, post_norm, post_ln | after
sandwich, pre_post, peri, peri_ln, peri_norm | both
""",
        "model.position": """
rotary, yarn, mrope, llama | rope | with model.rope_scaling for longer contexts
learned_absolute, absolute, learnable, trained, embedding | learned
nope, no, null, no_position_embedding, false | none
t5, relative_bias, relative_attention_bias, buckets | relative
alibi, sinusoidal, sincos | | positions are rotary, learned, by a bias of buckets, or absent
""",
        "model.rope_scaling.kind": """
su, longrope_scaled | longrope
ntk, ntk_aware, dynamic_ntk | dynamic
position_interpolation, pi, linear_interpolation | linear
llama, llama3.1 | llama3
default, none, null | | without scaling leave model.rope_scaling out
""",
        "model.qk_norm": """
rmsnorm, per_head, head, qwen3 | true
olmo2, full, all, across_heads | all_heads
""",
        "model.attention_bias": "qwen2, qkv_only, add_qkv_bias | qkv\n",
        "model.router.loss_counts": "unbiased, megatron, deepseek_v3 | top_scores\nrouted, deepseek_v2 | chosen\n",
        "objective.average": "token, per_token, token_mean | tokens\nmicrobatch, megatron, batch_mean | microbatches\n",
        "schedule.wsd_decay_style": "exp | exponential\ncosine_annealing | cosine\n1-sqrt, sqrt | minus_sqrt\n",
        "model.router.score_function": """
topk_softmax | softmax
sigmoid_topk, noaux_tc, sqrtsoftplus | sigmoid
""",
        "model.mamba2.output_norm": """
norm_after_gate, gate_before_norm | after_gate
norm_before_gate, gate_after_norm | before_gate
identity, null, false | none
""",
        "model.router.group_score": "topk2, top2, top2_sum, noaux_tc | sum\ngreedy, group_limited_greedy | max\n",
        "model.router.drop_policy": "probs, prob, weight, score | probability\norder, fifo | position\n",
        "model.layer_pattern.N": """
full, full_attention, dense, causal, all | global
sliding, sliding_attention, sliding_window, swa, windowed, chunked_attention, local_sliding | local
""",
        "model.rope_pattern.N": "rotary, yes, true, 1 | rope\nnope, no, false, 0, no_rope | none\n",
        "mesh.experts_over.N": """
dp, ddp, data_parallel | data
zero, zero3, fsdp_size, sharded | fsdp
ep, experts, expert_parallel | expert
cp, sp, sequence | context
tp, model, etp, tensor_parallel | tensor
""",
        "pipeline.schedule": """
interleaved, interleaved_1f1b, 1f1b_interleaved, vpp, virtual_pipeline | 1f1b | with pipeline.virtual_stages
    above 1
one_f_one_b, pipedream, pipedream_flush, dapple | 1f1b
zb, zb_h1, zb-h2, zbv, ZBVZeroBubble, InterleavedZeroBubble | zero_bubble
afab, all_forward_all_backward, fthenb, looped_bfs, breadth_first | gpipe
dualpipe, dualpipev | | zero_bubble is the nearest schedule
""",
        "precision.compute": FLOATS + HALF + FP8,
        "precision.gradients": FLOATS + FP8,
        "precision.accumulation": FLOATS + FP8,
        "precision.fp8.recipe": """
tensorwise, dynamic, per_tensor, current_scaling, float8_current_scaling, fp8, true, on, amax | current
delayed_scaling, static, te | delayed
off, no, false, null, bf16 | none
block, float8_block_scaling, deepseek, block_scaling | blockwise
mx, mxfp8_block_scaling | mxfp8
fp4, e2m1, nvfp4_block_scaling | nvfp4
rowwise, custom | | run.extensions registers a recipe of your own
""",
        "precision.fp8.backend": """
te | transformer_engine
jax, local, native | xla
emulation, reference, simulated | emulated
""",
        "precision.fp8.format": "e4m3fn, float8_e4m3fn | e4m3\nhybrid_e4m3_e5m2, e5m2, both, true | hybrid\n",
        "precision.fp8.amax_algorithm": "maximum, amax | max\nrecent, latest, last | most_recent\n",
        "optimizer.kind": """
adam, fusedadam, adamw_torch, adamw_torch_fused, adamw_fused, adamw_hf, adamw_apex_fused, adam_pax,
    distributed_adam | adamw
adamw_8bit, adamw_bnb_8bit, adam8bit, paged_adamw_8bit, paged_adamw, adamw_torch_8bit | adamw | with
    optimizer.state=int8
momentum, nesterov, sgdm, vanilla | sgd
dist_muon, muonclip, moonlight, normuon, torch_muon | muon
lion_8bit, lion_32bit, paged_lion | lion
adafactor, adagrad, rmsprop, lamb, lars, shampoo, sophia, adamax, radam, galore_adamw, prodigy, came, apollo | |
    it does not exist here
""",
        "optimizer.state": """
8bit, int8_blockwise, uint8 | int8
fp8, float8, float8_e4m3fn | int8 | of the same size
"""
        + FLOATS,
        "optimizer.master": "fp32, float, f32, true | float32\nbf16, bfloat16, remainder, kahan | split\n",
        "optimizer.muon.coefficients": """
jordan, keller, ns5, simple, newton_schulz, default | quintic
polar, pe | polar_express
""",
        "optimizer.muon.scale": """
match_rms_adamw, moonshot, kimi, rms, update_rms | match_adamw
shape_scaling, original, jordan, spectral_norm | spectral
unit_rms_norm | spectral | which is √max(1, out / in), the same for matrices with out ≥ in
""",
        "schedule.kind": """
none, fixed, const, constant_with_warmup, flat | constant
linear_with_warmup, polynomial, warmup_linear, linear_decay, warmup_decay | linear
cos, cosine_with_warmup, cosine_with_min_lr, cosine_annealing, warmup_cosine, cosine_decay | cosine
warmup_stable_decay, trapezoid, trapezoidal, trapeze | wsd
inverse-square-root, invsqrt, rsqrt, isqrt, noam, sqrt | inverse_sqrt
cosine_with_restarts, reduce_lr_on_plateau, onecycle, exponential, step | | it does not exist here
""",
        "data.kind": """
megatron, mmap, bin, gpt, bin_idx, mcore, indexed_dataset, packed | indexed
json, jsonl, json_lines, hf, parquet, txt, raw, grain, c4, huggingface, pretrain | text
sft, instruct, instruction, conversation, conversations, messages, prompt_completion, sharegpt, alpaca | chat
mock, random, dummy, fake, null | synthetic
""",
        "data.order": """
shuffle, random, true, yes | shuffled
sequence, linear, in_order, false, no, none, unshuffled | sequential
mcore, gpt, megatron_core | megatron
""",
        "data.packing": """
stream, wrapped, concat, greedy, fifo | sequential
true, yes, bfd, ffd, best_fit, first_fit_decreasing | first_fit
wlb, work, by_work, dp_balanced | balanced
false, no, unpacked, off | none
""",
        "data.too_long": """
truncation, cut, trim, right, keep_start | truncate
discard, skip, filter, remove, ignore | drop
split, wrap, error, keep_end, left | | a longer conversation loses its end, or is left out
""",
        "checkpoint.init_state": """
finetune, params, model, weights_only, false, none | weights
no_load_optim, step | position | which is the step and the position in the data, with a new optimizer
full, everything, optimizer, full_state, resume, true, load | all
""",
        "checkpoint.export_hf.dtype": FLOATS + HALF,
        "checkpoint.export_hf.quantization": """
fp8, deepseek, finegrained_fp8, block, blockwise | fp8_block
compressed_tensors, channel, per_channel, fp8_dynamic | fp8_channel
static, per_tensor, fp8_static | fp8_tensor
fp4, gpt_oss | mxfp4
off, no, false, null, bf16 | none
nvfp4, awq, gptq, int4, int8, bitsandbytes, modelopt, gguf | | other tools quantise an exported folder so
""",
        "remat.policy": """
no, false, off, null, disable | none
all, true, yes, block, uniform, blocks, everything, nothing_saveable, gradient_checkpointing, recompute | full
core_attn, attention, core_attention, selective_attention, flash | selective
minimal, dots, dots_saveable, checkpoint_dots, save_dots, dots_with_no_batch_dims_saveable, op, sac, save_qkv_proj,
    minimal_flash, memory_budget | save_matmuls
cpu, cpu_offload, host, offloading, minimal_offloaded, activation_offload, save_dot_with_context_except_mlp | offload
""",
        "kernels.attention": """
flash, flash_attention, flash_attention_2, flash_attention_3, flash2, flash3, fa2, fa3, fused, sdpa, fused_attention,
    autoselected, te, flex_attention, flash_attn | auto | which is the fastest one
cudnn_flash, cudnn_flash_te, cudnn_flash_jax, cudnn_sdpa | cudnn
mosaic, splash, tokamax, own | pallas
eager, dot_product, xla, math, local, unfused, vanilla, naive, jax | reference
""",
        "communication.context": """
p2p, ring_attention, pass-kv, zigzag | ring
a2a, ulysses, deepspeed_ulysses | all_to_all
a2a+p2p, usp, unified, 2d | all_to_all+ring
ag | all_gather
""",
        "communication.experts": """
a2a, flex, deepep, hybridep, alltoall_seq | all_to_all
ag, dense | all_gather
""",
        "kernels.linear_attention": """
mosaic_gpu, mosaic, pallas, fla, flash_linear_attention, triton, mamba_ssm, cuda | jla | on Hopper; or auto
chunked, chunk, torch, naive, xla, jax, recurrent | reference
""",
        "kernels.grouped_matmul": """
megablox, gmm, grouped_gemm, cutlass, deepgemm, te, tokamax | auto | which is the fastest one
batched, bmm, cublas | xla
ragged_dot, loop, sequential, eager | reference
""",
    }.items()
}


def plain(value: object) -> str:
    """A value without the signs and capitals in which frameworks differ."""
    return re.sub(r"[\s._+-]", "", str(value)).lower()


def choice_cure(key: str, value: object, choices: Sequence[str], registered: bool = False) -> str:
    """The correction of a value that is none of the `choices` of `key` (with N): by its meaning elsewhere, or near.

    `registered`: extensions may add choices.
    """
    given = plain(value)
    other = next((row for row in OTHER_VALUES.get(key, ()) if given in map(plain, row.names)), None)
    if other is None and (feature := missing_feature("", value)):
        return feature
    if other is None:
        spelled = {plain(choice): choice for choice in choices}
        near = [spelled[name] for name in difflib.get_close_matches(given, spelled, 1, 0.75)]
        other = OtherName((), near[0], "") if near else None
    if other is None:
        return f"use {listed(choices)}" + ", or name the module that registers it in run.extensions" * registered
    if not other.ours:
        return f"{other.note}; use {listed(choices)}"
    meant = f"use {other.ours}, {other.note}; the" if other.note else f"did you mean {other.ours}? The"
    return f"{meant} choices are {listed(choices, 'and')}"
