"""MaxText's names for our keys, in rows as `other_names.py` explains them."""

from megajax.config.other_name import rows

MAXTEXT = rows("""
ici_data_parallelism, dcn_data_parallelism | mesh.data | one size over all hosts: ici * dcn
ici_fsdp_parallelism, dcn_fsdp_parallelism | mesh.fsdp | one size over all hosts: ici * dcn
ici_tensor_parallelism, dcn_tensor_parallelism, ici_tensor_sequence_parallelism | mesh.tensor | always with sequence
    parallelism
ici_pipeline_parallelism, dcn_pipeline_parallelism | mesh.pipeline
ici_expert_parallelism, dcn_expert_parallelism | mesh.expert
ici_context_parallelism, dcn_context_parallelism, ici_sequence_parallelism | mesh.context
ici_context_usp_ulysses_parallelism | mesh.context | with communication.context=all_to_all
num_pipeline_microbatches, gradient_accumulation_steps | batch.num_microbatches | with and without a pipeline
num_pipeline_repeats | pipeline.virtual_stages
per_device_batch_size | batch.global_size | which is per_device_batch_size * number of devices *
    gradient_accumulation_steps
max_target_length | batch.sequence_length
model_name | include | such as include: models/llama3_8b.yaml, a file of configs/models
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
quantization | precision.fp8.recipe | none, current, delayed, blockwise, mxfp8 or nvfp4
remat_policy | remat.policy | none by default, in MaxText full
scan_layers | | compile time decides whether layers run in loops; kernels.scan_unroll sets the layers of an iteration
dataset_type | data.kind | indexed (Megatron's .bin/.idx files), text, chat or synthetic
dataset_path, hf_path, grain_train_files, hf_train_files | data.train | text files, or the prefix of a .bin/.idx pair
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
decoder_block | include | such as include: models/llama3_8b.yaml; keys beside it in section model change the block
override_model_config | | keys beside include override those of its file
global_parameter_scale | model.hidden_size | and the other sizes, each for itself
enable_checkpointing | run.checkpoint_interval | 0 saves at the end only
save_checkpoint_on_completion | | a checkpoint is always written at the end
enable_emergency_checkpoint, enable_multi_tier_checkpointing, local_checkpoint_directory | checkpoint.local_dir | a
    directory of each host
local_checkpoint_period | checkpoint.local_interval
multi_tier_checkpointing_backup_interval_minutes | run.checkpoint_interval | in steps
enable_continuous_checkpointing, enable_single_replica_ckpt_restoring, enable_orbax_v1,
    checkpoint_storage_target_data_file_size_bytes, checkpoint_storage_use_ocdbt, checkpoint_storage_use_zarr3,
    checkpoint_storage_concurrent_gb, colocated_python_checkpointing | | checkpoints have a format of their own, with
    nothing to tune
source_checkpoint_layout, checkpoint_conversion_fn | checkpoint.init_from | whose format is recognised
save_quantized_params_path, checkpoint_is_quantized | checkpoint.export_hf.quantization | of exported folders; quantised
    folders are read too
lora_input_adapters_path | lora.rank | to train adapters; megajax hf adapters writes them
reuse_example_batch | data.kind=synthetic | random tokens, for benchmarks
metrics_file, gcs_metrics | | metrics.jsonl in run.dir has the metrics
save_config_to_gcs, log_config | | config.yaml in run.dir is the whole config; megajax train --print-config prints it
matmul_precision, activations_in_float32, logits_dot_in_fp32, cast_logits_to_fp32, float32_logits, float32_qk_product,
    float32_weight_sum | precision.compute | of matmuls; softmax, norms, routers and losses are in FP32
use_qwix_quantization, weight_quantization_calibration_method, act_quantization_calibration_method,
    bwd_quantization_calibration_method, quant_cfg_path, constant_bound_config, replicate_quant_scale,
    quantization_local_shard_count | precision.fp8.recipe | none, current, delayed, blockwise, mxfp8 or nvfp4
quantize_kvcache, kv_quant_axis, kv_quant_dtype | | the cache of generation is not quantised
mlp_activations_limit | model.activation=clamped_swiglu | GPT-OSS's, with its limit of 7
megablox, sparse_matmul, use_tokamax_gmm | kernels.grouped_matmul | auto by default; no token is dropped without
    model.router.capacity_factor
use_ring_of_experts | communication.experts
use_random_routing | model.router.force_balance
expert_shard_attention_option, shard_exp_on_fsdp, use_2d_fsdp_sharding, moe_fsdp_use_two_stage_all_gather |
    mesh.experts_over | a list of axes that divide the experts
use_batch_split_schedule | communication.overlap_experts
interleave_moe_layer_step | model.moe_layer_interval
num_layers_per_pipeline_stage, pipeline_parallel_layers | pipeline.layout | a list with the number of layers of each
    virtual stage
pipeline_delay_activation_forwarding, scan_pipeline_iterations, scan_layers_per_stage | pipeline.schedule
set_remat_policy_on_pipeline_iterations, set_remat_policy_on_layers_per_stage | remat.policy | of each layer
pipeline_fsdp_ag_once | mesh.data | which gathers weights once a step; mesh.fsdp gathers them for each microbatch
decoder_layer_input, mlpwi, mlpwi_0, mlpwi_1, mlpwo, query_proj, key_proj, value_proj, qkv_proj, out_proj, mla_q,
    mla_kv | remat.policy | save_matmuls, offload, or one of run.extensions that names what it saves
parameter_memory_host_offload | optimizer.offload | of optimizer state; weights stay on the devices
param_scan_axis, force_unroll, inhomogeneous_layer_cycle_interval | | repeated layers are found, and run in loops, by
    themselves; kernels.scan_unroll sets the layers of an iteration
attention | kernels.attention | auto, cudnn, pallas, triton or reference
attention_type | model.layer_pattern | of global and local, with model.sliding_window; model.kv_lora_rank is latent
    attention
chunk_attn_window_size, moba, moba_chunk_size, moba_topk, use_sparse_indexer, index_head_dim, index_n_heads,
    index_topk | | attention to chunks or chosen tokens does not exist; model.sliding_window is a window
fused_qkv, fused_mlp | | queries, keys and values, and gate and up, are one matmul where that is faster
sa_block_q, sa_block_kv, sa_block_kv_compute, sa_block_q_dkv, sa_block_kv_dkv, sa_block_kv_dkv_compute, sa_block_q_dq,
    sa_block_kv_dq, sa_use_fused_bwd_kernel, use_tokamax_splash, use_jax_splash, use_splash_scheduler |
    kernels.attention | which has the sizes of its blocks for each GPU
jax_cache_dir | run.compilation_cache
hardware | | the devices are those that jax finds
mesh_axes, logical_axis_rules, override_logical_axis_rules, data_sharding, input_data_sharding_logical_axes, shard_mode,
    custom_mesh, allow_split_physical_axes, sharding_tolerance, num_slices, subslice_shape | | the section mesh is the
    whole parallelism, and layouts follow from it
ici_fsdp_transpose_parallelism, dcn_fsdp_transpose_parallelism | mesh.fsdp | one size over all hosts: ici * dcn
ici_tensor_transpose_parallelism, dcn_tensor_transpose_parallelism, dcn_tensor_sequence_parallelism | mesh.tensor |
    always with sequence parallelism
dcn_sequence_parallelism | mesh.context
ici_autoregressive_parallelism, dcn_autoregressive_parallelism, ici_context_autoregressive_parallelism,
    dcn_context_autoregressive_parallelism | | generation has a mesh of its own, megajax generate --mesh
shard_optimizer_over_data | mesh.data | which always shards optimizer state (ZeRO-1)
num_vocab_tiling | kernels.loss_chunk_tokens | in tokens
use_chat_template, use_sft, sft_train_on_completion_only | data.kind=chat | whose loss counts the assistant's tokens
tokenize_train_data, tokenize_eval_data | data.kind | text and chat are tokenised as they are read; indexed files have
    tokens
add_bos | data.begin_of_document
add_eos | data.end_of_document | the token; it is always there
use_truncation | data.too_long
eval_per_device_batch_size | batch.global_size | evaluation has the batches of training
num_epoch | run.epochs
max_segments_per_seq | data.packing | without a limit of documents in a sequence
enable_rampup_batch_size, per_device_batch_size_start, per_device_batch_size_increment, global_rampup_samples |
    batch.schedule | such as '0: START, T: START + INCREMENT' with sequences per step and tokens T
use_dpo, dpo_beta, dpo_label_smoothing | | docs/examples/dpo.py is DPO, data.packing=pairs has its data (docs/data.md)
eval_dataset_name, hf_eval_files, grain_eval_files | data.valid
hf_name, hf_data_dir, hf_access_token, hf_eval_split, train_split, eval_split | | files of data are on this machine and
    read as a whole: give their paths to data.train and data.valid
grain_file_type | data.kind | indexed, text, chat or synthetic; text and chats in JSON lines or Parquet
grain_packing_type | data.packing | sequential for concat_then_split, first_fit for the others
grain_train_mixture_config_path | data.train | a list of {prefix, weight}
grain_num_threads, grain_prefetch_buffer_size, grain_per_worker_buffer_size, grain_ram_budget_mb | data.prefetch | the
    number of batches read ahead; data.workers is the number of processes
max_prefill_predict_length, decode_sampling_strategy, decode_sampling_nucleus_p, decode_sampling_top_k,
    decode_sampling_temperature | | megajax generate RUN has options for prompts and sampling
profile_periodically_period, profile_cleanly, upload_all_profiler_results, hide_profiler_step_metric,
    enable_jax_profiler, jax_profiler_port | logging.profile_start | the first step of the trace
dump_hlo, dump_step, dump_hlo_local_dir, dump_hlo_gcs_dir, dump_hlo_module_name, dump_hlo_upload_all, dump_jaxpr | | the
    environment's XLA_FLAGS=--xla_dump_to=DIR writes programs
enable_dropout | model.dropout | 0 for none
adam_eps_root | optimizer.epsilon | which is added outside the root
muon_beta | optimizer.muon.momentum
muon_weight_decay | optimizer.weight_decay | of all parameters; optimizer.groups sets others
muon_consistent_rms | optimizer.muon.scale | match_adamw for 0.2, spectral for width scaling
trainable_position_size | model.max_positions | with model.position=learned
use_untrainable_positional_embedding | model.position | rope, learned, relative or none
rope_type | model.rope_scaling.kind | llama3 for llama3.1
rope_factor, rope_linear_scaling_factor | model.rope_scaling.factor
rope_use_scale | model.rope_scaling | null for none
rope_truncate | model.rope_scaling.truncate
rope_attention_scaling | model.rope_scaling.attention_factor
rope_min_timescale | model.rope_theta | the largest; the smallest is 1
compiled_trainstep_file, compile_topology, compile_topology_num_slices | | megajax compile CONFIG --gpus N compiles for
    GPUs that are not here
target_eval_loss | | early stopping is no key; a hook can end a run (docs/extensions.md)
enable_goodput_recording, monitor_goodput, goodput_upload_interval_seconds, monitor_step_time_deviation,
    report_heartbeat_metric_for_gcp_monitoring, report_performance_metric_for_gcp_monitoring, use_vertex_tensorboard,
    managed_mldiagnostics, enable_checkpoint_cloud_logger | logging.prometheus_port | or megajax status and
    metrics.jsonl
enable_tensorboard | logging.tensorboard
collect_stack_trace, stack_trace_to_cloud, stack_trace_interval_seconds | run.hang_factor | a step that hangs is
    reported with stacks
jax_distributed_initialization_timeout, skip_jax_distributed_system, enable_single_controller | | processes find each
    other through Slurm, Open MPI, megajax launch or JAX_COORDINATOR_ADDRESS
debug_sharding | | megajax explain-weight says where a weight's numbers are
context_parallel_load_balance | communication.context | always load-balanced
context_parallel_strategy | communication.context | ring or all_gather, and others
use_multimodal, freeze_vision_encoder_params, image_size_for_vit, hidden_size_for_vit, num_hidden_layers_for_vit,
    patch_size_for_vit, train_image_column | model.vision | which megajax hf config prints for a folder (docs/vision.md)
gdn_conv_kernel_dim | model.linear_attention.conv_kernel
gdn_key_head_dim | model.linear_attention.key_head_dim
gdn_value_head_dim | model.linear_attention.value_head_dim
gdn_num_key_heads | model.linear_attention.num_key_heads
gdn_num_value_heads | model.linear_attention.num_value_heads
gdn_chunk_size, use_qk_norm_in_gdn | model.linear_attention | whose kernels set chunks; queries and keys are normalised
mhc_expansion_rate | | hyper-connections do not exist
shardy, enable_nnx, optimize_mesh_for_tpu_v6e, use_iota_embed, use_custom_sort_vjp | | no setting of megajax's
    programs
""")
