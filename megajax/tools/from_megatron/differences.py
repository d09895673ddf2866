"""Formulas in which Megatron-LM and megajax differ: the rows of docs/migration.md that warnings name."""

from typing import NamedTuple


class Difference(NamedTuple):
    """A formula of Megatron-LM, and that of megajax."""

    theirs: str
    ours: str
    equal: str = ""  # the setting that makes them equal, which `from-megatron` writes


DIFFERENCES = {
    "rate-step": Difference(
        "step t trains with the rate of t - 1: the first step of a warm-up has rate 0",
        "step t trains with the rate of t; Megatron-LM logs the rate after the step",
        "`schedule.delay_steps: 1`",
    ),
    "warmup-init": Difference(
        "the warm-up begins at `--lr-warmup-init`", "it is a line through rate 0, so its first step has rate / steps"
    ),
    "sample-rates": Difference(
        "with `--train-samples` the rate depends on the samples read, which is no multiple of a step's, or ramps up",
        "the rate depends on the step; lengths in samples are rounded to steps",
    ),
    "wsd-decay": Difference(
        "with x from 1 to 0, WSD decays by 2 · 0.5^(1 - x) - 1 (`exponential`, the default), x, `cosine` or"
        " `minus_sqrt`",
        "by x, unless another one is set",
        "`schedule.wsd_decay_style`",
    ),
    "inverse-sqrt": Difference(
        "`min_lr` after `--lr-decay-iters`; without a warm-up the rate depends on the batch size",
        "the decay does not end",
    ),
    "cyclic-order": Difference(
        "`--dataloader-type cyclic` permutes the samples of each data-parallel rank anew in each epoch",
        "`data.order: shuffled` permutes all samples anew in each epoch, in the same order on every mesh",
    ),
    "batch-schedule": Difference(
        "Megatron-Core 0.19 and later ignore `--rampup-batch-size`",
        "`batch.schedule` is always followed",
    ),
    "batch-thresholds": Difference(
        "thresholds of `--step-batch-size-schedule` are rounded down to whole sequences",
        "a size applies from the first step on that begins at its number of tokens or later",
        "`batch.schedule` with the rounded numbers",
    ),
    "loss-mean": Difference(
        "without `--calculate-per-token-loss` the mean of the microbatches' means, each of one rank, a rank of"
        " context parallelism too; the logged loss is the mean over tokens",
        "the mean over all counted tokens of the step, or that of the microbatches' means on data × fsdp × expert; the"
        " logged loss is the mean over tokens",
        "`objective.average: microbatches`, without context parallelism",
    ),
    "vocabulary-padding": Difference(
        "the padding of the vocabulary has logits in the softmax",
        "it has none",
        "`model.vocab_size`: the padded size",
    ),
    "gelu": Difference(
        "x · Φ(x), unless it is fused with a bias or `--openai-gelu`",
        "`gelu` is the approximation by tanh",
        "`model.activation: gelu_exact`",
    ),
    "qk-norm": Difference(
        "`--qk-layernorm` is a LayerNorm with biases where `--normalization` is LayerNorm",
        "`qk_norm: true` is an RMSNorm",
        "`model.qk_norm: layernorm`",
    ),
    "latent-norms": Difference(
        "the norms of latents have `--norm-epsilon`; without `--q-lora-rank` queries have one too",
        "their epsilon is 1e-6, as in DeepSeek's code; without a latent queries have no norm",
    ),
    "mscale": Difference(
        "with `--mscale-all-dim 0` queries and keys have the factor 0.1 · mscale · ln(factor) + 1",
        "`mscale` counts with `mscale_all_dim` only, as in transformers; else the factor is 0.1 · ln(factor) + 1",
        "`model.rope_scaling.attention_factor`",
    ),
    "pre-softmax": Difference(
        "with `--moe-router-pre-softmax` the weights are the chosen scores",
        "they are divided by their sum, unless `normalise` is false",
        "`model.router.normalise: false`",
    ),
    "upcycling": Difference(
        "`--moe-use-upcycling` begins at step 1, but without `--finetune` at the dense training's position in the data;"
        " with `--moe-router-pre-softmax` it multiplies the copies by a root of experts / top-k",
        "a run begins at step 0 with the first sample, or with `checkpoint.init_state: position` at the dense"
        " training's step and position; copies are exact",
    ),
    "sinkhorn": Difference(
        "the weight of one expert that Sinkhorn's algorithm chooses is a sigmoid",
        "a softmax by default, which has no gradient for one expert and is refused",
        "`model.router.score_function: sigmoid`",
    ),
    "sinkhorn-balance": Difference(
        "Sinkhorn's scaling of a rank's microbatch stops when the experts' factors change by 1e-4 on average",
        "it has 20 iterations, over a microbatch on all devices",
    ),
    "loss-counts": Difference(
        "balancing losses count the k best plain scores, without expert bias and groups (DeepSeek-V3, equation 18)",
        "they count the experts that were chosen (DeepSeek-V2)",
        "`model.router.loss_counts: top_scores`",
    ),
    "aux-loss": Difference(
        "`aux_loss` balances the tokens of each rank's microbatch",
        "`model.router.global_loss` balances a microbatch over all devices",
    ),
    "global-aux-loss": Difference(
        "`global_aux_loss` counts the tokens of all microbatches and ranks so far in the step",
        "`model.router.global_loss` counts those of a microbatch over all devices",
    ),
    "masked-router-losses": Difference(
        "with `--calculate-per-token-loss` and a loss mask, router losses are multiplied by routed / counted tokens",
        "they are means over the routed tokens, as published; Megatron-LM's too without the flag",
    ),
    "mtp-mask": Difference(
        "with `--calculate-per-token-loss` each microbatch's mean of a prediction module is weighted by the unrolled"
        " mask; it predicts over ends of documents, and the last token embeds token 0",
        "one mean over the step, as in DeepSeek-V3; it stops at the end of a document, and embeds the true next token",
    ),
    "router-bias": Difference(
        "the router's bias and attention sinks start normal, with `--init-method-std`", "they start at 0"
    ),
    "capacity": Difference(
        "`--moe-expert-capacity-factor` is of a rank's microbatch; the expert bias leaves dropped assignments out",
        "it is of a microbatch over all devices; the expert bias counts them; weights are compared with 10 bits of"
        " mantissa, and of equal ones later tokens are dropped",
    ),
    "sgd-decay": Difference(
        "the decay is added to the gradient, before the momentum",
        "the decay is decoupled, as in AdamW; equal without decay",
    ),
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
    "no-load-optim": Difference(
        "`--no-load-optim` begins the learning rate's schedule again, at the step of the checkpoint",
        "`checkpoint.init_state: position` goes on with it at that step",
    ),
}
