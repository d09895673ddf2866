"""The formats by name: each function writes valid files into a folder, and says how they are read."""

from collections.abc import Callable
from pathlib import Path

from dev.fuzz import data_formats, model_formats, run_formats
from dev.fuzz.subject import Subject

FORMATS: dict[str, Callable[[Path], Subject]] = {
    "text": data_formats.text_lines,
    "parquet": data_formats.parquet,
    "chats": data_formats.chats,
    "chat_templates": data_formats.chat_templates,
    "tokenizer_json": data_formats.tokenizers_json,
    "other_tokenizers": data_formats.other_tokenizers,
    "token_files": data_formats.token_files,
    "index_caches": data_formats.index_caches,
    "journals": data_formats.journals,
    "prompts": data_formats.prompts,
    "family_configs": model_formats.family_configs,
    "weights": model_formats.weights,
    "quantised": model_formats.quantised,
    "configs": run_formats.configs,
    "metrics": run_formats.metrics,
    "plots": run_formats.plots,
    "rollbacks": run_formats.rollbacks,
    "locks": run_formats.locks,
    "rates": run_formats.rates,
    "traces": run_formats.traces,
    "checkpoints": run_formats.checkpoints,
    "local_checkpoints": run_formats.local_checkpoints,
    "compiled_plans": run_formats.compiled_plans,
    "environments": run_formats.environments,
    "command_lines": run_formats.command_lines,
}
