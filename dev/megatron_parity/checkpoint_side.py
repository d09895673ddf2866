"""Megatron's side of megatron_checkpoints.py: reads a checkpoint on this process of TP × PP × EP, and writes it again.

The model is that of the arguments in the checkpoint. dev/megatron_checkpoints.py starts the processes.
"""

# pyright: reportMissingImports=false
import dataclasses
import os
import queue
import sys
from pathlib import Path

import megatron_parity.megatron_model  # noqa: F401, I001
import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn import functional

filesystem_async.get_write_results_queue = lambda mp_mode="spawn": queue.Queue()  # each process writes by itself
WITHOUT_GPU = {
    **{"use_cpu_initialization": True, "perform_initialization": True, "gradient_accumulation_fusion": False},
    **{"bias_dropout_fusion": False, "masked_softmax_fusion": False, "apply_rope_fusion": False},
    "moe_token_dispatcher_type": "allgather",  # gloo has no all-to-all of uneven parts
    **{"moe_grouped_gemm": False, "persist_layer_norm": False, "params_dtype": torch.float32},
}


def build(arguments, tensor: int, pipeline: int, expert: int) -> GPTModel:
    """This process's part of the model, by the rules of Megatron-LM's core_transformer_config_from_args."""
    latent = arguments.multi_latent_attention
    kind = MLATransformerConfig if latent else TransformerConfig
    found = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(kind) if hasattr(arguments, f.name)}
    found |= WITHOUT_GPU | {"num_moe_experts": arguments.num_experts, "fp8_param": False}
    found |= {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    found["expert_model_parallel_size"] = expert
    found |= {"pipeline_dtype": torch.float32, "deallocate_pipeline_outputs": True, "cp_comm_type": "p2p"}
    found["num_query_groups"] = arguments.num_query_groups if arguments.group_query_attention else None
    found["bias_activation_fusion"] = not arguments.swiglu and arguments.bias_gelu_fusion
    if arguments.swiglu:
        found |= {"activation_func": functional.silu, "gated_linear_unit": True}
    elif arguments.squared_relu:
        found["activation_func"] = squared_relu
    config = kind(**found)
    if arguments.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, multi_latent_attention=latent, normalization=config.normalization
        )
    mtp = None
    if arguments.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, getattr(spec, "layer_specs", [spec])[-1], use_transformer_engine=False)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_percent=arguments.rotary_percent,
        rotary_base=arguments.rotary_base,
        parallel_output=False,
        mtp_block_spec=mtp,
    ).eval()


def logits(model: GPTModel, tokens: np.ndarray) -> np.ndarray | None:
    """The logits of the tokens [B, S] on the last stage, all of the vocabulary; None on the others."""
    rows, length = tokens.shape
    positions = torch.arange(length)[None].expand(rows, length)
    causal = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    rank = torch.distributed.get_rank()
    stage = torch.distributed.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    if not model.pre_process:
        stream = torch.empty(length, rows, model.config.hidden_size)
        torch.distributed.recv(stream, rank - stage)
        model.set_input_tensor([stream])
    with torch.no_grad():
        out = model(torch.tensor(tokens), positions, causal)
    if not model.post_process:
        torch.distributed.send(out.contiguous(), rank + stage)
        return None
    return out.numpy()


def save_legacy(model: GPTModel, common: dict, folder: Path, sizes: tuple[int, int, int]) -> None:
    """Write this process's file of Megatron-LM's format `torch`."""
    _, pipeline, expert = sizes
    ranks = f"{parallel_state.get_tensor_model_parallel_rank():02d}"
    ranks += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if pipeline > 1 else ""
    ranks += f"_{parallel_state.get_expert_model_parallel_rank():03d}" if expert > 1 else ""
    path = folder / f"iter_{common['iteration']:07d}" / f"mp_rank_{ranks}" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    for name, size in zip(("tensor", "pipeline", "expert"), sizes, strict=True):
        setattr(common["args"], f"{name}_model_parallel_size", size)
    torch.save({**common, "model": model.state_dict_for_save_checkpoint()}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(common["iteration"]), encoding="utf-8")


def main(sizes: tuple[int, int, int], source: Path, tokens: Path, out: Path) -> None:
    """Read `source`; write the logits of the tokens, and the checkpoint in both formats, below `out`."""
    tensor, pipeline, expert = sizes
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor, pipeline, expert_model_parallel_size=expert, create_gloo_process_groups=True
    )
    model_parallel_cuda_manual_seed(1)
    newest = (source / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8")
    source = source / f"iter_{int(newest):07d}"
    common = dist_checkpointing.load_common_state_dict(str(source))
    model = build(common["args"], *sizes)
    for weight in model.parameters():
        weight.data.fill_(float("nan"))  # so that one that is not read shows
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(source))
    model.load_state_dict(state["model"])
    if (found := logits(model, np.load(tokens))) is not None:
        np.save(out / "logits.npy", found)
    if torch.distributed.get_world_size() == 1:
        arrays = {name: array for name, array in model.state_dict().items() if isinstance(array, torch.Tensor)}
        np.savez(out / "arrays.npz", **{name: array.numpy() for name, array in arrays.items()})
    folder = out / "torch_dist" / source.name
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(common["iteration"]), encoding="utf-8")
    torch.distributed.barrier()
    dist_checkpointing.save({**common, "model": model.sharded_state_dict()}, str(folder))
    save_legacy(model, common, out / "torch", sizes)


if __name__ == "__main__":
    tensor, pipeline, expert = map(int, sys.argv[1:4])
    main((tensor, pipeline, expert), *map(Path, sys.argv[4:7]))
    sys.stdout.flush()
    os._exit(0)
