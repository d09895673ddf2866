"""torchtitan's names for our keys, in rows as `other_names.py` explains them."""

from megajax.config.other_name import rows

# The keys of version 0.2's TOML files and command line.
TORCHTITAN = rows("""
parallelism.data_parallel_shard_degree | mesh.fsdp
parallelism.data_parallel_replicate_degree | mesh.data | sharded in storage too (ZeRO-1)
parallelism.tensor_parallel_degree | mesh.tensor
parallelism.pipeline_parallel_degree | mesh.pipeline
parallelism.context_parallel_degree | mesh.context
parallelism.expert_parallel_degree | mesh.expert | an axis of its own: torchtitan's shard degree is fsdp * expert
parallelism.pipeline_parallel_schedule | pipeline.schedule | gpipe, 1f1b or zero_bubble; pipeline.virtual_stages above 1
    for Interleaved1F1B
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
checkpoint.interval, checkpoint.enable | run.checkpoint_interval | 0 saves at the end only
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
parallelism.fsdp_reshard_after_forward | mesh.fsdp | always; mesh.data for never, which gathers weights once a step
parallelism.enable_async_tensor_parallel, parallelism.enable_compiled_autograd | | XLA overlaps collectives with matmuls
    by itself
parallelism.disable_loss_parallel | mesh.tensor | which always divides the loss over the vocabulary
parallelism.context_parallel_rotate_method, parallelism.context_parallel_load_balancer | communication.context | ring,
    all_gather and others, always load-balanced
parallelism.expert_tensor_parallel_degree | mesh.experts_over | with tensor in the list experts are whole, without it
    tensor divides their width
parallelism.pipeline_parallel_split_points, parallelism.pipeline_parallel_first_stage_less_layers,
    parallelism.pipeline_parallel_last_stage_less_layers | pipeline.layout | a list with the number of layers of each
    virtual stage
parallelism.pipeline_parallel_schedule_csv | pipeline.schedule
parallelism.pipeline_parallel_expert_parallel_overlap | communication.overlap_experts
training.enable_cpu_offload | optimizer.offload | of optimizer state, 1.0 for all; weights stay on the devices
training.gc_freq, training.gc_debug | | a step is one program, so Python's garbage collector waits for nothing
training.compile, compile.components, compile.backend, compile.mode, compile.graph_passes | | everything is always
    compiled
model.converters, quantize.linear.mx.recipe_name | precision.fp8.recipe | current for float8, mxfp8 for mx
model.print_after_conversion | | the summary at the start says what was decided
quantize.linear.float8.enable_fsdp_float8_all_gather, quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp |
    | weights are always gathered in FP8 with precision.fp8.recipe=current or delayed
quantize.linear.float8.emulate | precision.fp8.backend | CPUs emulate by themselves
quantize.linear.float8.filter_fqns, quantize.linear.mx.filter_fqns, quantize.grouped_mm.float8.fqns,
    quantize.grouped_mm.mx.fqns | precision.fp8.last_bf16_layers | and first_bf16_layers; FP8 is for all linear layers
    of the others, never for the head
optimizer.implementation, optimizer.early_step_in_backward | | the update is a part of the compiled step
lr_scheduler.lr_min | schedule.min_learning_rate | the learning rate itself, not a fraction of the highest
activation_checkpoint.selective_ac_option, activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns |
    remat.policy | save_matmuls for op; remat.layers is the number of layers that are recomputed
activation_checkpoint.memory_budget, activation_checkpoint.early_stop, activation_checkpoint.preserve_rng_state,
    activation_checkpoint.determinism_check, activation_checkpoint.debug | remat.policy | none, full, selective,
    save_matmuls or offload
checkpoint.enable_checkpoint | run.checkpoint_interval | 0 saves at the end only
checkpoint.initial_load_model_only | checkpoint.init_from | whose weights are taken; the same command with the same
    run.dir resumes all
checkpoint.initial_load_in_hf, checkpoint.initial_load_in_hf_quantized | checkpoint.init_from | whose format is
    recognised
checkpoint.last_save_model_only, checkpoint.model_weights_only | checkpoint.save_optimizer | the opposite: false for
    weights only
checkpoint.export_dtype | checkpoint.export_hf.dtype
checkpoint.exclude_from_loading | checkpoint.init_from | for weights alone
checkpoint.load_step | checkpoint.resume_step
checkpoint.create_seed_checkpoint | run.seed | with which initial weights are the same on every mesh
checkpoint.enable_first_step_checkpoint, checkpoint.load_only | run.checkpoint_interval | a checkpoint is also written
    at the end, and by Ctrl-C
validation.enable | run.eval_interval | 0 evaluates at the end only
validation.dataset, validation.dataset_path | data.valid
validation.local_batch_size, validation.seq_len | batch.global_size | evaluation has the batches of training
metrics.save_tb_folder, metrics.save_for_all_ranks | logging.tensorboard | in run.dir, by the first process
metrics.disable_color_printing, metrics.enable_color_printing | | NO_COLOR=1 in the environment takes the console's
    colours
profiling.save_traces_folder, profiling.profiler_active, profiling.profiler_warmup | logging.profile_start | traces are
    in run.dir
profiling.enable_memory_snapshot, profiling.save_memory_snapshot_folder, memory_estimation.enabled,
    memory_estimation.disable_fake_mode | | the start estimates memory item by item, and megajax compile CONFIG has
    XLA's figures
job.description | run.name
job.custom_config_module, experimental.custom_import, experimental.custom_args_module | run.extensions | a list of files
job.print_config, job.print_args, job.save_config_file, debug.print_config, debug.save_config_file | | megajax train
    --print-config prints the config, and config.yaml in run.dir has it
job.config_file, job.use_for_integration_test | include | of other YAML files; the config itself is the first argument
comm.init_timeout_seconds, comm.train_timeout_seconds | run.hang_min_seconds | and run.peer_timeout_seconds
comm.trace_buf_size, comm.save_traces_folder, comm.save_traces_file_prefix | run.hang_factor | a step that hangs is
    reported with stacks
fault_tolerance.enable, fault_tolerance.group_size, fault_tolerance.replica_id, fault_tolerance.min_replica_size,
    fault_tolerance.process_group, fault_tolerance.semi_sync_method | | all processes restart together, by megajax
    launch --max-restarts N (docs/reliability.md)
debug.moe_force_load_balance, training.debug_moe_force_load_balance | model.router.force_balance
debug.deterministic_warn_only | run.deterministic
""")
