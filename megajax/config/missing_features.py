"""Features of other trainers that do not exist here, so that their names are answered with a sentence."""

import re

from megajax.config.other_names import by_word, plain

# Names, as a part of a key or as a value, and the sentence.
FEATURES = {
    "dpo orpo kto simpo ipo cpo rpo preference preferences reference_model ref_model ref_model_name_or_path"
    " precompute_ref_log_probs precompute_ref_batch_size sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
    " loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau max_prompt_length": (
        "DPO is an example in docs/extensions.md, and other preference objectives are files like it; data.packing=pairs"
        " reads chosen and rejected answers, docs/data.md; with lora.rank, teacher.base makes the base the reference"
    ),
    "reward reward_model reward_modeling critic value_head classification sequence_classification num_labels"
    " center_rewards_coefficient": (
        "an objective with a head for values or classes is in docs/extensions.md; a program of your own trains it,"
        " docs/custom_loop.md, a reward model of pairs megajax train, docs/data.md; megajax hf export writes it for"
        " AutoModelForSequenceClassification"
    ),
    "rl rlhf rlvr ppo grpo rloo reinforce rollout": (
        "no reinforcement learning is built in; docs/custom_loop.md has a loop that samples, scores and trains (GRPO)"
    ),
    "distill distillation kd kd_ratio kd_loss teacher_model teacher_checkpoint": (
        "no loss of distillation is built in; teacher.model, and an objective that reads it, are in docs/extensions.md"
    ),
    "qlora bnb bitsandbytes load_in_4bit load_in_8bit nf4 int4 bnb_4bit_compute_dtype bnb_4bit_quant_type"
    " bnb_4bit_quant_storage use_bnb_nested_quant quantization_config": (
        "training on 4-bit or 8-bit weights does not exist yet; lora.rank trains adapters of BF16 or FP32 weights"
    ),
    "dora use_dora lora_target_parameters ia3 prefix_tuning prompt_tuning p_tuning num_virtual_tokens": (
        "of adapters there is LoRA only; set lora.rank, lora.alpha and lora.targets"
    ),
    "neftune neftune_noise_alpha": "noise on embeddings does not exist; model.dropout is hidden dropout",
    "offload_param offload_params cpu_offload_params nvme_path offload_nvme": (
        "weights cannot be offloaded; optimizer.offload keeps optimizer state on the host, mesh.fsdp shards weights"
    ),
    "zero_stage zero_optimization": (
        "there is no stage to set; mesh.data shards optimizer state and stored weights (ZeRO-1), mesh.fsdp is ZeRO-3"
    ),
    "mxfp4 fp4_format fp4_recipe": "precision.fp8.recipe=nvfp4 is FP4; MXFP4 is a format of exports only",
    "multimodal vision_model image_size": "model.vision adds a tower for images (docs/vision.md)",
    "encoder_decoder is_encoder_decoder seq2seq": (
        "model.encoder.kind=layers makes the model a decoder that reads an encoder (docs/encoder_decoder.md)"
    ),
    "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_always_push hub_revision": (
        "nothing is uploaded; checkpoint.export_hf.dir and megajax hf export write folders for Hugging Face"
    ),
    "early_stopping early_stopping_patience early_stopping_threshold": (
        "early stopping is no key; a hook can end a run (docs/extensions.md), and checkpoint.keep_best keeps the best"
        " checkpoints"
    ),
}

_BY_NAME = by_word(FEATURES)


def missing_feature(key: str, value: object = None) -> str | None:
    """The sentence about the missing feature that a part of the unknown `key` or its value names."""
    names = [*re.split(r"\.", plain(key)), *([plain(value)] if isinstance(value, str) else [])]
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)
