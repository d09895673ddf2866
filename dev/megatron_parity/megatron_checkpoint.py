"""Saves a checkpoint of megatron-core and goes on: `python -m megatron_parity.megatron_checkpoint OUT CASE...`.

OUT/CASE gets Megatron's run folder with the checkpoint of step BEFORE, written by its distributed optimizer, and
going_on.json, the losses of the AFTER steps after it.
"""

# pyright: reportMissingImports=false
import argparse
import json
import os
import queue
import sys
from dataclasses import replace
from pathlib import Path

import megatron_parity.megatron_cpu  # noqa: F401, I001
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_parity.case import Case
from megatron_parity.cases import CASES
from megatron_parity.megatron_side import Trainer

BEFORE, AFTER = 10, 5
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


def main(case: Case, run: Path) -> None:
    trainer = Trainer(replace(case, aligned=False, distributed_optimizer=True))
    for number in range(BEFORE):
        trainer.step(number)
    save(trainer, run)
    losses = [trainer.step(number)["loss"] for number in range(BEFORE, BEFORE + AFTER)]
    (run / "going_on.json").write_text(json.dumps(losses), encoding="utf-8")


def save(trainer: Trainer, run: Path) -> None:
    """A checkpoint as Megatron's `save_checkpoint` writes it."""
    case = trainer.case
    arguments = argparse.Namespace(
        consumed_train_samples=BEFORE * case.batch,
        global_batch_size=case.batch,
        seq_length=case.length,
        seed=1234,
        train_iters=case.steps,
        mock_data=True,
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    about = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group, **FORMAT}
    state = {"args": arguments, "checkpoint_version": 3.0, "iteration": BEFORE}
    state["model"] = trainer.gpt.sharded_state_dict(metadata=about)
    state["optimizer"] = trainer.optimizer.sharded_state_dict(state, metadata=about)
    state["opt_param_scheduler"] = trainer.scheduler.state_dict()
    folder = run / f"iter_{BEFORE:07d}"
    folder.mkdir(parents=True)
    dist_checkpointing.save(state, str(folder), content_metadata=about)
    (run / "latest_checkpointed_iteration.txt").write_text(str(BEFORE), encoding="utf-8")


if __name__ == "__main__":
    filesystem_async.get_write_results_queue = lambda mp_mode="spawn": queue.Queue()  # one process writes
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(123)
    for name in sys.argv[2:]:
        main(CASES[name], Path(sys.argv[1]) / name)
        print(f"{name}: Megatron, {BEFORE} + {AFTER} steps", flush=True)
    os._exit(0)  # gloo's threads do not end
