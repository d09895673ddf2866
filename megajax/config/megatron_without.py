"""Megatron-LM's flags without a counterpart here, in three classes, as data for megatron_flags.py.

Rows as in megatron_names.py, without a key; the note is the reason.
"""

# The flag changes nothing here: what it is about does not exist.
NO_EFFECT = """
pipeline-model-parallel-comm-backend str, flash-attention-version int, moe-pad-experts-for-cuda-graph-inference,
    enable-cuda-graph, cuda-graph-warmup-steps int=3, external-cuda-graph, cuda-graph-impl str=none,
    inference-cuda-graph-scope str, batch-invariant-mode, batch-invariant-backend str=te_native, symmetric-ar-type
    str, nccl-all-reduce-for-prefill, delay-offload-until-cuda-graph, onnx-safe str, empty-unused-memory-level int=0,
    gpu-sniff-test-interval int, train-sync-interval int, manual-gc, manual-gc-interval int=0, no-manual-gc-eval
    off->manual_gc_eval, disable-manual-gc-eval off->manual_gc_eval, optimizer-cuda-graph, rl-persist-cuda-graphs,
    no-rl-persist-cuda-graphs off->rl_persist_cuda_graphs, rl-training-cuda-graphs, no-rl-training-cuda-graphs
    off->rl_training_cuda_graphs, te-rng-tracker, inference-rng-tracker, nccl-communicator-config-path str,
    use-tp-pp-dp-mapping, disable-gloo-process-groups off->use_gloo_process_groups, use-sharp, sharp-enabled-group str,
    distributed-timeout-seconds-after-init int, use-nccl-ub flag->nccl_ub, disable-symmetric-registration,
    gtp-remat-nccl-ub, gtp-expert-remat-nccl-ub, suggested-communication-unit-size int, fake-process-group,
    cuda-graph-scope many->cuda_graph_scope_deprecated, cuda-graph-modules many=,
    inference-dynamic-batching-num-cuda-graphs int=16, decode-only-cuda-graphs, inference-cuda-graph-all-prefills,
    inference-cuda-graph-max-tokens int=512, inference-dynamic-batching-cuda-graph-mixed-prefill-count int=16,
    inference-dynamic-batching-cuda-graph-sizing-distribution str=exponential | | settings of NCCL, CUDA and PyTorch:
    XLA has its own
distribute-saved-activations, gtp-remat-opt-in-modules many=, ddp-num-buckets int, ddp-bucket-size int,
    ddp-pad-buckets-for-high-nccl-busbw, ddp-reduce-scatter-with-fp32-accumulation,
    gtp-remat-reduce-scatter-with-fp32-accumulation, ddp-param-name-patterns-for-fp32-local-accumulation many=,
    ddp-average-in-collective, megatron-fsdp-version int=1, no-use-layer-wise-param-layout
    off->use_layer_wise_param_layout, fsdp-manual-registration, create-all-gather-group, outer-dp-sharding-strategy
    str=no_shard, fsdp-double-buffer, enable-full-sharding-in-hsdp, torch-fsdp2-no-reshard-after-forward
    off->torch_fsdp2_reshard_after_forward, megatron-fsdp-main-params-dtype str=fp32, megatron-fsdp-main-grads-dtype
    str=auto, megatron-fsdp-grad-comm-dtype str=auto, megatron-fsdp-enable-fine-grained-param-gather,
    megatron-fsdp-max-pool-double-buffer, fsdp-db-use-persist-buf-on-alloc-fail | | how gradients and weights are put
    into buffers: arrays are sharded one by one
moe-shared-expert-glu-interleave-size int, moe-router-padding-for-quantization, moe-router-padding-for-fp8,
    moe-enable-deepep, moe-flex-dispatcher-backend str=deepep, moe-hybridep-pad-uneven-dispatch-inputs,
    moe-pad-expert-input-to-capacity, moe-flex-dispatcher-num-sms int, moe-deepep-num-sms int, moe-hybridep-num-sms
    int, moe-hybridep-num-blocks-permute int, moe-hybridep-num-blocks-unpermute int,
    moe-hybridep-num-sms-preprocessing int=108, moe-ncclep-zero-copy, moe-mlp-glu-interleave-size int,
    moe-paged-stash, moe-paged-stash-page-size int=64, moe-paged-stash-buffer-size-factor-cuda float=1.1,
    moe-paged-stash-buffer-size-factor-cpu float=0.0 | | how tokens reach their experts: communication.experts chooses
cpu-offloading-retain-pinned-cpu-buffers, offload-modules many=, min-offloaded-tensor-size int=1048576,
    delta-offload-bytes-across-pp-ranks int=0, activation-offload-fraction float=1.0,
    fine-grained-offloading-max-inflight-offloads int, use-torch-optimizer-for-cpu-offload,
    dump-param-to-param-group-map str, no-pin-cpu-grads off->pin_cpu_grads, no-pin-cpu-params off->pin_cpu_params | |
    details of offloading: optimizer.offload and remat.policy=offload have none
moe-per-layer-logging, config-logger-dir str=, pytorch-profiler-collect-shapes, pytorch-profiler-collect-callstack,
    pytorch-profiler-collect-chakra, profile-ranks many=, record-memory-history, memory-snapshot-path
    str=snapshot.pickle, record-shapes, nvtx-ranges, save-params-interval int, save-activations-interval int,
    save-tokens-per-expert-interval int, save-wgrads-interval int, save-dgrads-interval int, flight-recorder-dump-path
    str, flight-recorder-trace-buffer-size int=2000, no-flight-recorder-dump-on-timeout
    off->flight_recorder_dump_on_timeout, disable-flight-recorder-dump-on-timeout off->flight_recorder_dump_on_timeout,
    flight-recorder-include-stack-trace, no-flight-recorder-include-only-active
    off->flight_recorder_include_only_active, disable-flight-recorder-include-only-active
    off->flight_recorder_include_only_active, no-flight-recorder-extra-dump-on-exec
    off->flight_recorder_extra_dump_on_exec, disable-flight-recorder-extra-dump-on-exec
    off->flight_recorder_extra_dump_on_exec, log-throughput, log-progress, timing-log-level int=0, timing-log-option
    str=minmax, tensorboard-log-interval int=1, tensorboard-queue-size int=1000, log-timers-to-tensorboard,
    no-log-loss-scale-to-tensorboard off->log_loss_scale_to_tensorboard, disable-log-loss-scale-to-tensorboard
    off->log_loss_scale_to_tensorboard, log-validation-ppl-to-tensorboard, log-memory-to-tensorboard,
    log-memory-interval int, log-device-memory-used, log-num-zeros-in-grad, log-max-attention-logit,
    no-barrier-with-level-1-timing off->barrier_with_L1_time, log-world-size-to-tensorboard, wandb-save-dir str,
    wandb-entity str, logging-level int, log-energy, moe-routing-trace-path str, moe-routing-trace-max-training-iters
    int, moe-routing-trace-capture-logits, moe-routing-trace-capture-hidden-states, moe-routing-trace-dump-weights,
    otel-enabled, otel-service-name str, otel-span-groups str, log-straggler, enable-experimental, no-one-logger
    off->enable_one_logger, one-logger-project str=megatron-lm, one-logger-run-name str, one-logger-async,
    app-tag-run-name str, app-tag-run-version str=0.0.0 | | further outputs: metrics.jsonl, TensorBoard and Weights &
    Biases have the numbers of docs/monitoring.md
replication, replication-jump int, replication-factor int=2, adlr-autoresume, adlr-autoresume-interval int=1000,
    straggler-ctrlr-port int=65535, straggler-minmax-count int=1, disable-straggler-on-startup,
    run-workload-inspector-server, inprocess-restart, inprocess-max-iterations int, inprocess-monitor-thread-interval
    float=1.0, inprocess-monitor-process-interval float=1.0, inprocess-progress-watchdog-interval float=1.0,
    inprocess-heartbeat-interval float=30, inprocess-soft-timeout float=60, inprocess-hard-timeout float=90,
    inprocess-heartbeat-timeout float=60, inprocess-barrier-timeout float=120, inprocess-completion-timeout float=120,
    inprocess-last-call-wait float=1, inprocess-termination-grace-time float=1, inprocess-granularity str=node,
    inprocess-active-world-size int=1, inprocess-empty-cuda-cache, enable-ft-package, calc-ft-timeouts,
    ft-num-warmup-iters int=5, error-injection-type str=transient_error | | launchers and watchers of processes:
    megajax launch restarts, and hung steps end the run
non-persistent-global-ckpt-dir str, non-persistent-local-ckpt-algo str=fully_parallel | | for the copies of
    checkpoints on hosts: checkpoint.local_dir and local_interval
dataloader-fast-cache-load, dataloader-defer-npy-index-mmap, no-mmap-bin-files off->mmap_bin_files,
    num-dataset-builder-threads int=1, object-storage-cache-path str, mid-level-dataset-surplus float=0.005,
    allow-ambiguous-pad-tokens, disable-msc flag->disable_msc_deprecated | | how data files are opened
no-use-tokenizer-model-from-checkpoint-args off->use_tokenizer_model_from_checkpoint_args,
    disable-use-tokenizer-model-from-checkpoint-args off->use_tokenizer_model_from_checkpoint_args, fim-pad-token
    str=<fim_pad>, fim-eod-token str, tokenizer-metadata str->metadata_path, tokenizer-special-tokens
    many->special_tokens, tiktoken-pattern str, tiktoken-num-special-tokens int=1000, tokenizer-sentencepiece-legacy,
    no-tokenizer-sentencepiece-ignore-extra-whitespaces off->tokenizer_sentencepiece_ignore_extra_whitespaces,
    disable-tokenizer-sentencepiece-ignore-extra-whitespaces off->tokenizer_sentencepiece_ignore_extra_whitespaces,
    tokenizer-hf-no-use-fast, tokenizer-hf-no-include-special-tokens, trust-remote-code, null-tokenizer-eod-id int,
    null-tokenizer-pad-id int=-1, use-gigatoken, sft-tokenizer-prompt-format str=nemotron-h-aligned | | details of
    tokenizers, which are in the files of the tokenizer
flash-decode, inference-disable-triton-nvls-kernels, inference-grouped-gemm-backend str=vllm,
    inference-moe-disable-fused-quant-kernels, inference-moe-token-dispatcher-type str=nvls, mlp-chunks-for-prefill
    int=1, mlp-chunks-for-training int=1, use-mp-args-from-checkpoint-args, cache-mla-latents,
    inference-batch-times-seqlen-threshold int=-1, max-tokens-to-oom int=12000, use-legacy-static-engine,
    inference-max-requests int=8, inference-max-seq-length int=2560, inference-dynamic-batching,
    inference-dynamic-batching-buffer-size-gb float=40.0, inference-dynamic-batching-paused-buffer-size-gb float,
    inference-dynamic-batching-mamba-memory-ratio float, inference-dynamic-batching-block-size int=256,
    inference-dynamic-batching-max-requests int, inference-dynamic-batching-max-tokens int,
    inference-dynamic-batching-track-paused-request-events, inference-dynamic-batching-track-generated-token-events,
    inference-dynamic-batching-unified-memory-level int=0, enable-chunked-prefill, num-speculative-tokens int=0,
    inference-dynamic-batching-prefix-caching flag->inference_dynamic_batching_enable_prefix_caching,
    no-inference-dynamic-batching-prefix-caching off->inference_dynamic_batching_enable_prefix_caching,
    inference-dynamic-batching-prefix-caching-eviction-policy str=ref_zero,
    inference-dynamic-batching-prefix-caching-coordinator-policy str=load_balanced,
    inference-dynamic-batching-prefix-caching-routing-alpha float=0.5,
    inference-dynamic-batching-prefix-caching-mamba-gb float, inference-dynamic-batching-sampling-backend str=torch,
    use-same-sampling-seed-across-dp-ranks off->offset_sampling_seed_by_dp_rank,
    inference-dynamic-batching-async-sched-mode str=legacy, inference-dynamic-batching-logprobs-mode str=raw_logprobs,
    inference-logging-step-interval int=0, inference-text-gen-server-logging, no-inference-text-gen-server-logging
    off->inference_text_gen_server_logging, inference-wandb-logging, no-inference-wandb-logging
    off->inference_wandb_logging, inference-coordinator-port int, inference-use-synchronous-zmq-collectives,
    no-inference-use-synchronous-zmq-collectives off->inference_use_synchronous_zmq_collectives,
    inference-disable-ep-consensus, no-inference-disable-ep-consensus off->inference_disable_ep_consensus,
    inference-shards str | | of inference, which generate and chat have options for
rl-prompts-per-eval int=32, grpo-prompts-per-step int=32, grpo-group-size int=2, rl-generation-lag float,
    rl-max-inflight-requests int, rl-submission-granularity str=B, rl-consumption-granularity str=B,
    rl-durable-rollout-bank, rl-rollout-bank-dir str, rl-rollout-bank-max-bytes int=0, grpo-iterations int=2,
    grpo-clamp-eps-lower float=0.01, grpo-clamp-eps-upper float=0.01, grpo-kl-beta float=0.001,
    grpo-entropy-term-weight float=0.0, grpo-filter-groups-with-same-reward, langrl-env-config str,
    rl-default-temperature float=1.0, rl-default-top-p float=0, rl-default-top-k int=-1,
    rl-offload-optimizer-during-inference, rl-kv-cache-management-mode str=persist, rl-partial-rollouts,
    no-rl-partial-rollouts off->rl_partial_rollouts, rl-inference-logprobs-is-correction,
    no-rl-inference-logprobs-is-correction off->rl_inference_logprobs_is_correction,
    rl-importance-sampling-truncation-coef float, rl-use-sequence-packing, no-rl-use-sequence-packing
    off->rl_use_sequence_packing, rl-sequence-packing-max-sequences-per-bin int=50, rl-sequence-packing-algo str=fifo,
    rl-inference-tensor-model-parallel-size int, rl-inference-pipeline-model-parallel-size int,
    rl-inference-expert-model-parallel-size int, rl-inference-expert-tensor-model-parallel-size int,
    rl-inference-model-unified-memory-level int=0, rl-offload-inference-model-weights-when-idle,
    no-rl-offload-inference-model-weights-when-idle off->rl_offload_inference_model_weights_when_idle, refit-method
    str=gloo, rl-verify-model-weights-swap, no-rl-verify-model-weights-swap off->rl_verify_model_weights_swap,
    rl-skip-bos-token, no-rl-skip-bos-token off->rl_skip_bos_token, rl-profile, rl-profile-dir str,
    rl-inference-parsers many= | | without --perform-rl-step they do nothing
dsa-indexer-n-heads int, dsa-indexer-head-dim int, dsa-indexer-topk int, dsa-indexer-topk-freq int=1,
    dsa-indexer-skip-topk-offset int=0, dsa-indexer-loss-coeff float, dsa-indexer-use-sparse-loss, dsa-kernel-backend
    str=none, dsa-indexer-rope-interleaved, no-dsa-indexer-rotate-activation off->dsa_indexer_rotate_activation,
    disable-dsa-indexer-rotate-activation off->dsa_indexer_rotate_activation, no-dsa-indexer-scoring-relu
    off->dsa_indexer_scoring_relu, disable-dsa-indexer-scoring-relu off->dsa_indexer_scoring_relu,
    dsa-indexer-k-norm-epsilon float, dsa-indexer-k-norm-fp32, linear-conv-kernel-dim int=4, linear-key-head-dim
    int=128, linear-value-head-dim int=128, linear-num-key-heads int=16, linear-num-value-heads int=32,
    mhc-num-residual-streams int=4, mhc-sinkhorn-iterations int=20, mhc-init-gating-factor float=0.01,
    mhc-recompute-layer-num int, mamba-state-dim int=128, mamba-head-dim int=64, mamba-num-groups int=8,
    mamba-num-heads int, gdp-num-householder int=3, disable-mamba-mem-eff-path off->use_mamba_mem_eff_path,
    gdp-cutedsl-kernel, gdp-num-chunk-states-to-recompute int=2, relative-attention-num-buckets int=32,
    relative-attention-max-distance int=128, bert-no-binary-head off->bert_binary_head, mamba-training-ssm-states-dtype
    str, mask-prob float=0.15, short-seq-prob float=0.1, ict-head-size int, biencoder-projection-dim int=0,
    biencoder-shared-query-context-model, titles-data-path str, query-in-block-prob float=0.1, use-one-sent-docs,
    evidence-data-path str, retriever-report-topk-accuracies many=, retriever-score-scaling, block-data-path str,
    embedding-path str, indexer-batch-size int=128, indexer-log-interval int=1000, num-classes int=1000, img-h
    int=224, img-w int=224, num-channels int=3, patch-dim int=16, classes-fraction float=1.0, data-per-class-fraction
    float=1.0, no-data-sharding off->data_sharding, head-lr-mult float=1.0, vision-backbone-type str=vit,
    swin-backbone-type str=tiny, mask-type str=random, mask-factor float=1.0, iter-per-epoch int=1250,
    dino-local-img-size int=96, dino-local-crops-number int=10, dino-head-hidden-size int=2048, dino-bottleneck-size
    int=256, dino-freeze-last-layer float=1, dino-norm-last-layer, dino-warmup-teacher-temp float=0.04,
    dino-teacher-temp float=0.07, dino-warmup-teacher-temp-epochs int=30, output-bert-embeddings, bert-embedder-type
    str=megatron, mamba-inference-conv-states-dtype str=bf16, mamba-inference-ssm-states-dtype str=bf16 | | of other
    models than GPT, which they do not change
muon-fp32-matmul-prec str=medium, muon-use-syrk | | kernels of Newton-Schulz
apply-query-key-layer-scaling, no-query-key-layer-scaling | | it guards FP16's range and changes no numbers; scores
    have one scale in all layers, model.attention_scale
distributed-backend str=nccl, local-rank int=0 | | jax starts the processes; see README, Several processes
data-impl str, DDP-impl str, delay-grad-reduce, delay-param-gather, log-batch-size-to-tensorboard,
    log-learning-rate-to-tensorboard | | of earlier versions
"""

# What the flag asks for is so, with or without it.
ALWAYS_SO = """
no-tp-comm-bulk-wgrad off->tp_comm_bulk_wgrad, disable-tp-comm-bulk-wgrad off->tp_comm_bulk_wgrad, no-tp-comm-bulk-dgrad
    off->tp_comm_bulk_dgrad, disable-tp-comm-bulk-dgrad off->tp_comm_bulk_dgrad, no-tp-comm-overlap-ag
    off->tp_comm_overlap_ag, disable-tp-comm-overlap-ag off->tp_comm_overlap_ag, no-tp-comm-overlap-rs
    off->tp_comm_overlap_rs, disable-tp-comm-overlap-rs off->tp_comm_overlap_rs, tp-comm-overlap-rs-dgrad,
    no-tp-comm-split-ag off->tp_comm_split_ag, disable-tp-comm-split-ag off->tp_comm_split_ag, no-tp-comm-split-rs
    off->tp_comm_split_rs, disable-tp-comm-split-rs off->tp_comm_split_rs, tp-comm-bootstrap-backend str=nccl,
    delay-wgrad-compute, overlap-dispatch-backward-with-experts-wgrad, ep-overlap-early-attn-memory-release,
    use-ring-exchange-p2p, defer-embedding-wgrad-compute, wgrad-deferral-limit int=0,
    overlap-p2p-communication-warmup-flush flag->overlap_p2p_comm_warmup_flush,
    microbatch-group-size-per-virtual-pipeline-stage int->microbatch_group_size_per_vp_stage,
    high-priority-a2a-comm-stream, inference-fuse-tp-communication, tp-comm-overlap-cfg str,
    overlap-cpu-optimizer-d2h-h2d, no-align-grad-reduce off->align_grad_reduce, disable-align-grad-reduce
    off->align_grad_reduce, high-priority-stream-groups many=, no-overlap-p2p-communication off->overlap_p2p_comm,
    overlap-param-gather-with-optimizer-step, no-align-param-gather off->align_param_gather | | communication always
    overlaps with computation where possible
cross-entropy-fusion-impl str=native, use-fused-weighted-squared-relu, fused-residual-rmsnorm,
    use-transformer-engine-op-fuser, use-grouped-gemm-for-shared-expert, use-grouped-gemm-for-dense-mlp,
    moe-use-grouped-tensor, moe-single-grouped-weight, moe-single-grouped-bias, moe-permute-fusion-into-hybridep,
    moe-permute-fusion, moe-router-fusion, use-te-activation-func, no-bias-dropout-fusion off->bias_dropout_fusion,
    no-rope-fusion off->apply_rope_fusion, no-persist-layer-norm, disable-jit-fuser, no-gradient-reduce-div-fusion
    off->gradient_reduce_div_fusion, mla-down-proj-fusion | | the compiler fuses operations
disable-bf16-reduced-precision-matmul, attention-softmax-in-fp32 | | routers, softmax and the loss are in FP32,
    matmuls accumulate in FP32
auto-detect-ckpt-format, no-ckpt-fully-parallel-save off->ckpt_fully_parallel_save, async-strategy str=nvrx,
    use-persistent-ckpt-worker, async-ckpt-cpu-priority int=10, async-ckpt-io-priority int=3, async-ckpt-use-cpu-shm,
    ckpt-fully-parallel-load, ckpt-fully-parallel-load-exchange-algo str=broadcast,
    ckpt-fully-parallel-load-per-rank-objects, ckpt-fully-parallel-save-process-group str=dp,
    ckpt-fully-parallel-load-process-group str=dp, ckpt-assume-constant-structure, ckpt-pg-tensors-cache-path str,
    ckpt-pg-tensors-cache-create, no-ckpt-load-validate-sharding-integrity off->ckpt_load_validate_sharding_integrity,
    disable-ckpt-load-validate-sharding-integrity off->ckpt_load_validate_sharding_integrity,
    no-strict-fsdp-dtensor-load off->strict_fsdp_dtensor_load, disable-strict-fsdp-dtensor-load
    off->strict_fsdp_dtensor_load, dist-ckpt-strictness str=assume_ok_unexpected, dist-ckpt-save-pre-mcore-014,
    dist-ckpt-optim-fully-reshardable, distrib-optim-fully-reshardable-mem-efficient, no-save-tokenizer-assets
    off->save_tokenizer_assets, disable-save-tokenizer-assets off->save_tokenizer_assets, verify-integrity,
    dist-ckpt-format str->dist_ckpt_format_deprecated, dist-ckpt-workers int=1, ckpt-drop-redundant-extra-state | |
    checkpoints are complete, checked, sharded, written in the background and read on any mesh
no-check-for-nan-in-loss-and-grad off->check_for_nan_in_loss_and_grad, check-for-large-grads,
    result-rejected-tracker-filename str, rerun-mode str=validate_results | | steps with numbers that are not finite
    are skipped and counted, without a flag
exit-signal str=SIGTERM, exit-signal-handler-for-dataloader, exit-signal-handler-for-training,
    override-opt_param-scheduler, override-opt-param-scheduler, use-checkpoint-opt_param-scheduler,
    use-checkpoint-opt-param-scheduler, exit-on-missing-checkpoint | | a run resumes with its schedule, and checks
    that the config fits
no-clone-scatter-output-in-embedding off->clone_scatter_output_in_embedding, disable-clone-scatter-output-in-embedding
    off->clone_scatter_output_in_embedding | | the embedding of the residual stream is divided over tensor
use-cpu-initialization, init-model-with-meta-device, lazy-mpu-init | | weights are made on the devices, in their
    shards
no-create-attention-mask-in-dataloader off->create_attention_mask_in_dataloader | | attention masks are made from the
    ends of documents, not in the loader
fp8-interval int=1, reuse-grad-buf-for-mxfp8-param-ag, keep-fp8-transpose-cache, fp8-param-gather,
    fp4-param-gather | | weights travel in FP8 with the recipes current and delayed, in BF16 with those in blocks
mtp-standalone | | the stages share the tokens of prediction modules, the head and the loss
lr-warmup-init float=0.0 | | the warm-up begins at learning_rate / warmup_steps
attention-dropout float=0.1 | | there is no dropout of attention weights; model.dropout is hidden dropout
initial-loss-scale float=4294967296, min-loss-scale float=1.0, loss-scale-window float=1000, hysteresis int=2 | |
    precision.compute=float16 always scales the loss dynamically
rotary-interleaved | | the rotated pairs are always the two halves of a head; the weights of DeepSeek's models are
    sorted as they are read
moe-router-dtype str | | routers always compute in FP32
no-save-rng, no-load-rng | | random numbers follow from run.seed, the step and the position, so no state of them is
    saved or loaded
ckpt-format str=torch_dist, use-dist-ckpt flag->use_dist_ckpt_deprecated, ckpt-fully-parallel-save
    flag->ckpt_fully_parallel_save_deprecated | | checkpoints are always sharded, and read on any mesh
use-mcore-models, no-masked-softmax-fusion off->masked_softmax_fusion, no-bias-swiglu-fusion off->bias_swiglu_fusion,
    no-gradient-accumulation-fusion off->gradient_accumulation_fusion, no-async-tensor-model-parallel-allreduce
    off->async_tensor_model_parallel_allreduce | | the compiler fuses operations; leave it out
"""

# A value other than Megatron's default is refused.
NOT_POSSIBLE = """
mtp-hybrid-override-pattern str, experimental-attention-variant str, is-hybrid-model, linear-attention-freq str,
    heterogeneous-layers-config-path str, heterogeneous-layers-config-encoded-json str, spec many,
    hybrid-layer-pattern str, hybrid-override-pattern str | | the model is a GPT: layers of attention and MLPs or
    experts
mrope-section many, vision-pretraining, vision-pretraining-type str=classify | | multimodal and vision models are not
    trained
perform-rl-step | | there is no training by reinforcement
fp32-residual-connection, apply-residual-connection-post-layernorm, qk-l2-norm, attention-output-gate,
    enable-mhc-connections | | residual branches and norms have the usual form, with a residual stream in
    precision.compute
fp16-lm-cross-entropy, output-logit-dtype str->logit_dtype | | the loss is in FP32, and logits are never stored
no-initialization off->perform_initialization, embedding-init-method-std float, data-parallel-random-init,
    init-method-xavier-uniform | | initial weights are normal, with one model.init_std, the same for a seed on any
    mesh
mup-width-mult float=1.0, mup-embedding-mult float=1.0, mup-output-mult float=1.0, mup-base-head-dim float | | µP
    scales init_std and learning rates only (model.mup_base_width)
fp8-quantizer-factory str, no-fp8-wgrad off->fp8_wgrad, disable-fp8-wgrad off->fp8_wgrad, fp8-output-proj,
    use-kitchen-attention, kitchen-attention-backend str=sdpa, fp4-quantizer-factory str,
    te-precision-config-file str | | one recipe is for all linear layers and their three matmuls
mtp-use-repeated-layer, mtp-detach-heads, mtp-hsm | | prediction modules are as in DeepSeek-V3, with weights of their
    own
moe-enable-routing-replay, moe-router-quantile-balancing-ema float=0.0, moe-router-force-biased float,
    moe-apply-probs-on-input, moe-latent-size int, moe-dispatch-fwd-dtype str=bf16, moe-combine-bwd-dtype str=bf16,
    moe-expert-rank-capacity-factor float | | experts are chosen and weighted by the router options of model.router
moe-upcycling-granularity int=1 | | with checkpoint.upcycle an expert is as wide as the MLP that it is a copy of
max-seqlen-per-dp-cp-rank int, hybrid-context-parallel,
    phase-transition-iterations str, per-dataset-sequences-path str | | sequences have one length, over one context
    axis, whose groups for documents of different lengths are communication.context=dynamic
tensor-parallel-num-weight-shards int, expert-tensor-parallel-num-weight-shards int, decrease-batch-size-if-needed | |
    a tensor axis divides all weights, and a batch all replicas
freeze-all-layers | | all parameters are trained; optimizer.groups with learning_rate 0 freezes some
apply-wd-to-qk-layernorm, no-weight-decay-cond-type str | | norms of queries and keys have the weight decay of all
    norms: optimizer.decay_norms
iterations-to-skip many=, skip-train, test-mode | | all batches are trained: none is left out by its number, and a run
    is a training
start-eval-at-iter int, eval-global-batch-size int, eval-micro-batch-size int | | evaluations have the batch of the
    training, from the start on
sample-rate float=1.0, dataloader-inter-document-masking, fim-split-sample str, fim-fragment-rate float, fim-no-prefix
    str, vocab-extra-ids int=0 | | samples are read by Megatron-Core's GPTDataset rules only
logits-save-top-k int, logits-save-top-p float, logits-save-top-p-min-k int=1, logits-save-dir str, logits-save-dtype
    str=fp16, logits-load-dir str, logits-load-decode-threads int=4, logits-load-prefetch-factor int=3,
    logits-load-msc-prefetch-depth int=2, logits-load-kd-loss-alpha float=1.0, logits-load-ignore-errors | | logits of
    a teacher are not stored; see the section teacher
error-injection-rate int=0, fault-injector-ranks str, fault-injector-num-ranks int, fault-injector-fault-types str,
    fault-injector-fault-probabilities str, fault-injector-fault-delay float, fault-injector-delay-start-iteration
    int, fault-injector-mtti-seconds float, fault-injector-offset-seconds float, fault-injector-seed int | | faults
    are not injected
enable-msc | | paths are those of files, or URLs with the extra remote
muon-coefficient-type str=quintic, muon-scalar-optimizer str=adam | | the optimizer of the other parameters is AdamW,
    and Newton-Schulz is in BF16 with optimizer.muon.coefficients
batch-size int, checkpoint-activations, warmup int, model-parallel-size int | | Megatron-LM refuses it too
ckpt-convert-format str, ckpt-convert-save str, ckpt-convert-update-legacy-dist-opt-format, override-ckpt-iteration
    int, ict-load str, bert-load str | | an initial model is a run, a checkpoint or a Hugging Face folder
start-weight-decay float, end-weight-decay float, weight-decay-incr-style str=constant | | the weight decay is
    constant: optimizer.weight_decay
loss-scale float | | precision.compute=float16 always scales the loss dynamically
use-checkpoint-args | | the model's flags are in a Megatron checkpoint: write them into the line
use-legacy-models | | models are those of Megatron-Core
moe-router-topk-limited-devices int, moe-extended-tp | | experts are divided by mesh.experts_over
standalone-embedding-stage, encoder-tensor-model-parallel-size int=0, encoder-pipeline-model-parallel-size int=0,
    pipeline-model-parallel-split-rank int | | stages have layers of one stack: pipeline.layout
"""
