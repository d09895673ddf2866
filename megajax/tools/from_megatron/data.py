"""Data, tokenizers and evaluations."""

import re
from pathlib import Path
from typing import Any

from megajax import json_files
from megajax.tools.from_megatron.translation import Translation

SPLIT = "969,30,1"  # Megatron's, with --data-path
RESETS = {
    "reset_attention": "reset_attention_mask",
    "reset_positions": "reset_position_ids",
    "mask_end_of_document_loss": "eod_mask_loss",
}


def translate_data(t: Translation) -> None:
    """The data and the evaluations on them."""
    t.use("data_path", "train_data_path", "mock_data")
    has_valid = True
    if t["mock_data"]:
        t.put("data.kind", "synthetic", "mock_data")
        t.use("split")
    elif t["sft"]:
        _chat(t)
        has_valid = bool(t["valid_data_path"])
    else:
        t.put("data.kind", "indexed", note="Megatron's default: .bin/.idx files")
        _order(t)
        has_valid = _sources(t)
        _documents(t)
        _tokenizer(t)
        _fill_in(t)
        t.copy("data.index_cache", "data_cache_path")
    t.copy("data.workers", "num_workers")
    if t["full_validation"] and not t["mock_data"]:
        t.put("run.eval_steps", "all" if has_valid else 0, "full_validation")
    else:
        steps = t["eval_iters"] if has_valid else 0
        t.put("run.eval_steps", steps, "eval_iters", note="" if has_valid else "there is no validation data")
    t.put("run.eval_interval", t["eval_interval"] or 0, "eval_interval")


def _order(t: Translation) -> None:
    kind = t["dataloader_type"]
    if kind == "cyclic":
        t.put("data.order", "shuffled", "dataloader_type")
        t.differs("cyclic-order", "dataloader_type")
        t.settings.pop("data.train_samples", None)
    elif kind in ("single", None):
        note = "the samples and their order are Megatron-Core's"
        t.put("data.order", "megatron", "dataloader_type", note=note)
    else:
        t.refuse("samples are read in the order of data.order: use single or cyclic", "dataloader_type")


def _blend(words: list[str] | None) -> Any:
    """The sources of a list of paths, or of weights and paths."""
    words = [word for text in words or [] for word in text.split()]
    if len(words) == 1:
        return words[0]
    if len(words) % 2 == 0 and words and all(map(_is_number, words[::2])):
        pairs = zip(words[::2], words[1::2], strict=True)
        return [{"prefix": path, "weight": float(weight)} for weight, path in pairs]
    return words or None


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _sources(t: Translation) -> bool:
    """Set data.train and the evaluation sets; whether there is validation data."""
    if t["data_path"] or t["data_args_path"]:
        if t["data_path"]:
            t.put("data.train", _blend(t["data_path"]), "data_path")
        else:
            t.put("data.train", {"file": t["data_args_path"]}, "data_args_path")
        weights = re.findall(r"[.0-9]+", t["split"] or SPLIT)[:3]
        weights += ["0"] * (3 - len(weights))
        t.put("data.split", ",".join(weights), "split")
        return _is_number(weights[1])
    if t["per_split_data_args_path"]:
        cure = "write lists of paths, or of weights and paths, for train, valid and test"
        lists = json_files.read(Path(t["per_split_data_args_path"]), dict[str, list[str | float] | None], cure)
        found = {split: _blend([str(word) for word in lists.get(split) or []]) for split in ("train", "valid", "test")}
        names = dict.fromkeys(found, "per_split_data_args_path")
    else:
        names = {split: f"{split}_data_path" for split in ("train", "valid", "test")}
        found = {split: _blend(t[name]) for split, name in names.items()}
    if not found["train"]:
        raise t.arguments.fail("the line has no --data-path", "add it, or --mock-data")
    sets = t["multiple_validation_sets"] and isinstance(found["valid"], list)
    if sets:
        _validation_sets(t, found.pop("valid"), names["valid"])
    for split, sources in found.items():
        if sources is not None:
            t.put(f"data.{split}", sources, names[split])
    return bool(sets or found.get("valid"))


def _validation_sets(t: Translation, sources: list[Any], name: str) -> None:
    paths = [each["prefix"] if isinstance(each, dict) else each for each in sources]
    names = t["validation_set_names"] or [f"set{i}" for i in range(len(paths))]
    if len(names) != len(paths):
        raise t.arguments.fail(f"{len(paths)} validation sets have {len(names)} names", "give each one name")
    sets = [{"name": called, "prefix": path} for called, path in zip(names, paths, strict=True)]
    t.put("data.valid_sets", sets, "multiple_validation_sets", name, "validation_set_names")


def translate_loss(t: Translation) -> None:
    """The mean that a step minimises."""
    of_tokens = t["calculate_per_token_loss"]
    t.put("objective.average", "tokens" if of_tokens else "microbatches", "calculate_per_token_loss")
    if t["context_parallel_size"] > 1 and not of_tokens and (t["eod_mask_loss"] or t["sft"]):
        t.differs("loss-mean", "context_parallel_size")


def _documents(t: Translation) -> None:
    for key, name in RESETS.items():
        if t[name]:
            t.put(f"data.{key}", True, name)


def _chat(t: Translation) -> None:
    t.put("data.kind", "chat", "sft")
    for split in ("train", "valid", "test"):
        sources = _blend(t[f"{split}_data_path"] or (t["data_path"] if split == "train" else None))
        if sources is not None:
            t.put(f"data.{split}", sources, f"{split}_data_path", *(["data_path"] if split == "train" else []))
    t.copy("data.chat_template", "chat_template")
    t.put("data.tokenizer", t.arguments.required("tokenizer_model"), "tokenizer_model", "tokenizer_type")
    t.settings.pop("data.train_samples", None)


def _tokenizer(t: Translation) -> None:
    """The tokenizer of the data, where it is a path: training reads token ids."""
    kind, model = t["tokenizer_type"], t["tokenizer_model"]
    vocabulary, merges = t["vocab_file"], t["merge_file"]
    t.use("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    if kind == "NullTokenizer":
        size, end = t.arguments.required("vocab_size"), t["null_tokenizer_eod_id"]
        last = size - 1 if end is None else end  # the end of a document is one of the tokens
        t.put("data.tokenizer", f"null:{last}", "tokenizer_type", "vocab_size", "null_tokenizer_eod_id")
    elif model and (model[0] in "/.~" or Path(model).exists()):
        t.put("data.tokenizer", model, "tokenizer_model", "tokenizer_type")
    elif model:
        t.warnings.append(f"{t.arguments.shown('tokenizer_model')} is no path: download it, and set data.tokenizer.")
    elif vocabulary and merges:
        folder = Path(vocabulary).parent
        if (Path(vocabulary).name, Path(merges).name) == ("vocab.json", "merges.txt") and folder == Path(merges).parent:
            t.put("data.tokenizer", str(folder), "vocab_file", "merge_file")
        else:
            cure = "copy both into a folder as vocab.json and merges.txt, and set data.tokenizer to it"
            t.warnings.append(f"{t.arguments.shown('vocab_file')} is half a tokenizer: {cure}, if texts are needed.")


def _fill_in(t: Translation) -> None:
    if not t["fim_data"]:
        return
    t.put("data.fim_rate", t["fim_rate"], "fim_data", "fim_rate")
    t.put("data.fim_spm_rate", t["fim_spm_rate"], "fim_spm_rate")
    tokens = {part: t[f"fim_{part}_token"] for part in ("prefix", "middle", "suffix")}
    t.put("data.fim_tokens", tokens, *(f"fim_{part}_token" for part in tokens))
