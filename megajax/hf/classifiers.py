"""Sequence classifiers and reward models of transformers: a matrix `score` on the last hidden states, without a head.

An objective whose only parameter is called `score` [D, K] (`step.objective.Hidden`) is one.
"""

from collections.abc import Collection, Sequence
from typing import Any

from megajax.errors import InputError
from megajax.hf.llama import LINEAR
from megajax.hf.tensors import Tensor
from megajax.sharding import OBJECTIVE

SCORE = Tensor(f"{OBJECTIVE}score", "score.weight", LINEAR)
CLASSIFIER = "ForSequenceClassification"
ARCHITECTURES = {  # by model_type, those of transformers
    name: f"{prefix}{CLASSIFIER}"
    for name, prefix in (
        ("gpt2", "GPT2"),
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("mixtral", "Mixtral"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
        ("qwen3_moe", "Qwen3Moe"),
        ("qwen3_next", "Qwen3Next"),
        ("qwen3_5_text", "Qwen3_5Text"),
        ("deepseek_v2", "DeepseekV2"),
        ("deepseek_v3", "DeepseekV3"),
        ("gpt_oss", "GptOss"),
        ("gemma2", "Gemma2"),
        ("gemma3_text", "Gemma3Text"),
        ("phi3", "Phi3"),
        ("olmo2", "Olmo2"),
        ("nemotron", "Nemotron"),
        ("smollm3", "SmolLM3"),
    )
}


def with_own_head(entries: Sequence[Tensor], weights: Collection[str], model_type: str) -> list[Tensor]:
    """The entries of a model's tensors, of a classifier with SCORE in place of the head.

    Raises InputError for an objective's parameters that no model of transformers has.
    """
    own = {name for name in weights if name.startswith(OBJECTIVE)}
    if not own:
        return [*entries]
    if own != {SCORE.ours}:
        raise InputError(
            f"the model has {', '.join(sorted(own))} in place of a head, and transformers' classifiers have one matrix:"
            f" name an objective's only parameter score, or take the arrays from megajax.load_weights."
        )
    if model_type not in ARCHITECTURES:
        raise InputError(
            f"the model has {SCORE.ours} in place of a head, but transformers has no classifier of "
            f"model_type={model_type}: take the arrays from megajax.load_weights."
        )
    return [entry for entry in entries if not entry.ours.startswith("head")] + [SCORE]


def classifier_keys(model_type: str, classes: int, labels: Any) -> dict[str, Any]:
    """The keys of config.json of a classifier; `labels` are those of the folder that the run started from, or None."""
    names = [str(name) for name in labels.values()] if isinstance(labels, dict) and len(labels) == classes else None
    named = dict(enumerate(names or (f"LABEL_{number}" for number in range(classes))))
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "id2label": {str(number): name for number, name in named.items()},
        "label2id": {name: number for number, name in named.items()},
    }
