"""Other frameworks' names for our keys, as data for counterparts.py and for the tables of docs/migration.md.

A row is `names | our key | note`, its further lines indented. The names are in the framework's spelling. Our key may
have a value. The note gives the difference and follows our key after a comma; without a key it is a clause with the
reason.
"""

import re
from typing import NamedTuple


class OtherName(NamedTuple):
    """One setting of another framework (`names`) and its counterpart here: `ours`, or "" if there is none."""

    names: tuple[str, ...]
    ours: str
    note: str


def _rows(text: str) -> tuple[OtherName, ...]:
    joined = re.sub(r"\n +", " ", text.strip())
    rows = ([part.strip() for part in line.split("|")] for line in joined.splitlines())
    return tuple(OtherName(tuple(row[0].split(", ")), row[1], "".join(row[2:])) for row in rows)


MEGATRON = _rows("""
tensor-model-parallel-size | mesh.tensor
sequence-parallel | | sequence parallelism is always on with mesh.tensor
pipeline-model-parallel-size | mesh.pipeline
num-virtual-stages-per-pipeline-rank | pipeline.rounds
num-layers-per-virtual-pipeline-stage | pipeline.rounds | which is model.num_layers / (mesh.pipeline * layers per
    virtual stage)
pipeline-model-parallel-layout, decoder-first-pipeline-num-layers, decoder-last-pipeline-num-layers | pipeline.layout
    | a list with the number of layers of each virtual stage
context-parallel-size | mesh.context
cp-comm-type | kernels.context | ring for p2p, all_to_all for a2a, or all_gather
expert-model-parallel-size | mesh.expert | an axis of its own: data * fsdp * expert is Megatron's data-parallel size
expert-tensor-parallel-size | mesh.experts_over | a list of axes: with tensor in it each expert is whole (size 1);
    without it tensor divides each expert's width
use-distributed-optimizer | | mesh.data always stores weights and optimizer state sharded (ZeRO-1)
use-torch-fsdp2, use-megatron-fsdp, data-parallel-sharding-strategy | mesh.fsdp | instead of mesh.data, for ZeRO-3
overlap-grad-reduce, overlap-param-gather, overlap-p2p-communication, tp-comm-overlap, moe-shared-expert-overlap,
    overlap-moe-expert-parallel-comm | | communication always overlaps with computation where possible
global-batch-size | batch.global_size
rampup-batch-size | batch.schedule | such as '0: START, T: START + INCREMENT' with the tokens T = samples of the ramp-up
    * batch.sequence_length / number of increments
micro-batch-size | batch.num_microbatches | which is batch.global_size / (micro-batch size * data * fsdp * expert)
seq-length, encoder-seq-length, decoder-seq-length | batch.sequence_length
train-iters | run.steps
train-samples | run.steps | which is samples / batch.global_size; data.train_samples for data.order=megatron
eval-interval | run.eval_interval
eval-iters | run.eval_steps
log-interval | run.log_interval
seed | run.seed
deterministic-mode | run.deterministic
num-layers, encoder-num-layers, decoder-num-layers | model.num_layers
hidden-size | model.hidden_size
num-attention-heads | model.num_heads
num-query-groups, group-query-attention | model.num_kv_heads
kv-channels | model.head_dim
multi-latent-attention, kv-lora-rank | model.kv_lora_rank | which alone means latent attention
q-lora-rank | model.q_lora_rank
qk-head-dim | model.qk_nope_head_dim
qk-pos-emb-head-dim | model.qk_rope_head_dim
v-head-dim | model.v_head_dim
rotary-scaling-factor, mscale, mscale-all-dim | model.rope_scaling | a mapping such as {kind: yarn, factor: 40,
    original_max_positions: 4096, mscale: 1.0, mscale_all_dim: 1.0}
ffn-hidden-size | model.ffn_hidden_size | with another default for SwiGLU, so set it explicitly
vocab-size, padded-vocab-size | model.vocab_size
make-vocab-size-divisible-by | model.vocab_multiple | which does not depend on mesh.tensor; Megatron multiplies it by
    the tensor-parallel size
max-position-embeddings | model.max_positions | only for learned positions; with rope leave it out
position-embedding-type, use-rotary-position-embeddings, no-position-embedding | model.position | rope (the default),
    learned for learned_absolute, or none
rotary-base | model.rope_theta
rotary-percent | model.rope_fraction
no-rope-freq | model.rope_pattern | a list such as [rope, rope, rope, none] for frequency 4
use-rope-scaling, rope-scaling-factor | model.rope_scaling | a mapping such as {factor: 8}, by default with
    Llama 3's rule
normalization | model.norm | rmsnorm (the default) or layernorm
norm-epsilon, layernorm-epsilon | model.norm_epsilon
apply-layernorm-1p | model.norm_zero_centred
qk-clip, qk-clip-threshold, qk-clip-alpha | model.qk_clip | the threshold; alpha is 0.5
qk-layernorm | model.qk_norm | not for latent attention, whose latents are always normalised
swiglu | model.activation=swiglu | the default; set model.ffn_hidden_size too, since its default differs
squared-relu | model.activation=relu2
disable-bias-linear, add-bias-linear | model.attention_bias | and model.mlp_bias; both are false by default
untie-embeddings-and-output-weights | model.tie_embeddings=false | the default
hidden-dropout | model.dropout
init-method-std | model.init_std
window-size | model.sliding_window | which counts the query's own token: left window size + 1
window-attn-skip-freq | model.layer_pattern | a list such as [local, local, local, global] for frequency 4
softmax-type | model.attention_sinks | true for learnable
num-experts | model.num_experts
moe-router-topk | model.experts_per_token
moe-ffn-hidden-size | model.expert_ffn_hidden_size
moe-shared-expert-intermediate-size | model.shared_expert_ffn_hidden_size
moe-shared-expert-gate | model.shared_expert_gate
moe-layer-freq | model.moe_layer_interval | where the last of n layers has experts, in Megatron the first;
    model.first_dense_layers=3 for [0]*3+[1]*58
moe-aux-loss-coeff, moe-router-load-balancing-type | model.router.global_loss | or model.router.sequence_loss for
    seq_aux_loss, or model.router.sinkhorn=true
moe-z-loss-coeff | model.router.z_loss
mtp-num-layers | model.mtp_layers
mtp-loss-scaling-factor | model.mtp_loss_weight | Megatron's default is 0.1
moe-input-jitter-eps | model.router.jitter
moe-router-score-function | model.router.score_function
moe-router-pre-softmax | model.router.pre_softmax
moe-router-num-groups | model.router.num_groups
moe-router-group-topk | model.router.groups_per_token
moe-router-topk-scaling-factor | model.router.scaling_factor
moe-router-enable-expert-bias | model.router.expert_bias
moe-router-bias-update-rate | model.router.bias_update_rate
moe-router-force-load-balancing | model.router.force_balance
moe-expert-capacity-factor | model.router.capacity_factor | for a microbatch over all devices, in Megatron per device
moe-token-drop-policy | model.router.drop_policy | probability for probs, or position
moe-token-dispatcher-type | kernels.dispatch | all_to_all, all_gather or auto
moe-grouped-gemm | | experts always use a grouped matmul
optimizer | optimizer.kind | adamw for adam, sgd, lion, or muon for muon and dist_muon
muon-momentum | optimizer.muon.momentum
muon-use-nesterov, muon-no-use-nesterov | optimizer.muon.nesterov
muon-num-ns-steps | optimizer.muon.steps
muon-scale-mode, muon-extra-scale-factor | optimizer.muon.scale | match_adamw: spectral times 0.2
muon-no-split-qkv, muon-split-qkv, muon-tp-mode | | queries, keys and values are always matrices of their own, whole
lr | schedule.learning_rate
min-lr | schedule.min_learning_rate
lr-decay-style | schedule.kind | wsd for WSD, inverse_sqrt for inverse-square-root
lr-warmup-iters | schedule.warmup_steps
lr-warmup-samples, lr-warmup-fraction | schedule.warmup_steps | in steps
lr-decay-iters | schedule.decay_steps | counted from step 1, warm-up included
lr-decay-samples | schedule.decay_steps | in steps
lr-wsd-decay-iters | schedule.wsd_decay_steps
weight-decay | optimizer.weight_decay
adam-beta1, sgd-momentum, lion-beta1 | optimizer.beta1
adam-beta2, lion-beta2 | optimizer.beta2
adam-eps | optimizer.epsilon
clip-grad | optimizer.clip_norm
calculate-per-token-loss | | the loss is always the mean over all tokens of the step
bf16 | precision.compute=bfloat16 | the default
fp16 | precision.compute=float16 | with dynamic loss scaling
accumulate-allreduce-grads-in-fp32 | precision.accumulation=float32 | the default, as precision.gradients=float32
grad-reduce-in-bf16 | precision.gradients=bfloat16 | and precision.accumulation=bfloat16 for the sums over microbatches
main-grads-dtype | precision.accumulation | float32 for fp32, bfloat16 for bf16
use-precision-aware-optimizer | optimizer.master=split | its BF16 weights and 16-bit remainders of FP32 master weights
main-params-dtype | optimizer.master | split or float32 for fp32; master weights are always FP32 numbers
exp-avg-dtype, exp-avg-sq-dtype | optimizer.state | float32 for fp32, bfloat16 for bf16; int8 for fp8
optimizer-cpu-offload | optimizer.offload | 1.0, or the value of --optimizer-offload-fraction
optimizer-offload-fraction | optimizer.offload
fp8-format | precision.fp8.format | together with precision.fp8.recipe
fp8-recipe | precision.fp8.recipe | current for tensorwise, or delayed
fp8-margin | precision.fp8.margin
fp8-amax-history-len | precision.fp8.amax_history_length
fp8-amax-compute-algo | precision.fp8.amax_algorithm
num-layers-at-start-in-bf16, first-last-layers-bf16 | precision.fp8.first_bf16_layers
num-layers-at-end-in-bf16 | precision.fp8.last_bf16_layers
transformer-impl | precision.fp8.backend | only FP8 matmuls can use Transformer Engine's kernels
recompute-granularity | remat.policy | full or selective
recompute-activations | remat.policy=selective
recompute-num-layers, recompute-method | remat.layers | for the method block; remat.group for uniform
cpu-offloading, fine-grained-activation-offloading | remat.policy=offload
optimizer-cpu-offload, optimizer-offload-fraction | optimizer.offload | which is the share of the moments on the host
decoupled-lr | optimizer.groups | with parameters [embedding.*, head] and learning_rate, a multiple of the schedule's
attention-backend, use-flash-attn | kernels.attention | auto (the default) is the fastest one
cross-entropy-loss-fusion | | the loss is always fused
data-path, train-data-path | data.train | a prefix, '0.3 a 0.7 b', or [a, b] for paths without weights
data-args-path, per-split-data-args-path | data.train | {file: PATH}; or the file's lists, in data.valid and .test too
valid-data-path | data.valid
test-data-path | data.test
split | data.split | with no default; Megatron's is 969,30,1
mock-data | data.kind=synthetic
tokenizer-model, tokenizer-type, vocab-file | data.tokenizer | byte, null:N, a folder or a file of a tokenizer
num-workers | data.workers
reset-attention-mask | data.reset_attention | with the ends of documents from the .idx file
reset-position-ids | data.reset_positions
fim-rate | data.fim_rate | of the documents, cut at tokens; --fim-data is fim_rate above 0
fim-spm-rate | data.fim_spm_rate
fim-prefix-token, fim-middle-token, fim-suffix-token | data.fim_tokens | prefix, middle and suffix
eod-mask-loss | data.mask_end_of_document_loss
save | run.dir
ckpt-step | checkpoint.resume_step
load | run.dir | from which the same command resumes; checkpoint.init_from for the weights only
finetune, pretrained-checkpoint | checkpoint.init_from
no-save-optim | checkpoint.save_optimizer=false
save-interval | run.checkpoint_interval
save-retain-interval | checkpoint.keep_every
most-recent-k | checkpoint.keep
async-save | | checkpoints are always written in the background
exit-signal-handler | | SIGTERM always saves a checkpoint and stops
tensorboard-dir | logging.tensorboard | true by default; the files go to RUN/tensorboard
wandb-project | logging.wandb_project | together with logging.wandb=true
profile, profile-step-start, use-pytorch-profiler | logging.profile_start
profile-step-end | logging.profile_steps | the number of steps in the trace
""")

MEGATRON_WITHOUT = _rows("""
attention-dropout | | there is no dropout of attention weights; model.dropout is hidden dropout
start-weight-decay, end-weight-decay, weight-decay-incr-style | | the weight decay is constant: optimizer.weight_decay
loss-scale, initial-loss-scale, min-loss-scale, loss-scale-window, hysteresis | | precision.compute=float16 always
    scales the loss dynamically
add-qkv-bias | model.attention_bias | =qkv
apply-query-key-layer-scaling, rotary-interleaved | | it has no counterpart
recompute-modules | | remat.policy selects the activations to recompute
exit-duration-in-mins, exit-interval | | send SIGTERM to save and stop
distributed-backend, distributed-timeout-minutes, local-rank | | jax starts the processes; see README, Several processes
data-cache-path | data.index_cache | for data.order=megatron
use-mcore-models, no-masked-softmax-fusion, no-bias-swiglu-fusion, no-gradient-accumulation-fusion | | the compiler
    fuses operations; leave it out
""")

MAXTEXT = _rows("""
ici_data_parallelism, dcn_data_parallelism | mesh.data | one size over all hosts: ici * dcn
ici_fsdp_parallelism, dcn_fsdp_parallelism | mesh.fsdp | one size over all hosts: ici * dcn
ici_tensor_parallelism, dcn_tensor_parallelism, ici_tensor_sequence_parallelism | mesh.tensor | always with sequence
    parallelism
ici_pipeline_parallelism, dcn_pipeline_parallelism | mesh.pipeline
ici_expert_parallelism, dcn_expert_parallelism | mesh.expert
ici_context_parallelism, dcn_context_parallelism, ici_sequence_parallelism | mesh.context
ici_context_usp_ulysses_parallelism | mesh.context | with kernels.context=all_to_all
num_pipeline_microbatches, gradient_accumulation_steps | batch.num_microbatches | with and without a pipeline
num_pipeline_repeats | pipeline.rounds
per_device_batch_size | batch.global_size | which is per_device_batch_size * number of devices *
    gradient_accumulation_steps
max_target_length | batch.sequence_length
base_emb_dim | model.hidden_size
base_mlp_dim | model.ffn_hidden_size
base_num_decoder_layers | model.num_layers
base_num_query_heads | model.num_heads
base_num_kv_heads | model.num_kv_heads
mlp_activations | model.activation | swiglu for [silu, linear], geglu for [gelu, linear]
normalization_layer_epsilon | model.norm_epsilon
rope_max_timescale | model.rope_theta
local_rope_max_timescale | model.rope_local_theta
nope_layer_interval | model.rope_pattern | a list such as [rope, rope, rope, none] for interval 4
use_post_attn_norm, use_post_ffw_norm | model.norm_placement=both
logits_via_embedding | model.tie_embeddings
dropout_rate | model.dropout
sliding_window_size | model.sliding_window
attn_logits_soft_cap | model.attention_softcap
final_logits_soft_cap | model.logit_softcap
attention_sink | model.attention_sinks
use_qk_norm | model.qk_norm
z_loss_multiplier | model.z_loss
mtp_num_layers | model.mtp_layers
mtp_loss_scaling_factor | model.mtp_loss_weight | MaxText's default is 0.1
num_experts_per_tok | model.experts_per_token
base_moe_mlp_dim | model.expert_ffn_hidden_size
first_num_dense_layers | model.first_dense_layers
shared_experts | model.shared_expert_ffn_hidden_size | which is the number of shared experts * the width of one
load_balance_loss_weight | model.router.global_loss
routed_score_func | model.router.score_function
routed_scaling_factor | model.router.scaling_factor
routed_bias | model.router.expert_bias
routed_bias_update_rate | model.router.bias_update_rate
n_routing_groups | model.router.num_groups
topk_routing_group | model.router.groups_per_token
norm_topk_prob | model.router.normalise
lr_schedule_type | schedule.kind
learning_rate_final_fraction | schedule.min_learning_rate | the learning rate itself, not a fraction of the highest
warmup_steps_fraction | schedule.warmup_steps | in steps, not a fraction
learning_rate_schedule_steps | schedule.decay_steps
wsd_decay_steps_fraction | schedule.wsd_decay_steps | in steps, not a fraction
opt_type | optimizer.kind
adam_b1 | optimizer.beta1
adam_b2 | optimizer.beta2
adam_eps | optimizer.epsilon
adam_weight_decay | optimizer.weight_decay
gradient_clipping_threshold | optimizer.clip_norm
grad_dtype | precision.gradients
weight_dtype | | master weights are always FP32 numbers; optimizer.state is the form of the moments
mu_dtype | optimizer.state | of both moments
optimizer_memory_host_offload | optimizer.offload | 1.0 for true
quantization | precision.fp8.recipe | none, current or delayed
remat_policy | remat.policy | none by default, in MaxText full
scan_layers | | compile time decides whether layers run in loops; kernels.scan_unroll sets the layers of an iteration
dataset_type | data.kind | indexed (Megatron's .bin/.idx files), text, chat or synthetic
dataset_path, grain_train_files, hf_train_files | data.train | text files, or the prefix of a .bin/.idx pair
train_data_columns | data.text_key
tokenizer_path | data.tokenizer
grain_worker_count | data.workers
enable_data_shuffling | data.order | shuffled or sequential
data_shuffle_seed, init_weights_seed | run.seed | one seed for weights, data and dropout
base_output_directory | run.dir
run_name | run.name
log_period | run.log_interval
checkpoint_period | run.checkpoint_interval
max_num_checkpoints_to_keep | checkpoint.keep
load_parameters_path, load_full_state_path | checkpoint.init_from | megajax runs and Hugging Face folders
async_checkpointing | | checkpoints are always written in the background
skip_first_n_steps_for_profiler, profiler | logging.profile_start | the first step of the trace
profiler_steps | logging.profile_steps
enable_wandb | logging.wandb
wandb_project_name | logging.wandb_project
""")

# The keys of version 0.2's TOML files and command line.
TORCHTITAN = _rows("""
parallelism.data_parallel_shard_degree | mesh.fsdp
parallelism.data_parallel_replicate_degree | mesh.data | sharded in storage too (ZeRO-1)
parallelism.tensor_parallel_degree | mesh.tensor
parallelism.pipeline_parallel_degree | mesh.pipeline
parallelism.context_parallel_degree | mesh.context
parallelism.expert_parallel_degree | mesh.expert | an axis of its own: torchtitan's shard degree is fsdp * expert
parallelism.pipeline_parallel_schedule | pipeline.schedule | gpipe, 1f1b or zero_bubble; pipeline.rounds above 1 for
    Interleaved1F1B
parallelism.pipeline_parallel_layers_per_stage, parallelism.module_fqns_per_model_part | pipeline.layout | a list with
    the number of layers of each virtual stage
parallelism.pipeline_parallel_microbatch_size | batch.num_microbatches | which is batch.global_size / (micro-batch
    size * data * fsdp * expert)
training.local_batch_size | batch.num_microbatches | which is batch.global_size / (local batch size * data * fsdp *
    expert)
training.global_batch_size | batch.global_size
training.seq_len | batch.sequence_length
training.steps | run.steps
training.max_norm | optimizer.clip_norm
training.dataset, training.dataset_path | data.train | text files, or the prefix of a .bin/.idx pair
training.mixed_precision_param, training.dtype | precision.compute
training.mixed_precision_reduce | precision.gradients
debug.seed | run.seed
debug.deterministic | run.deterministic
model.name, model.flavor | include | such as include: models/llama3_8b.yaml, a file of configs/models
model.hf_assets_path, model.tokenizer_path | data.tokenizer
optimizer.name | optimizer.kind
optimizer.eps | optimizer.epsilon
optimizer.lr | schedule.learning_rate
lr_scheduler.warmup_steps | schedule.warmup_steps
lr_scheduler.total_steps | schedule.decay_steps
lr_scheduler.decay_ratio | schedule.wsd_decay_steps | in steps, with schedule.kind=wsd
lr_scheduler.decay_type | schedule.kind
lr_scheduler.min_lr_factor | schedule.min_learning_rate | the learning rate itself, not a fraction of the highest
activation_checkpoint.mode | remat.policy | none by default; selective recomputes attention only, save_matmuls is
    nearest to torchtitan's selective
quantize.linear.float8.recipe_name | precision.fp8.recipe | current for tensorwise
compile.enable | | everything is always compiled
checkpoint.interval | run.checkpoint_interval
checkpoint.keep_latest_k | checkpoint.keep
checkpoint.initial_load_path | checkpoint.init_from | megajax runs and Hugging Face folders
checkpoint.last_save_in_hf | checkpoint.export_hf.dir | the directory of the folders
checkpoint.folder, job.dump_folder | run.dir
checkpoint.async_mode | | checkpoints are always written in the background
validation.freq | run.eval_interval
validation.steps | run.eval_steps
metrics.log_freq | run.log_interval
metrics.enable_tensorboard | logging.tensorboard
metrics.enable_wandb | logging.wandb
profiling.enable_profiling, profiling.profile_freq | logging.profile_start
""")

HUGGING_FACE = _rows("""
num_hidden_layers, n_layer | model.num_layers
n_embd | model.hidden_size
num_attention_heads, n_head | model.num_heads
num_key_value_heads | model.num_kv_heads
intermediate_size, n_inner | model.ffn_hidden_size
n_positions, n_ctx | model.max_positions | only for learned positions; with rope leave it out
rms_norm_eps, layer_norm_eps, layer_norm_epsilon | model.norm_epsilon
hidden_act, activation_function | model.activation | swiglu for silu, gelu for gelu_new
tie_word_embeddings | model.tie_embeddings | false by default
partial_rotary_factor | model.rope_fraction
rope_local_base_freq | model.rope_local_theta
no_rope_layers, no_rope_layer_interval | model.rope_pattern | a list of rope and none
query_pre_attn_scalar | model.attention_scale | which is its power of -0.5
initializer_range | model.init_std
layer_types | model.layer_pattern | global for full_attention, local for sliding_attention
attn_logit_softcapping | model.attention_softcap
final_logit_softcapping | model.logit_softcap
resid_pdrop, embd_pdrop, hidden_dropout_prob | model.dropout
num_local_experts, n_routed_experts | model.num_experts
moe_intermediate_size | model.expert_ffn_hidden_size
router_aux_loss_coef | model.router.global_loss
first_k_dense_replace | model.first_dense_layers
decoder_sparse_step | model.moe_layer_interval
scoring_func | model.router.score_function
n_group | model.router.num_groups
topk_group | model.router.groups_per_token
per_device_train_batch_size | batch.global_size | which is per_device_train_batch_size * gradient_accumulation_steps *
    number of devices
max_steps | run.steps
num_train_epochs | run.steps | which is epochs * tokens / (global_size * sequence_length)
warmup_ratio | schedule.warmup_steps | in steps, not a fraction
lr_scheduler_type | schedule.kind
optim | optimizer.kind
adam_epsilon | optimizer.epsilon
max_grad_norm | optimizer.clip_norm
gradient_checkpointing | remat.policy | full or selective
logging_steps | run.log_interval
save_steps | run.checkpoint_interval
save_total_limit | checkpoint.keep
save_only_model | checkpoint.save_optimizer | the opposite: false for weights only
resume_from_checkpoint | | the same command with the same run.dir resumes
output_dir | run.dir
dataset_text_field, text_column_name | data.text_key
dataloader_num_workers | data.workers
report_to | logging.wandb | or logging.tensorboard
""")

# Common names that belong to no single framework.
SHORT = _rows("""
tp, tensor_parallel, tensor_parallel_size, tensor_parallel_degree | mesh.tensor
dp, ddp, data_parallel, data_parallel_size | mesh.data
zero, zero3, fsdp_size | mesh.fsdp
pp, pipeline_parallel, pipeline_parallel_size, pipeline_parallel_degree | mesh.pipeline
cp, sp, context_parallel, sequence, context_parallel_degree | mesh.context
ep, expert_parallel, mesh.experts, expert_parallel_size, expert_parallel_degree | mesh.expert
vpp, vp, virtual_stages, num_virtual_stages, interleave | pipeline.rounds
num_gpus, gpus, num_devices, devices, nodes, num_nodes | mesh.data=-1 | for all devices
mbs, microbatch_size, local_batch_size | batch.num_microbatches | which is batch.global_size / (micro-batch size *
    data * fsdp * expert)
microbatches, grad_accum, gradient_accumulation, grad_accum_steps | batch.num_microbatches
gbs, bs, batch_size, global_batch, train_batch_size | batch.global_size | the sequences of one step over all devices
seq_len, seqlen, max_seq_len, max_seq_length, max_length, context_length, block_size, length | batch.sequence_length
n_layers, layers, depth, num_blocks | model.num_layers
d_model, dim, hidden_dim, embed_dim, width, embedding_size | model.hidden_size
n_heads, heads | model.num_heads
n_kv_heads, kv_heads | model.num_kv_heads
d_ff, ffn_dim, mlp_dim, ffn_size, mlp_hidden_size | model.ffn_hidden_size
vocab, n_vocab, vocabulary_size | model.vocab_size
top_k, topk, moe_topk | model.experts_per_token
rope_base, theta | model.rope_theta
learning_rate_min, lr_min, final_lr, eta_min | schedule.min_learning_rate
max_lr, peak_lr, base_lr | schedule.learning_rate
warmup, warmup_iters, warmup_steps_num | schedule.warmup_steps
decay_iters, lr_decay_steps, total_steps | schedule.decay_steps
scheduler, lr_scheduler, lr_schedule, schedule.name, schedule.type | schedule.kind
wd | optimizer.weight_decay
optimizer.type, optim_name | optimizer.kind
b1, momentum | optimizer.beta1
b2 | optimizer.beta2
betas | optimizer.beta1 | and optimizer.beta2
eps | optimizer.epsilon
grad_clip, max_norm, clip, gradient_clipping, grad_norm, grad_clip_norm, gradient_clip_val | optimizer.clip_norm
num_steps, train_steps, iters, iterations, max_iters, train_iterations | run.steps
epochs, num_epochs, max_epochs | run.steps | which is epochs * tokens / (global_size * sequence_length)
random_seed | run.seed
save_dir, checkpoint_dir, ckpt_dir, checkpoint.path, out_dir, logdir, log_dir | run.dir
save_every, ckpt_interval, checkpoint_every, checkpoint.every, save_freq | run.checkpoint_interval
checkpoint.load, init_checkpoint, pretrained, load_from | checkpoint.init_from
resume | | the same command with the same run.dir resumes
log_every, log_freq, log_steps | run.log_interval
eval_every, eval_freq, val_interval, val_check_interval | run.eval_interval
eval_batches, val_steps, limit_val_batches | run.eval_steps
data.path, data.paths, data.prefix, data.dataset, data_dir, train_data, train_path, train_file | data.train | the
    prefix of a .bin/.idx pair
val_data, data.val, data.validation, data.eval | data.valid
tokenizer_name, tokenizer_file | data.tokenizer
dtype, precision.dtype, mixed_precision, amp | precision.compute
precision.params | | master weights are always FP32 numbers; optimizer.state is the form of the moments
fp8 | precision.fp8.recipe | current or delayed
activation_checkpointing, recompute, checkpoint_activations, remat | remat.policy
flash_attention, use_flash_attention, attn_implementation | kernels.attention
tensorboard | logging.tensorboard
wandb | logging.wandb
project | logging.wandb_project
profile_step | logging.profile_start
""")

# In order of precedence, for names with several meanings.
ALL = (*MEGATRON, *MEGATRON_WITHOUT, *MAXTEXT, *TORCHTITAN, *HUGGING_FACE, *SHORT)
