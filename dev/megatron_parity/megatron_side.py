"""Trains cases with megatron-core from megajax's weights: `python -m megatron_parity.megatron_side OUT CASE...`.

On the CPU. GPTModel, DistributedDataParallel, forward_backward_no_pipelining, finalize_model_grads, the optimizer and
OptimizerParamScheduler are Megatron's. The loss function is that of its pretrain_gpt.py, and the order of a step that
of its training.py. OUT/CASE gets megatron.npz, the last weights, and megatron.json.
"""

# pyright: reportMissingImports=false
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import megatron_parity.megatron_cpu  # noqa: F401, I001
import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron_parity.batches import batch
from megatron_parity.case import Case
from megatron_parity.cases import CASES
from megatron_parity.megatron_model import apply_patches, arrays, build, counts, gaps

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
STYLES = {"wsd": "WSD", "inverse_sqrt": "inverse-square-root"}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def load(model: torch.nn.Module, start: dict[str, np.ndarray]) -> None:
    """Copy the weights into the model, all of them into all of it; padding of the vocabulary is 0."""
    own = arrays(model)
    inner = "mtp_model_layer." if any(".mtp_model_layer." in name for name in own) else "transformer_layer."
    given = {name.replace("transformer_layer.", inner): array for name, array in start.items()}
    assert given.keys() == own.keys(), given.keys() ^ own.keys()
    with torch.no_grad():
        for name, array in given.items():
            if name in VOCABULARY:
                array = np.pad(array, ((0, len(own[name]) - len(array)), (0, 0)))
            assert array.size == own[name].numel(), name
            own[name].copy_(torch.from_numpy(array).reshape(own[name].shape))


def saved(model: torch.nn.Module, vocab: int) -> dict[str, np.ndarray]:
    """The weights by the names of `load`."""
    own = {name.replace("mtp_model_layer.", "transformer_layer."): a.detach() for name, a in arrays(model).items()}
    return {name: a.numpy()[:vocab] if name in VOCABULARY else a.numpy() for name, a in own.items()}


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor):
    """(summed loss, counted tokens, both for the log), as in pretrain_gpt.py."""
    counted = loss_mask.view(-1).float()
    loss, tokens = torch.sum(output.view(-1).float() * counted), counted.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


class Trainer:
    """A case: model, optimizer and schedule."""

    def __init__(
        self,
        case: Case,
        start: dict[str, np.ndarray] | None = None,
        read: Callable[[int], dict[str, np.ndarray]] | None = None,
    ):
        """By default it has Megatron's own initial weights, and the batches of the case."""
        torch.manual_seed(1)
        MTPLossLoggingHelper.tracker.clear()
        get_moe_metrics_tracker()._metrics.clear()
        apply_patches(case)
        self.case, (self.config, self.gpt) = case, build(case)
        self.initial = saved(self.gpt, case.vocab)
        self.initial = {name: [float(a.mean()), float(a.std())] for name, a in self.initial.items()}
        if start is not None:
            load(self.gpt, start)
        self.read = read or partial(batch, case)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=case.distributed_optimizer,
        )
        self.model = DistributedDataParallel(config=self.config, module=self.gpt, ddp_config=settings)
        self.model.train()
        self.config.finalize_model_grads_func = finalize_model_grads
        own, rate = case.optimizer, case.rate
        optimizer = OptimizerConfig(
            optimizer=OPTIMIZERS[own["kind"]],
            lr=rate.highest,
            min_lr=rate.lowest,
            weight_decay=own["weight_decay"],
            sgd_momentum=own["beta1"],
            adam_beta1=own["beta1"],
            adam_beta2=own["beta2"],
            adam_eps=own["epsilon"],
            clip_grad=own["clip_norm"],
            params_dtype=torch.float32,
            use_distributed_optimizer=case.distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(optimizer, [self.model], use_gloo_process_groups=False)
        self.config.grad_scale_func = self.optimizer.scale_loss
        B = case.batch
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=rate.highest,
            min_lr=rate.lowest,
            lr_warmup_steps=rate.warmup * B,
            lr_decay_steps=rate.decay * B,
            lr_decay_style=STYLES.get(rate.kind, rate.kind),
            start_wd=own["weight_decay"],
            end_wd=own["weight_decay"],
            wd_incr_steps=case.steps * B,
            wd_incr_style="constant",
            wsd_decay_steps=rate.tail * B if rate.tail else None,
            lr_wsd_decay_style=rate.style,
        )
        if case.aligned:  # step 1 then has the rate of schedule(1)
            self.scheduler.step(B)

    def decay(self) -> dict[str, float]:
        """The factor of each parameter's weight decay."""
        names = {id(p): name.removeprefix("module.") for name, p in self.model.named_parameters()}
        groups = [g for o in getattr(self.optimizer, "chained_optimizers", [self.optimizer]) for g in o.param_groups]
        return {
            names[id(p)].replace("mtp_model_layer.", "transformer_layer."): group["wd_mult"]
            for group in groups
            for p in group["params"]
            if id(p) in names
        }

    def step(self, number: int) -> dict:
        """One step, and what it logs."""
        case, micro = self.case, self.case.micro
        of_rank = case.batch // micro // WORLD
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        counts.clear()
        gaps.clear()
        fields = {name: torch.tensor(np.ascontiguousarray(a)) for name, a in self.read(number).items()}
        causal = torch.triu(torch.ones(case.length, case.length, dtype=torch.bool), 1)[None, None]

        def forward_step(iterator, model):
            first = (next(iterator) * WORLD + RANK) * micro
            own = {name: a[first : first + micro] for name, a in fields.items()}
            documents, counted = own["documents"], own["loss_mask"]
            mask = causal | (documents[:, None, :, None] != documents[:, None, None, :])
            positions = own["positions"].long()
            output = model(own["tokens"], positions, mask, labels=own["targets"], loss_mask=counted)
            return output, lambda output: loss_func(counted, output)

        found = forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(range(of_rank)),
            model=self.model,
            num_microbatches=of_rank,
            seq_length=case.length,
            micro_batch_size=micro,
        )
        rate = self.optimizer.param_groups[0]["lr"]
        norm = self.optimizer.step()[1]
        self.scheduler.step(case.batch)
        total = torch.stack([each["lm loss"] for each in found]).sum(0)
        torch.distributed.all_reduce(total)
        row = {"loss": float(total[0] / total[1]), "grad_norm": float(norm), "learning_rate": float(rate)}
        return row | self._of_layers(of_rank)

    def _of_layers(self, microbatches: int) -> dict:
        """Assignments and losses of routers and prediction modules."""
        row = {}
        if counts:
            total = torch.stack([counts[id(m)] for m in self.gpt.modules() if isinstance(m, TopKRouter)])
            torch.distributed.all_reduce(total)
            row = {"expert_counts": total.tolist(), "least_gap": min(gaps, default=0.0)}
        tracker = get_moe_metrics_tracker()
        for name, own in tracker.metrics.items():
            values = own.values.sum()
            torch.distributed.all_reduce(values)
            row[name] = float(values) / microbatches / WORLD
        tracker.clear()
        if "values" in MTPLossLoggingHelper.tracker:
            row["mtp_loss"] = float(MTPLossLoggingHelper.tracker["values"].mean()) / microbatches
            MTPLossLoggingHelper.clean_metrics_in_tracker()
        return row


def main(case: Case, out: Path) -> None:
    trainer = Trainer(case, dict(np.load(out / "start.npz")))
    facts = {"curve": [trainer.step(number) for number in range(case.steps)]}
    if RANK == 0:
        np.savez(out / "megatron.npz", allow_pickle=False, **saved(trainer.gpt, case.vocab))
        facts |= {"decay": trainer.decay(), "initial": trainer.initial}
        (out / "megatron.json").write_text(json.dumps(facts), encoding="utf-8")


def run_as_two_ranks(names: list[str]) -> None:
    """This program again, in two processes."""
    port = str(int(os.environ["MASTER_PORT"]) + 1)
    own = {**os.environ, "WORLD_SIZE": "2", "MASTER_PORT": port}
    command = [sys.executable, "-m", "megatron_parity.megatron_side", sys.argv[1], *names]
    ranks = [subprocess.Popen(command, env={**own, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    assert [rank.wait() for rank in ranks] == [0, 0]


if __name__ == "__main__":
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    if others := [name for name in chosen if CASES[name].ranks > WORLD]:
        run_as_two_ranks(others)
    torch.distributed.init_process_group("gloo", rank=RANK, world_size=WORLD)
    parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=WORLD > 1)
    model_parallel_cuda_manual_seed(123)
    for name in chosen:
        if CASES[name].ranks == WORLD:
            start = time.time()
            main(CASES[name], folder / name)
            print(f"{name}: Megatron, {time.time() - start:.0f} s", flush=True)
    os._exit(0)  # gloo's threads do not end
