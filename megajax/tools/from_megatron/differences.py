"""Formulas in which Megatron-LM and megajax differ: the rows of docs/migration.md that warnings name."""

from typing import NamedTuple


class Difference(NamedTuple):
    """A formula of Megatron-LM, and that of megajax."""

    theirs: str
    ours: str


DIFFERENCES = {
    "rate-step": Difference(
        "step t trains with the rate of t - 1: the first step of a warm-up has rate 0",
        "step t trains with the rate of t; logged curves are equal, because Megatron-LM logs after the step",
    ),
    "warmup-init": Difference(
        "the warm-up begins at `--lr-warmup-init`", "it is a line through rate 0, so its first step has rate / steps"
    ),
    "sample-rates": Difference(
        "with `--train-samples` the rate depends on the samples read, which is no multiple of a step's, or ramps up",
        "the rate depends on the step; lengths in samples are rounded to steps",
    ),
    "inverse-sqrt": Difference(
        "`min_lr` after `--lr-decay-iters`; without a warm-up the rate depends on the batch size",
        "the decay does not end",
    ),
    "batch-schedule": Difference(
        "Megatron-Core 0.19 and later ignore `--rampup-batch-size`; thresholds in tokens are rounded down to samples",
        "`batch.schedule` is always followed; its thresholds are those of the flag",
    ),
    "aux-loss": Difference(
        "`aux_loss` balances the tokens of each rank's microbatch",
        "`model.router.global_loss` balances a microbatch over all devices",
    ),
    "global-aux-loss": Difference(
        "`global_aux_loss` counts the tokens of all microbatches and ranks so far in the step",
        "`model.router.global_loss` counts those of a microbatch over all devices",
    ),
    "loss-mean": Difference(
        "the mean of the microbatches' and ranks' means, without `--calculate-per-token-loss`",
        "the mean over all counted tokens of the step; equal where all microbatches count as many tokens",
    ),
    "masked-router-losses": Difference(
        "with `--calculate-per-token-loss` and a loss mask, router losses are multiplied by routed / counted tokens",
        "they are means over the routed tokens",
    ),
    "mtp-mask": Difference(
        "each microbatch's mean of a prediction module is weighted by the unrolled mask; it predicts over ends of"
        " documents, and the last token embeds token 0",
        "one mean over the step; it stops at the end of a document, and embeds the true next token",
    ),
    "latent-norms": Difference(
        "the norms of latents have `--norm-epsilon`; without `--q-lora-rank` queries have one too",
        "their epsilon is 1e-6, as in DeepSeek's code; without a latent queries have no norm",
    ),
    "router-bias": Difference("the router's bias starts normal, with `--init-method-std`", "it starts at 0"),
    "capacity": Difference(
        "`--moe-expert-capacity-factor` is of a rank's microbatch; the expert bias leaves dropped assignments out",
        "it is of a microbatch over all devices; the expert bias counts them",
    ),
    "sgd-decay": Difference("the decay is added to the gradient, before the momentum", "the decay is decoupled"),
    "attention-dropout": Difference("`--attention-dropout` 0.1 by default", "no dropout of attention weights"),
    "fp16-gradients": Difference("gradients are summed and reduced in FP16", "in FP32"),
    "recompute": Difference(
        "`--recompute-modules` names the modules that are computed again",
        "`remat.policy` has a few choices; the nearest one is written, and numbers do not change",
    ),
    "stage-layout": Difference(
        "a stage may hold the prediction modules or the loss alone",
        "the stages share these, and each inner stage has layers: they are divided evenly, and numbers do not change",
    ),
    "spikes": Difference("a loss above 10 times the largest one seen", "one above a multiple of a median"),
    "checkpoints": Difference(
        "continues with the optimizer, the step and the consumed samples of a checkpoint",
        "checkpoint.init_from reads the weights of a checkpoint in the format torch_dist",
    ),
}
