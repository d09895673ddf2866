"""Other frameworks' names for our keys, for "did you mean" and the tables of docs/migration.md.

A row is `names | our key | note`, its further lines indented. The names are in the framework's spelling. Our key may
have a value. The note gives the difference and follows our key after a comma; without a key it is a clause with the
reason.
"""

from collections.abc import Mapping
from itertools import chain

from megajax.config.maxtext_names import MAXTEXT
from megajax.config.megatron_flags import MEGATRON, MEGATRON_WITHOUT
from megajax.config.other_name import OtherName, rows
from megajax.config.torchtitan_names import TORCHTITAN

HUGGING_FACE = rows("""
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
kda_layers, full_attn_layers | model.block_pattern | kda_moe and moe, dense and kda without experts
linear_num_heads | model.kda.num_heads
linear_head_dim | model.kda.head_dim
short_conv_kernel_size | model.kda.conv_kernel
hybrid_override_pattern, layers_block_type | model.block_pattern | mamba2, attention, mlp and experts
attn_layer_indices | model.block_pattern | dense for these layers, mamba2_mlp for the others
mamba_num_heads, mamba_n_heads | model.mamba2.num_heads
mamba_head_dim, mamba_d_head | model.mamba2.head_dim
ssm_state_size, mamba_d_state | model.mamba2.state_dim
n_groups, mamba_n_groups | model.mamba2.num_groups
mamba_d_conv | model.mamba2.conv_kernel
attention_multiplier | model.attention_scale
shared_intermediate_size | model.shared_expert_ffn_hidden_size
time_step_min | model.mamba2.min_step
linear_num_key_heads | model.linear_attention.num_key_heads
linear_num_value_heads | model.linear_attention.num_value_heads
linear_key_head_dim | model.linear_attention.key_head_dim
linear_value_head_dim | model.linear_attention.value_head_dim
linear_conv_kernel_dim | model.linear_attention.conv_kernel
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
per_device_eval_batch_size | batch.global_size | evaluation has the batches of training
max_steps | run.steps
num_train_epochs | run.epochs
eval_strategy, evaluation_strategy | run.eval_interval | the steps between evaluations; 0: at the end only
eval_steps | run.eval_interval | the steps between evaluations; run.eval_steps is the number of batches of one
save_strategy | run.checkpoint_interval | the steps between checkpoints
dataset_name, eval_dataset | data.train | the path of a file of text or chats, with data.kind; for evaluation data.valid
warmup_ratio | schedule.warmup_steps | in steps, not a fraction
lr_scheduler_type | schedule.kind
optim | optimizer.kind
adam_epsilon | optimizer.epsilon
max_grad_norm | optimizer.clip_norm
gradient_checkpointing | remat.policy | full or selective
logging_steps | run.log_interval
save_steps | run.checkpoint_interval
save_total_limit | checkpoint.keep
load_best_model_at_end | checkpoint.keep_best | the number of the best checkpoints to keep
metric_for_best_model | checkpoint.best_by | lowest eval_loss, or highest and a name, such as highest eval_accuracy
label_smoothing_factor | objective.label_smoothing
group_by_length, length_column_name | data.packing | conversations are packed, so there is no padding to save; balanced
    gives equal work
train_sampling_strategy, shuffle_dataset | data.order | shuffled or sequential
torch_compile, torch_compile_backend, torch_compile_mode | | everything is always compiled
tf32 | precision.compute | float32 is true FP32, not TF32
deepspeed | mesh.fsdp | ZeRO-3; ZeRO-1 over mesh.data is always on
save_only_model | checkpoint.save_optimizer | the opposite: false for weights only
resume_from_checkpoint | | the same command with the same run.dir resumes
output_dir | run.dir
dataset_text_field, text_column_name | data.text_key
dataloader_num_workers | data.workers
report_to, trackio_space_id, trackio_bucket_id, trackio_static_space_id | logging.wandb | or logging.tensorboard or
    logging.mlflow
do_train, do_eval, overwrite_output_dir | | megajax train trains, evaluates every run.eval_interval steps and resumes
    from run.dir
data_seed | run.seed | one seed for weights, data and dropout
mlm_probability | objective.masking.rate | with objective.kind=masked_tokens
mean_noise_span_length | data.mean_span_length
model.rope_scaling.type, model.rope_scaling.rope_type | model.rope_scaling.kind
rope_parameters | model.rope_scaling | a mapping such as {kind: yarn, factor: 4}, and model.rope_theta
model_max_length | batch.sequence_length
attn_pdrop | | there is no dropout of attention weights; model.dropout is hidden dropout
bos_token_id, eos_token_id, pad_token_id, pad_token | | tokens that begin and end texts are the tokenizer's, and
    data.end_of_document names another; padding needs none
use_cache, torch_dtype | precision.compute | the format of the computation; only generation has a cache
output_router_logits | model.router.global_loss | above 0 for the loss that balances experts
model_type, architectures | | megajax hf config HF_FOLDER prints the section model of a folder
max_train_samples, max_eval_samples, dataset_config_name, streaming | | files of data are on this machine and read as a
    whole: write a shorter one
min_lr_ratio, min_lr_rate | schedule.min_learning_rate | the learning rate itself, not a fraction of the highest
save_safetensors | | checkpoints are megajax's; checkpoint.export_hf.dir and megajax hf export write safetensors
ignore_data_skip | | a resumed run continues at its position in the data
fsdp_config, accelerator_config, parallelism_config, ddp_find_unused_parameters, ddp_timeout, ddp_backend,
    ddp_broadcast_buffers, ddp_bucket_cap_mb, ddp_static_graph | | the section mesh is the whole parallelism
gradient_checkpointing_kwargs, activation_checkpointing_kwargs | remat.policy | full or selective
dataloader_pin_memory, dataloader_drop_last, dataloader_prefetch_factor | data.prefetch | the number of batches read
    ahead
dataloader_in_order, dataloader_multiprocessing_context, dataloader_persistent_workers | data.workers | the number of
    processes that read the data in order, until the run ends
remove_unused_columns | | keys of a line that its form does not have are not read
auto_find_batch_size | | the start estimates memory, and megajax plan finds a batch that fits
average_tokens_across_devices | | the loss is the mean over all tokens of a step, on all devices
include_tokens_per_second, include_num_input_tokens_seen, batch_eval_metrics | | metrics.jsonl has tokens and tokens
    per second
torch_empty_cache_steps | | XLA allocates a step's memory once
greater_is_better | checkpoint.best_by | highest for true, lowest for false, and a name, such as highest eval_accuracy
use_liger_kernel, liger_kernel, liger_kernel_config | | fused kernels are chosen by the device; the section kernels
    can set others
eval_on_start, eval_delay | run.eval_interval | the steps between evaluations; megajax evaluate evaluates a checkpoint
eval_accumulation_steps, eval_do_concat_batches, eval_use_gather_object, prediction_loss_only, include_for_metrics,
    label_names | | evaluation sums the loss on the devices and keeps no predictions
bf16_full_eval, fp16_full_eval | precision.compute | of training and of evaluation
debug | | --traceback prints where an error arose, and a step whose numbers are not finite is skipped and counted
do_predict | | megajax generate continues texts
logging_strategy, logging_first_step | run.log_interval | the steps between lines of the log
logging_nan_inf_filter | run.max_nonfinite_steps | the skipped steps in a row that end a run; a step
    whose loss or gradients are not finite is skipped and counted
disable_tqdm, log_level, log_level_replica, log_on_each_node | run.log_interval | process 0 alone prints a line for so
    many steps
skip_memory_metrics | | metrics.jsonl has the peak of memory
full_determinism | run.deterministic
use_cpu | | the variable JAX_PLATFORMS=cpu chooses CPUs
enable_jit_checkpoint | | SIGTERM saves a checkpoint and ends the run
save_on_each_node | checkpoint.local_dir | for further checkpoints on each host's own disk
restore_callback_states_from_checkpoint | run.hooks | of which checkpoints have no state
lr_scheduler_kwargs | schedule.min_learning_rate | and the other keys of the section schedule
optim_args | optimizer.beta1 | and the other keys of the section optimizer
optim_target_modules | optimizer.groups | a list such as [{parameters: ['*mlp*'], learning_rate: 0.1}];
    optimizers of low rank such as GaLore do not exist
""")

# Names of PEFT's LoraConfig, TRL's SFTConfig and what is used with them.
FINE_TUNING = rows("""
r, lora.r, lora_r, lora_rank | lora.rank
lora_alpha | lora.alpha | the rank by default, in PEFT 8
target_modules, lora_target_modules, lora_target | lora.targets | query, key, value, output for q_proj, k_proj, v_proj,
    o_proj; gate, up, down for gate_proj, up_proj, down_proj; all of them for all-linear, which is the default
lora_dropout | lora.dropout
use_peft | lora.rank | null trains all weights
use_rslora | lora.alpha | which is lora_alpha * the root of the rank
modules_to_save, lora_modules_to_save, layers_to_transform, lora.bias, init_lora_weights | | adapters are plain
    LoRA, in all layers, and all other weights are frozen
model_name_or_path, base_model, model_revision | checkpoint.init_from | a folder on this machine
packing, sample_packing | data.packing | none for false; chats are packed by default
packing_strategy | data.packing | bfd: first_fit, wrapped: sequential; balanced has no counterpart
assistant_only_loss, completion_only_loss, train_on_inputs | | with data.kind=chat the loss counts the assistant's
    tokens, or the completion, only
chat_template_path | data.chat_template
chat_template_kwargs | data.chat_template_args
eos_token | data.end_of_document
cutoff_len, sequence_len | batch.sequence_length
datasets | data.train | a list of files of text or chats, such as [a.jsonl, b.jsonl]
val_set_size, eval_size | data.valid | a file of its own, which chats need; of token files data.split gives a part
adapter, finetuning_type | lora.rank | null trains all weights
lora_target_linear | lora.targets | all linear layers by default
roles_to_train, train_on_eos, mask_prompt | | with data.kind=chat the loss counts the assistant's tokens and the token
    that ends them
pad_to_sequence_len, pad_to_multiple_of | data.packing | sequences always have batch.sequence_length tokens, packed or
    padded
dataset_num_proc, dataset_prepared_path, preprocessing_num_workers | data.index_cache | where prepared data are stored
special_tokens, added_tokens, resize_token_embeddings | model.vocab_size | a larger one adds rows; data.tokenizer must
    have the tokens
lora.task_type, lora_task_type, lora.peft_type, lora.fan_in_fan_out, inference_mode | | megajax hf adapters writes
    PEFT's own settings
loraplus_lr_ratio, loraplus_lr_embedding, embedding_lr, embeddings_lr | optimizer.groups | a list such as
    [{parameters: ['*_lora_b'], learning_rate: 16}]
eval_packing | data.packing | of training and of evaluation
padding_free | | packed conversations have their own attention and positions, without padding between them
activation_offloading | remat.policy=offload
evals_per_epoch | run.eval_interval | the steps between evaluations
saves_per_epoch | run.checkpoint_interval | the steps between checkpoints
test_size | data.valid | a file of its own, which chats need; of token files data.split gives a part
data.text_field, data.column, text_field | data.text_key
messages_key, field_messages, conversation_column, message_field_role, dataset_kwargs, message_property_mappings | |
    data.kind=chat knows the forms of docs/data.md by their keys: rename others
truncation_mode | data.too_long | truncate keeps the beginning, drop leaves the conversation out
model_init_kwargs | | the section model describes the network, and megajax hf config HF_FOLDER prints a folder's
disable_dropout | model.dropout | 0 by default
loss_type | objective.kind | next_token, masked_tokens or one of run.extensions
teacher_model_name_or_path, teacher.init_from | teacher.source | with teacher.model, its network
""")

# Common names that belong to no single framework.
SHORT = rows("""
tp, tensor_parallel, tensor_parallel_size, tensor_parallel_degree | mesh.tensor
dp, ddp, data_parallel, data_parallel_size | mesh.data
zero, zero3, fsdp_size | mesh.fsdp
pp, pipeline_parallel, pipeline_parallel_size, pipeline_parallel_degree | mesh.pipeline
cp, sp, context_parallel, sequence, context_parallel_degree | mesh.context
ep, expert_parallel, mesh.experts, expert_parallel_size, expert_parallel_degree | mesh.expert
vpp, vp, rounds, num_virtual_stages, interleave | pipeline.virtual_stages
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
epochs, num_epochs, max_epochs | run.epochs
random_seed | run.seed
save_dir, checkpoint_dir, ckpt_dir, checkpoint.path, out_dir, logdir, log_dir | run.dir
save_every, ckpt_interval, checkpoint_every, checkpoint.every, save_freq | run.checkpoint_interval
checkpoint.load, init_checkpoint, pretrained, load_from | checkpoint.init_from
resume | | the same command with the same run.dir resumes
log_every, log_freq, log_steps, logging.interval, logging.log_interval, logging.steps | run.log_interval
eval_every, eval_freq, val_interval, val_check_interval | run.eval_interval
eval_batches, val_steps, limit_val_batches | run.eval_steps
data.path, data.paths, data.prefix, data.dataset, data_dir, train_data, train_path, train_file | data.train | the
    prefix of a .bin/.idx pair
val_data, data.val, data.validation, data.eval | data.valid
tokenizer_name, tokenizer_file | data.tokenizer
dtype, precision.dtype, mixed_precision, amp | precision.compute
precision.params | | master weights are always FP32 numbers; optimizer.state is the form of the moments
fp8 | precision.fp8.recipe | current, delayed, blockwise or mxfp8
activation_checkpointing, recompute, checkpoint_activations, remat | remat.policy
flash_attention, use_flash_attention, attn_implementation | kernels.attention
tensorboard | logging.tensorboard
wandb | logging.wandb
project | logging.wandb_project
profile_step | logging.profile_start
""")

# In order of precedence, for names with several meanings.
ALL = (*MEGATRON, *MAXTEXT, *TORCHTITAN, *HUGGING_FACE, *FINE_TUNING, *SHORT, *chain(*MEGATRON_WITHOUT.values()))


def plain(name: str) -> str:
    """A name without the dashes and capitals in which frameworks differ."""
    return name.lstrip("-").replace("-", "_").lower()


def by_word(sentences: Mapping[str, str]) -> dict[str, str]:
    """The sentence of each of the names that stand together in a key."""
    return {name: sentence for names, sentence in sentences.items() for name in names.split()}


def counterpart(key: str) -> OtherName | None:
    """The counterpart of the unknown `key`: looked up whole, then by its last part."""
    whole = plain(key)
    return _BY_NAME.get(whole) or _BY_NAME.get(whole.rpartition(".")[2])


_BY_NAME = {plain(name): other for other in reversed(ALL) for name in other.names}
