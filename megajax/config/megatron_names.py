"""Megatron-LM's flags that have a counterpart here, as data for megatron_flags.py.

A row is `flags | our key | note`, its further lines indented, as in other_names.py; each flag has its type and default:
`name`, `name int=1`, `name str`, `name many` (one or more values), `name off->dest` (the flag makes `dest` false). The
name of Megatron's argument follows `->` where it is another one. Defaults are those of Megatron-Core 0.20.
"""

WITH_COUNTERPART = """
tensor-model-parallel-size int=1 | mesh.tensor
sequence-parallel | | sequence parallelism is always on with mesh.tensor
pipeline-model-parallel-size int=1 | mesh.pipeline
num-virtual-stages-per-pipeline-rank int | pipeline.virtual_stages
num-layers-per-virtual-pipeline-stage int | pipeline.virtual_stages | which is model.num_layers / (mesh.pipeline *
    layers per virtual stage)
pipeline-model-parallel-layout str, decoder-first-pipeline-num-layers int, decoder-last-pipeline-num-layers int,
    account-for-embedding-in-pipeline-split, account-for-loss-in-pipeline-split | pipeline.layout | a list with the
    number of layers of each virtual stage
context-parallel-size int=1 | mesh.context
cp-comm-type many=p2p | communication.context | auto (the default), or ring for p2p, all_to_all for a2a, all_gather,
    all_to_all+ring for a2a+p2p
hierarchical-context-parallel-sizes many | communication.context | all_to_all+ring divides the heads over as many
    devices as divide their number
expert-model-parallel-size int=1 | mesh.expert | an axis of its own: data * fsdp * expert is Megatron's data-parallel
    size
expert-tensor-parallel-size int | mesh.experts_over | a list of axes: with tensor in it each expert is whole (size 1);
    without it tensor divides each expert's width
use-distributed-optimizer | | mesh.data always stores weights and optimizer state sharded (ZeRO-1)
use-torch-fsdp2, use-megatron-fsdp, use-custom-fsdp, data-parallel-sharding-strategy str=optim_grads_params,
    num-distributed-optimizer-instances int=1 | mesh.fsdp | instead of mesh.data, for ZeRO-3
overlap-grad-reduce, overlap-param-gather, overlap-p2p-communication flag->overlap_p2p_comm, tp-comm-overlap,
    moe-shared-expert-overlap | | communication always overlaps with computation where possible
overlap-moe-expert-parallel-comm | communication.overlap_experts
global-batch-size int | batch.global_size
rampup-batch-size many, step-batch-size-schedule str | batch.schedule | such as '0: START, T: START + INCREMENT' with
    the tokens T = samples of the ramp-up * batch.sequence_length / number of increments
micro-batch-size int | batch.num_microbatches | which is batch.global_size / (micro-batch size * data * fsdp * expert)
seq-length int, encoder-seq-length int, decoder-seq-length int | batch.sequence_length
train-iters int | run.steps
train-samples int | run.steps | which is samples / batch.global_size; data.train_samples for data.order=megatron
eval-interval int | run.eval_interval
eval-iters int=100 | run.eval_steps
log-interval int=100 | run.log_interval
log-params-norm | logging.norms_interval | 100 or more steps, because such a step computes the gradients twice
check-for-spiky-loss | run.spike_factor
check-weight-hash-across-dp-replicas-interval int | run.replica_check_interval
distributed-timeout-minutes int=10 | run.hang_min_seconds | the shortest time after which a step counts as hung
seed int=1234 | run.seed
deterministic-mode | run.deterministic
num-layers int, encoder-num-layers int, decoder-num-layers int | model.num_layers
hidden-size int | model.hidden_size
num-attention-heads int | model.num_heads
num-query-groups int=1, group-query-attention | model.num_kv_heads
kv-channels int | model.head_dim
multi-latent-attention, kv-lora-rank int=32 | model.kv_lora_rank | which alone means latent attention
q-lora-rank int | model.q_lora_rank
qk-head-dim int=128 | model.qk_nope_head_dim
qk-pos-emb-head-dim int=64 | model.qk_rope_head_dim
v-head-dim int=128 | model.v_head_dim
rotary-scaling-factor float=1.0, mscale float=1.0, mscale-all-dim float=0.0, rope-type str,
    yarn-original-max-position-embeddings int, yarn-beta-fast float, yarn-beta-slow float,
    no-yarn-correction-range-round-to-int off->yarn_correction_range_round_to_int, yarn-correction-range-round-to-int |
    model.rope_scaling | a mapping such as {kind: yarn, factor: 40, original_max_positions: 4096, mscale: 1.0,
    mscale_all_dim: 1.0}
ffn-hidden-size int | model.ffn_hidden_size | with another default for SwiGLU, so set it explicitly
vocab-size int, padded-vocab-size int | model.vocab_size
make-vocab-size-divisible-by int=128, no-pad-vocab-size off->pad_vocab_size, disable-pad-vocab-size off->pad_vocab_size
    | model.vocab_multiple | which does not depend on mesh.tensor; Megatron multiplies it by the tensor-parallel size
max-position-embeddings int | model.max_positions | only for learned positions; with rope leave it out
position-embedding-type str=learned_absolute, use-rotary-position-embeddings, no-position-embedding
    off->add_position_embedding | model.position | rope (the default), learned for learned_absolute, or none
rotary-base int=10000 | model.rope_theta
rotary-percent float=1.0 | model.rope_fraction
rotary-seq-len-interpolation-factor int | model.rope_scaling | a mapping such as {kind: linear, factor: 2}
no-rope-freq str | model.rope_pattern | a list such as [rope, rope, rope, none] for frequency 4
use-rope-scaling, rope-scaling-factor float=8.0 | model.rope_scaling | a mapping such as {factor: 8}, by default with
    Llama 3's rule
normalization str=LayerNorm | model.norm | rmsnorm (the default) or layernorm
norm-epsilon float=1e-05->layernorm_epsilon, layernorm-epsilon float=1e-05 | model.norm_epsilon
apply-layernorm-1p flag->layernorm_zero_centered_gamma | model.norm_zero_centred
qk-clip, qk-clip-threshold float=100, qk-clip-alpha float=0.5 | model.qk_clip | the threshold; alpha is 0.5
qk-layernorm | model.qk_norm | not for latent attention, whose latents are always normalised
swiglu | model.activation=swiglu | the default; set model.ffn_hidden_size too, since its default differs
squared-relu | model.activation=relu2
quick-geglu, glu-linear-offset float=0.0, activation-func-clamp-value float | model.activation=clamped_swiglu | for
    offset 1 and clamp 7, as in GPT-OSS
openai-gelu, no-bias-gelu-fusion off->bias_gelu_fusion | model.activation=gelu | which is the tanh approximation;
    Megatron's is exact without biases or fusion
disable-bias-linear off->add_bias_linear, add-bias-linear | model.attention_bias | and model.mlp_bias; both are false
    by default
add-qkv-bias | model.attention_bias=qkv
untie-embeddings-and-output-weights | model.tie_embeddings=false | the default
hidden-dropout float=0.1 | model.dropout
init-method-std float=0.02 | model.init_std
use-mup, mup-base-hidden-size int, mup-attn-scale-power float=1.0 | model.mup_base_width | which alone means µP
window-size str | model.sliding_window | which counts the query's own token: left window size + 1
window-attn-skip-freq str | model.layer_pattern | a list such as [local, local, local, global] for frequency 4
softmax-type str=vanilla | model.attention_sinks | true for learnable
num-experts int, num-moe-experts int->num_experts | model.num_experts
moe-router-topk int=2 | model.experts_per_token
moe-ffn-hidden-size int | model.expert_ffn_hidden_size
moe-shared-expert-intermediate-size int | model.shared_expert_ffn_hidden_size
moe-shared-expert-gate | model.shared_expert_gate
moe-layer-freq str=1 | model.moe_layer_interval | where the last of n layers has experts, in Megatron the first;
    model.first_dense_layers=3 for [0]*3+[1]*58
moe-aux-loss-coeff many=0.0, moe-router-load-balancing-type many=aux_loss | model.router.global_loss | or
    model.router.sequence_loss for seq_aux_loss, or model.router.sinkhorn=true (for one expert with
    model.router.score_function=sigmoid)
moe-z-loss-coeff float | model.router.z_loss
mtp-num-layers int | model.mtp_layers
mtp-loss-scaling-factor float=0.1 | model.mtp_loss_weight | Megatron's default is 0.1
moe-input-jitter-eps float | model.router.jitter
moe-router-score-function str=softmax | model.router.score_function
moe-router-pre-softmax | model.router.pre_softmax | with model.router.normalise=false
moe-router-num-groups int | model.router.num_groups
moe-router-group-topk int | model.router.groups_per_token
moe-router-topk-scaling-factor float | model.router.scaling_factor
moe-router-enable-expert-bias | model.router.expert_bias
moe-router-bias-update-rate float=0.001 | model.router.bias_update_rate
moe-router-force-load-balancing | model.router.force_balance
moe-expert-capacity-factor float | model.router.capacity_factor | for a microbatch over all devices, in Megatron per
    device
moe-token-drop-policy str=probs | model.router.drop_policy | probability for probs, or position
moe-token-dispatcher-type str=allgather | communication.experts | all_to_all, all_gather or auto
moe-grouped-gemm | | experts always use a grouped matmul
optimizer str=adam | optimizer.kind | adamw for adam, sgd, lion, or muon for muon and dist_muon
muon-momentum float=0.9 | optimizer.muon.momentum
muon-nesterov, muon-use-nesterov flag->muon_nesterov, muon-no-use-nesterov off->muon_nesterov | optimizer.muon.nesterov
muon-num-ns-steps int=5 | optimizer.muon.steps
muon-scale-mode str=spectral, muon-extra-scale-factor float=1.0 | optimizer.muon.scale | match_adamw: spectral times
    0.2; spectral: shape_scaling
muon-no-split-qkv off->muon_split_qkv, muon-split-qkv, muon-tp-mode str=duplicated | | queries, keys and values are
    always matrices of their own, whole
lr float | schedule.learning_rate
min-lr float=0.0 | schedule.min_learning_rate
lr-wsd-decay-style str=exponential | schedule.wsd_decay_style | exponential is its default
lr-decay-style str=linear | schedule.kind | wsd for WSD, inverse_sqrt for
    inverse-square-root
lr-warmup-iters int=0 | schedule.warmup_steps
lr-warmup-samples int=0, lr-warmup-fraction float | schedule.warmup_steps | in steps
lr-decay-iters int | schedule.decay_steps | counted from step 1, warm-up included
lr-decay-samples int | schedule.decay_steps | in steps
lr-wsd-decay-iters int | schedule.wsd_decay_steps
lr-wsd-decay-samples int | schedule.wsd_decay_steps | in steps
weight-decay float=0.01 | optimizer.weight_decay
adam-beta1 float=0.9, sgd-momentum float=0.9, lion-beta1 float=0.95 | optimizer.beta1
adam-beta2 float=0.999, lion-beta2 float=0.98 | optimizer.beta2
adam-eps float=1e-08 | optimizer.epsilon
clip-grad float=1.0 | optimizer.clip_norm
calculate-per-token-loss | objective.average | tokens (the default); without the flag microbatches
bf16 | precision.compute=bfloat16 | the default
fp16 | precision.compute=float16 | with dynamic loss scaling
accumulate-allreduce-grads-in-fp32 | precision.accumulation=float32 | the default, as precision.gradients=float32
grad-reduce-in-bf16 | precision.gradients=bfloat16 | and precision.accumulation=bfloat16 for the sums over
    microbatches
main-grads-dtype str=fp32 | precision.accumulation | float32 for fp32, bfloat16 for bf16
use-precision-aware-optimizer | optimizer.master=split | its BF16 weights and 16-bit remainders of FP32 master weights
main-params-dtype str=fp32 | optimizer.master | split or float32 for fp32; master weights are always FP32 numbers
exp-avg-dtype str=fp32, exp-avg-sq-dtype str=fp32 | optimizer.state | float32 for fp32, bfloat16 for bf16; int8 for
    fp8
fp8-format str->fp8 | precision.fp8.format | together with precision.fp8.recipe
fp8-recipe str=delayed | precision.fp8.recipe | current for tensorwise, or delayed, blockwise, mxfp8
fp4-format str->fp4, fp4-recipe str=nvfp4 | precision.fp8.recipe | nvfp4
fp8-margin int=0 | precision.fp8.margin
fp8-amax-history-len int=1 | precision.fp8.amax_history_length
fp8-amax-compute-algo str=most_recent | precision.fp8.amax_algorithm
num-layers-at-start-in-bf16 int=1, first-last-layers-bf16 | precision.fp8.first_bf16_layers
num-layers-at-end-in-bf16 int=1 | precision.fp8.last_bf16_layers
transformer-impl str=transformer_engine | precision.fp8.backend | only FP8 matmuls can use Transformer Engine's
    kernels
recompute-granularity str | remat.policy | full or selective
recompute-activations, moe-layer-recompute | remat.policy=selective
recompute-modules many | remat.policy | selective for core_attn; there is no choice of other modules
recompute-num-layers int, recompute-method str | remat.layers | for the method block; remat.group for uniform
cpu-offloading, cpu-offloading-num-layers int=0, fine-grained-activation-offloading | remat.policy=offload
optimizer-cpu-offload, optimizer-offload-fraction float=1.0 | optimizer.offload | the share of the moments on the
    host, 1.0 for all
decoupled-lr float, decoupled-min-lr float | optimizer.groups | with parameters [embedding.*, head] and learning_rate,
    a multiple of the schedule's
attention-backend str=auto, use-flash-attn | kernels.attention | auto (the default) is the fastest one
cross-entropy-loss-fusion | | the loss is always fused
data-path many, train-data-path many | data.train | a prefix, '0.3 a 0.7 b', or [a, b] for paths without weights
data-args-path str, per-split-data-args-path str | data.train | {file: PATH}; or the file's lists, in data.valid and
    .test too
valid-data-path many | data.valid
test-data-path many | data.test
full-validation | run.eval_steps | all
multiple-validation-sets, validation-set-names many | data.valid_sets | a list of {name, prefix}
dataloader-type str | data.order | megatron for single, shuffled for cyclic
split str | data.split | with no default; Megatron's is 969,30,1
mock-data | data.kind=synthetic
tokenizer-model str, tokenizer-type str, vocab-file str, merge-file str | data.tokenizer | byte, null:N, a folder or a
    file of a tokenizer
num-workers int=2 | data.workers
data-cache-path str | data.index_cache | index_cache in run.dir by default
reset-attention-mask | data.reset_attention | with the ends of documents from the .idx file
chat-template str | data.chat_template
sft | data.kind=chat | with conversations in JSON lines
reset-position-ids | data.reset_positions
fim-data, fim-rate float=0.5 | data.fim_rate | of the documents, cut at tokens; --fim-data is fim_rate above 0
fim-spm-rate float=0.5 | data.fim_spm_rate
fim-prefix-token str=<fim_prefix>, fim-middle-token str=<fim_middle>, fim-suffix-token str=<fim_suffix> |
    data.fim_tokens | prefix, middle and suffix
eod-mask-loss | data.mask_end_of_document_loss
save str | run.dir
ckpt-step int | checkpoint.init_from | the folder of that step, iter_0001000
load str | checkpoint.init_from | with checkpoint.init_state=all; afterwards the same command resumes from run.dir
finetune | checkpoint.init_state=weights
no-load-optim, load-main-params-from-ckpt | checkpoint.init_state=position
moe-use-upcycling | checkpoint.upcycle | with the dense checkpoint in checkpoint.init_from
pretrained-checkpoint str | checkpoint.init_from | with checkpoint.init_state=weights
no-save-optim | checkpoint.save_optimizer=false
save-interval int, persistent-save-interval int->save_interval | run.checkpoint_interval
non-persistent-save-interval int | checkpoint.local_interval
non-persistent-local-ckpt-dir str, non-persistent-ckpt-type str | checkpoint.local_dir
save-retain-interval int | checkpoint.keep_every
most-recent-k int | checkpoint.keep
async-save | | checkpoints are always written in the background
exit-signal-handler | | SIGTERM always saves a checkpoint and stops
exit-duration-in-mins int | run.max_minutes
exit-interval int | run.steps | with schedule.decay_steps of the whole training
tensorboard-dir str | logging.tensorboard | true by default; the files go to RUN/tensorboard
wandb-project str | logging.wandb_project | together with logging.wandb=true
wandb-exp-name str | run.name
profile, profile-step-start int=10, use-pytorch-profiler | logging.profile_start
profile-step-end int=12 | logging.profile_steps | the number of steps in the trace
"""
