"""Other frameworks' names: every row names a key that exists, and the docs' tables are up to date."""

import re
from pathlib import Path

import migration_tables
import pytest
from migration_tables import TABLES

from megajax.config import Config, load_config
from megajax.config.load import keys, suggestion, type_of
from megajax.config.megatron_flags import MEGATRON, MEGATRON_WITHOUT
from megajax.config.missing_features import FEATURES
from megajax.config.other_names import ALL, plain

KEYS = {key for key, _ in keys()}
PAGE = migration_tables.PAGE.read_text()


def test_every_row_names_a_key_of_ours_or_says_why_there_is_none():
    for row in ALL:
        key, equals, value = row.ours.partition("=")
        assert key in KEYS | {"include"} if row.ours else row.note, row
        assert not KEYS & set(row.names), row
        if equals:
            assert value in type_of(dict(keys())[key]) or value in ("-1", "true", "false"), row
        if "one of run.extensions" in row.note:
            assert dict(keys())[key].annotation is str, f"{row} takes the built-in ones only"


def test_a_name_has_one_row_of_its_framework_and_a_counterpart_is_not_called_missing():
    for _, rows in TABLES.values():
        names = [plain(name) for row in rows for name in row.names]
        assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    without = [row for rows in MEGATRON_WITHOUT.values() for row in rows]
    assert len(without) > 30 and not [row for row in without if row.ours]
    megatron = [plain(name) for row in (*MEGATRON, *without) for name in row.names]
    assert len(megatron) == len(set(megatron))


def test_a_name_that_a_framework_has_a_key_for_is_answered_with_a_key():
    """Whatever else it means elsewhere: Megatron-LM's rows win, then the frameworks', before those without a key."""
    without = {plain(name) for rows in MEGATRON_WITHOUT.values() for row in rows for name in row.names}
    known = {plain(name) for row in ALL if row.ours for name in row.names}
    shared = without & known
    assert {"batch_size", "warmup", "checkpoint_activations"} <= shared
    for name in shared:
        assert suggestion(name).startswith(("did you mean ", "use ")), name


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("--tensor-model-parallel-size", "did you mean mesh.tensor?"),
        ("tensor_model_parallel_size", "did you mean mesh.tensor?"),
        ("parallelism.tensor_parallel_degree", "did you mean mesh.tensor?"),
        ("model.num_hidden_layers", "did you mean model.num_layers?"),
        ("schedule.lr", "did you mean schedule.learning_rate?"),
        ("min_lr", "did you mean schedule.min_learning_rate?"),
        ("wd", "did you mean optimizer.weight_decay?"),
        ("optimizer.name", "did you mean optimizer.kind?"),
        ("data.path", "use data.train, the prefix of a .bin/.idx pair."),
        ("mesh.ep", "did you mean mesh.expert?"),
        ("seq_length", "did you mean batch.sequence_length?"),
        (
            "--rampup-batch-size",
            "use batch.schedule, such as '0: START, T: START + INCREMENT' with the tokens T = samples of the ramp-up *"
            " batch.sequence_length / number of increments.",
        ),
        ("lr_scheduler.decay_type", "did you mean schedule.kind?"),
        ("compile.backend", "everything is always compiled."),
        ("mlpwi", "use remat.policy, save_matmuls, offload, or one of run.extensions that names what it saves."),
        ("lora.r", "did you mean lora.rank?"),
        (
            "load_best_model_at_end",
            "use checkpoint.keep_best, the number of the best checkpoints to keep.",
        ),
        ("lora.lora_alpha", "use lora.alpha, the rank by default, in PEFT 8."),
        ("model_name", "use include, such as include: models/llama3_8b.yaml, a file of configs/models."),
        ("packing", "use data.packing, none for false; chats are packed by default."),
        ("sequence_len", "did you mean batch.sequence_length?"),
        ("adapter", "use lora.rank, null trains all weights."),
        ("fsdp_config.fsdp_version", "the section mesh is the whole parallelism."),
        ("gradient_checkpointing_kwargs.use_reentrant", "use remat.policy, full or selective."),
        ("datasets.0.path", "use data.train, a list of files of text or chats, such as [a.jsonl, b.jsonl]."),
        ("model.rope_scaling.type", "did you mean model.rope_scaling.kind?"),
        ("teacher.init_from", "use teacher.source, with teacher.model, its network."),
        # typing errors of ours, with and without the section
        ("model.num_leyers", "did you mean model.num_layers?"),
        ("sequence_lenght", "did you mean batch.sequence_length?"),
        ("data.train.3.prefx", "did you mean data.train.3.prefix?"),
        ("batch.steps", "did you mean run.steps?"),
        # not near, shared by several sections, or of a feature that does not exist
        ("--lora-rank", "did you mean lora.rank?"),
        ("--exit-duration-in-mins", "did you mean run.max_minutes?"),
        ("optimzer.kind", "did you mean optimizer.kind?"),
        ("weigth_decay", "did you mean optimizer.weight_decay?"),
        # never a bare section
        ("modle", "did you mean the section model?"),
    ],
)
def test_a_name_is_answered_with_ours(typed: str, answer: str):
    assert suggestion(typed) == answer


@pytest.mark.parametrize("typed", ["loss", "loss.kind", "loss.beta", "kind"])
def test_a_name_that_is_not_near_gets_no_key(typed: str):
    assert suggestion(typed).startswith("the sections are ")


def test_a_feature_that_does_not_exist_is_named_by_its_key_or_value():
    assert "DPO is an example in docs/extensions.md" in suggestion("loss.kind", "dpo")
    assert "docs/custom_loop.md" in suggestion("grpo.beta")
    assert "megajax hf export" in suggestion("push_to_hub", True)
    for name in ("reward_model", "value_head", "num_labels"):
        assert "docs/extensions.md" in suggestion(name), name
    for named in set(re.findall(r"\b\w+\.[\w.]+\w", " ".join(FEATURES.values()))):
        assert named in KEYS or named.endswith(".md"), named
    assert not any(name in {key.rpartition(".")[2] for key in KEYS} for names in FEATURES for name in names.split())


# What a sentence on a missing feature names, and the names in other projects' arguments that it answers
MISSING = {
    "DPO is an example in docs/extensions.md": "dpo orpo kto ref_model precompute_ref_log_probs",  # TRL
    "AutoModelForSequenceClassification": "reward_model value_head sequence_classification num_labels critic",
    "GRPO": "ppo grpo rloo rlhf rollout",
    "teacher.model": "distillation kd_ratio kd_loss teacher_checkpoint",
    "lora.rank trains": "load_in_4bit load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_type quantization_config",
    "LoRA only": "use_dora ia3 prefix_tuning prompt_tuning p_tuning num_virtual_tokens",  # PEFT
    "noise on embeddings": "neftune_noise_alpha",
    "weights cannot be offloaded": "offload_param offload_params cpu_offload_params nvme_path",  # DeepSpeed, FSDP
    "no stage to set": "zero_stage zero_optimization",
    "MXFP4": "mxfp4 fp4_format fp4_recipe",
    "docs/vision.md": "multimodal vision_model image_size",
    "docs/encoder_decoder.md": "is_encoder_decoder encoder_decoder",
    # transformers' TrainingArguments
    "nothing is uploaded": (
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision"
    ),
    "checkpoint.keep_best": "early_stopping_patience early_stopping_threshold",
}


# The fields of transformers 5.24's TrainingArguments
TRAINING_ARGUMENTS = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2
    adam_epsilon auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval
    data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug
    deepspeed disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay
    eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval
    fsdp fsdp_config full_determinism gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision
    hub_strategy hub_token ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names
    label_smoothing_factor learning_rate length_column_name liger_kernel_config load_best_model_at_end
    local_rank log_level log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter
    logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
    metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules output_dir
    parallelism_config per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project
    push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint
    run_name save_on_each_node save_only_model save_steps save_strategy save_total_limit seed
    skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu
    use_liger_kernel warmup_steps weight_decay
"""
# The others of TRL 1.16's ModelConfig, SFTConfig, DPOConfig and RewardConfig, without beta, a common name
OF_TRL = """
    activation_offloading assistant_only_loss attn_implementation bnb_4bit_quant_storage
    bnb_4bit_quant_type center_rewards_coefficient chat_template_path completion_only_loss dataset_kwargs
    dataset_num_proc dataset_text_field disable_dropout discopop_tau dtype eos_token eval_packing
    f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha load_in_4bit load_in_8bit lora_alpha
    lora_dropout lora_modules_to_save lora_r lora_target_modules lora_target_parameters lora_task_type loss_type
    loss_weights max_length model_init_kwargs model_name_or_path model_revision packing packing_strategy
    pad_to_multiple_of pad_token padding_free precompute_ref_batch_size precompute_ref_log_probs
    ref_model_mixup_alpha ref_model_sync_steps router_aux_loss_coef shuffle_dataset sync_ref_model
    truncation_mode trust_remote_code use_bnb_nested_quant use_dora use_peft use_rslora use_weighting
"""


@pytest.mark.parametrize("names", [TRAINING_ARGUMENTS, OF_TRL], ids=["transformers", "TRL"])
def test_each_argument_of_other_trainers_has_an_answer(names):
    known = {key.rpartition(".")[2] for key in KEYS}
    asked = {name: suggestion(name) for name in names.split() if name not in known}
    assert len(asked) > 50 and [name for name, said in asked.items() if said.startswith("the sections are")] == []


@pytest.mark.parametrize("named", MISSING)
def test_each_name_of_a_feature_that_does_not_exist_has_its_sentence(named: str):
    assert len(MISSING) == len(FEATURES)
    for name in MISSING[named].split():
        assert named in suggestion(f"train.{name}"), name


def test_the_tables_of_the_docs_are_up_to_date():
    assert migration_tables.updated(PAGE) == PAGE, "run python dev/migration_tables.py"
    for name in ("--context-parallel-size", "--kv-channels", "base_emb_dim", "training.seq_len", "rms_norm_eps"):
        assert re.search(rf"^\|.*`{name}`", PAGE, re.M)


def test_equal_defaults_are_as_the_docs_say():
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8}
    config = Config.model_validate({"model": sizes, "batch": {"global_size": 1, "sequence_length": 1}})
    model, optimizer = config.model, config.optimizer
    assert (model.init_std, model.depth_scaled_init, model.norm_epsilon, model.rope_theta) == (0.02, True, 1e-5, 10000)
    assert (optimizer.beta1, optimizer.epsilon, optimizer.clip_norm) == (0.9, 1e-8, 1)
    assert not optimizer.decay_norms and not optimizer.decay_biases and config.run.seed == 1234


def test_the_gpt3_files_set_megatrons_defaults_of_the_model():
    root = Path(__file__).parents[2]
    run = ["batch.global_size=1", "batch.sequence_length=8", "data.kind=synthetic"]
    model = load_config(root / "configs/models/gpt3_125m.yaml", run).model
    assert (model.norm, model.activation, model.position) == ("layernorm", "gelu", "learned")
    assert model.attention_bias and model.mlp_bias and model.tie_embeddings
    assert model.ffn_hidden_size == 4 * model.hidden_size
