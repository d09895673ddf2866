"""Trains a launch line's GPT with megatron-core on the CPU: `python -m megatron_parity.launch_line FOLDER`.

FOLDER/arguments.json has Megatron's arguments by name. The data are read by Megatron's GPTDataset, from FOLDER. Writes
FOLDER/start, a distributed checkpoint of the initial weights, and FOLDER/megatron.json, what each step logs.
"""

# pyright: reportMissingImports=false
import argparse
import json
import os
import queue
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import megatron_parity.megatron_cpu  # noqa: F401, I001
import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_parity.case import Case, Rate
from megatron_parity.megatron_model import COMMON
from megatron_parity.megatron_side import Trainer

Arguments = Any  # by name


class NullTokenizer:
    """What GPTDataset asks of a tokenizer of `--tokenizer-type NullTokenizer`."""

    def __init__(self, vocab_size: int):
        self.vocab_size, self.eod, self.unique_identifiers = vocab_size, vocab_size - 1, {"class": "NullTokenizer"}


def case_of(a: Arguments) -> Case:
    """The case of a dense GPT, with the settings that Megatron's own programs derive from the arguments."""
    multiple = a["make_vocab_size_divisible_by"]
    config = {f.name: a[f.name] for f in fields(TransformerConfig) if f.init and a.get(f.name) is not None}
    # Fused kernels need Transformer Engine.
    config = {name: value for name, value in config.items() if name not in COMMON and not name.endswith("_fusion")}
    config |= {
        "gated_linear_unit": a["swiglu"],
        "activation": "silu" if a["swiglu"] else "relu2" if a["squared_relu"] else "gelu",
        "bias_activation_fusion": a["bias_gelu_fusion"] and not a["swiglu"] and a["add_bias_linear"],
        "num_query_groups": a["num_query_groups"] if a["group_query_attention"] else None,
        "init_method_std": a["init_method_std"],
        "moe_router_dtype": None,
    }
    gpt = {
        "position_embedding_type": a["position_embedding_type"],
        "share_embeddings_and_output_weights": not a["untie_embeddings_and_output_weights"],
    }
    if a["position_embedding_type"] == "rope":
        gpt |= {"rotary_base": a["rotary_base"], "rotary_percent": a["rotary_percent"]}
    optimizer = {
        "beta1": a["adam_beta1"],
        "beta2": a["adam_beta2"],
        "epsilon": a["adam_eps"],
        "weight_decay": a["weight_decay"],
        "clip_norm": a["clip_grad"],
    }
    return Case(
        {},
        config,
        gpt,
        sections={"optimizer": optimizer},
        steps=a["train_iters"],
        batch=a["global_batch_size"],
        micro=a["micro_batch_size"],
        length=a["seq_length"],
        vocab=-(-a["vocab_size"] // multiple) * multiple,
        per_token=a["calculate_per_token_loss"],
        aligned=False,
        rate=Rate(
            "wsd" if a["lr_decay_style"] == "WSD" else a["lr_decay_style"],
            a["lr"],
            a["min_lr"],
            a["lr_warmup_iters"],
            a["lr_decay_iters"] or a["train_iters"],
            a["lr_wsd_decay_iters"],
            a["lr_wsd_decay_style"],
        ),
    )


def dataset(a: Arguments, folder: Path) -> GPTDataset:
    """The training split."""
    config = GPTDatasetConfig(
        random_seed=a["seed"],
        sequence_length=a["seq_length"],
        blend=([str(folder / a["data_path"][0])], None),
        split=a["split"],
        tokenizer=NullTokenizer(a["vocab_size"]),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = [a["train_iters"] * a["global_batch_size"], 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()[0]


def save(trainer: Trainer, a: Arguments, folder: Path) -> None:
    """The weights as Megatron's training saves them after 0 iterations, with its arguments."""
    filesystem_async.get_write_results_queue = lambda *_, **__: queue.Queue()  # one process writes
    (folder / "iter_0000000").mkdir(parents=True)
    state = {"model": trainer.gpt.sharded_state_dict(), "args": argparse.Namespace(**a), "iteration": 0}
    dist_checkpointing.save(state | {"checkpoint_version": 3.0}, str(folder / "iter_0000000"))
    (folder / "latest_checkpointed_iteration.txt").write_text("0", encoding="utf-8")


def main(folder: Path) -> None:
    a = json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    case, samples = case_of(a), dataset(a, folder)

    def read(step: int) -> dict[str, np.ndarray]:
        rows = [samples[step * case.batch + row] for row in range(case.batch)]
        names = {"tokens": "tokens", "targets": "labels", "loss_mask": "loss_mask", "positions": "position_ids"}
        found = {ours: torch.stack([row[theirs] for row in rows]).numpy() for ours, theirs in names.items()}
        return found | {"documents": np.zeros_like(found["tokens"])}

    trainer = Trainer(case, None, read)
    save(trainer, a, folder / "start")
    curve = [trainer.step(number) for number in range(case.steps)]
    (folder / "megatron.json").write_text(json.dumps(curve), encoding="utf-8")


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(123)
    main(Path(sys.argv[1]))
    os._exit(0)  # gloo's threads do not end
