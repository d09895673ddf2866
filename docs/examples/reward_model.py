"""A reward model of preferences: its score is a matrix on the hidden state of a sequence's last token (Bradley-Terry).

run: {extensions: [docs/examples/reward_model.py]}
objective: {kind: reward_model}
data: {kind: chat, packing: pairs, train: pairs.jsonl, tokenizer: models/sft}

The matrix is called `score`, as in transformers' AutoModelForSequenceClassification, whose folders are read and
written. Rows 2i and 2i + 1 of a microbatch are the chosen and the rejected answer with their prompt. `loss_mask` is 1
where the target is a token of an answer; the score is read at the last of these tokens. With data.valid evaluations log
eval_accuracy and eval_margin; `megajax evaluate RUN --data PAIRS` has them of any pairs.
"""

import jax
import numpy as np

from megajax.model import declare
from megajax.step.objective import HiddenSegment, register_objective


@register_objective("reward_model")
class RewardModel(HiddenSegment):
    """-log σ(the chosen answer's score - the rejected one's), the mean over the pairs."""

    TOGETHER = 2
    METRICS = ("accuracy", "margin")  # means over the pairs, of steps and evaluations

    @classmethod
    def parameters(cls, model, settings):
        return {"score": declare((model.hidden_size, 1), ("embed", "outputs"))}

    def derived_fields(self, fields):
        """The mask of the last token of each row's answer, from that of the targets; on the host."""
        answers, length = fields["loss_mask"] > 0, fields["loss_mask"].shape[1]
        last = np.minimum(length - np.argmax(answers[:, ::-1], axis=1), length - 1)  # a sequence cut there ends before
        return {"loss_mask": (np.arange(length) == last[:, None]) & answers.any(1, keepdims=True)}

    def values(self, w, hidden, fields):
        return (hidden @ w["score"])[:, 0]

    def loss(self, values, fields):
        chosen, rejected = values.reshape(-1, 2).T
        return -jax.nn.log_sigmoid(chosen - rejected), {"accuracy": chosen > rejected, "margin": chosen - rejected}

    def count(self, fields):
        return (fields["loss_mask"] > 0).reshape(-1, 2).all(1)
