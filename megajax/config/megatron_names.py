"""Megatron-LM's names for our keys, in the form of other_names.py."""

from megajax.config.other_name import rows

MEGATRON = rows("""
tensor-model-parallel-size | mesh.tensor
sequence-parallel | | sequence parallelism is always on with mesh.tensor
pipeline-model-parallel-size | mesh.pipeline
num-virtual-stages-per-pipeline-rank | pipeline.virtual_stages
num-layers-per-virtual-pipeline-stage | pipeline.virtual_stages | which is model.num_layers / (mesh.pipeline * layers
    per virtual stage)
pipeline-model-parallel-layout, decoder-first-pipeline-num-layers, decoder-last-pipeline-num-layers | pipeline.layout
    | a list with the number of layers of each virtual stage
context-parallel-size | mesh.context
cp-comm-type | communication.context | auto (the default), or ring for p2p, all_to_all for a2a, all_gather
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
log-params-norm | logging.norms_interval
check-for-spiky-loss | run.spike_factor
check-weight-hash-across-dp-replicas-interval | run.replica_check_interval
distributed-timeout-minutes | run.hang_min_seconds | the shortest time after which a step counts as hung
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
rotary-seq-len-interpolation-factor | model.rope_scaling | a mapping such as {kind: linear, factor: 2}
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
add-qkv-bias | model.attention_bias=qkv
untie-embeddings-and-output-weights | model.tie_embeddings=false | the default
hidden-dropout | model.dropout
init-method-std | model.init_std
mup-base-hidden-size | model.mup_base_width | which alone means µP
window-size | model.sliding_window | which counts the query's own token: left window size + 1
window-attn-skip-freq | model.layer_pattern | a list such as [local, local, local, global] for frequency 4
softmax-type | model.attention_sinks | true for learnable
num-experts, num-moe-experts | model.num_experts
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
moe-token-dispatcher-type | communication.experts | all_to_all, all_gather or auto
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
lr-wsd-decay-style | schedule.wsd_decay_style | exponential is its default
lr-wsd-decay-samples | schedule.wsd_decay_steps | in steps
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
recompute-modules | remat.policy | selective for core_attn; there is no choice of other modules
recompute-num-layers, recompute-method | remat.layers | for the method block; remat.group for uniform
cpu-offloading, fine-grained-activation-offloading | remat.policy=offload
optimizer-cpu-offload, optimizer-offload-fraction | optimizer.offload | the share of the moments on the host, 1.0
    for all
decoupled-lr | optimizer.groups | with parameters [embedding.*, head] and learning_rate, a multiple of the schedule's
attention-backend, use-flash-attn | kernels.attention | auto (the default) is the fastest one
cross-entropy-loss-fusion | | the loss is always fused
data-path, train-data-path | data.train | a prefix, '0.3 a 0.7 b', or [a, b] for paths without weights
data-args-path, per-split-data-args-path | data.train | {file: PATH}; or the file's lists, in data.valid and .test too
valid-data-path | data.valid
test-data-path | data.test
full-validation | run.eval_steps | all
multiple-validation-sets | data.valid_sets | a list of {name, prefix}
split | data.split | with no default; Megatron's is 969,30,1
mock-data | data.kind=synthetic
tokenizer-model, tokenizer-type, vocab-file, merge-file | data.tokenizer | byte, null:N, a folder or a file of a
    tokenizer
num-workers | data.workers
data-cache-path | data.index_cache | index_cache in run.dir by default
reset-attention-mask | data.reset_attention | with the ends of documents from the .idx file
sft | data.kind=chat | with conversations in JSON lines
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
non-persistent-save-interval | checkpoint.local_interval
non-persistent-local-ckpt-dir | checkpoint.local_dir
save-retain-interval | checkpoint.keep_every
most-recent-k | checkpoint.keep
async-save | | checkpoints are always written in the background
exit-signal-handler | | SIGTERM always saves a checkpoint and stops
exit-duration-in-mins | run.max_minutes
exit-interval | run.steps | with schedule.decay_steps of the whole training
tensorboard-dir | logging.tensorboard | true by default; the files go to RUN/tensorboard
wandb-project | logging.wandb_project | together with logging.wandb=true
wandb-exp-name | run.name
profile, profile-step-start, use-pytorch-profiler | logging.profile_start
profile-step-end | logging.profile_steps | the number of steps in the trace
""")

MEGATRON_WITHOUT = rows("""
attention-dropout | | there is no dropout of attention weights; model.dropout is hidden dropout
start-weight-decay, end-weight-decay, weight-decay-incr-style | | the weight decay is constant: optimizer.weight_decay
loss-scale, initial-loss-scale, min-loss-scale, loss-scale-window, hysteresis | | precision.compute=float16 always
    scales the loss dynamically
apply-query-key-layer-scaling | | scores have one scale in all layers, model.attention_scale
rotary-interleaved | | the rotated pairs are always the two halves of a head; the weights of DeepSeek's models are
    sorted as they are read
distributed-backend, local-rank | | jax starts the processes; see README, Several processes
lr-warmup-init | | the warm-up begins at learning_rate / warmup_steps
moe-router-dtype | | routers always compute in FP32
no-load-optim, no-load-rng, no-save-rng | | a run resumes as a whole; checkpoint.init_from takes the weights only
ckpt-format, use-dist-ckpt, ckpt-fully-parallel-save | | checkpoints are always sharded, and
    read on any mesh
use-mcore-models, no-masked-softmax-fusion, no-bias-swiglu-fusion, no-gradient-accumulation-fusion | | the compiler
    fuses operations; leave it out
""")
