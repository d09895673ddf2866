"""Direct preference optimisation of pairs of answers, beside the frozen model from which the training starts.

run: {extensions: [docs/examples/dpo.py]}
objective: {kind: dpo, settings: {beta: 0.1}}
teacher: {model: {...}, source: models/sft}  # the reference: the same model; checkpoint.init_from is this source too
data: {kind: chat, packing: pairs, train: pairs.jsonl, tokenizer: models/sft}

With adapters (`lora: {rank: 16}`) the reference may be their frozen base, without a second copy of its weights:
`teacher: {base: true}`.

Rows 2i and 2i + 1 of a microbatch are the chosen and the rejected answer with their prompt (or the segments of these
numbers, by the batch field `segments`). `loss_mask` is 1 where the target is a token of an answer. With data.valid
evaluations log eval_accuracy, eval_margin and so on; `megajax evaluate RUN --data PAIRS` has them of any pairs.
"""

import jax

from megajax.schema.fields import Positive, Section
from megajax.step.objective import Segment, register_objective


@register_objective("dpo")
class DPO(Segment):
    """-log σ(β · (the chosen answer's log-ratio to the reference - the rejected one's)) (Rafailov et al. 2023)."""

    TEACHER = True
    TOGETHER = 2
    METRICS = ("accuracy", "margin", "chosen_reward", "rejected_reward")  # of steps and evaluations

    class Settings(Section):
        beta: Positive = 0.1

    def loss(self, log_probs, fields):
        rewards = self.settings.beta * (log_probs - fields["teacher_log_probs"])
        chosen, rejected = rewards.reshape(-1, 2).T
        numbers = {"accuracy": chosen > rejected, "margin": chosen - rejected}
        numbers |= {"chosen_reward": chosen, "rejected_reward": rejected}
        return -jax.nn.log_sigmoid(chosen - rejected), numbers

    def count(self, fields):
        return (fields["loss_mask"] > 0).reshape(-1, 2).all(1)
