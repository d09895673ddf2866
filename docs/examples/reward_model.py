"""A reward model of preferences: its score is a matrix on the hidden state of a sequence's last token (Bradley-Terry).

run: {extensions: [docs/examples/reward_model.py]}
objective: {kind: reward_model}

It is called `score`, as in transformers' AutoModelForSequenceClassification, whose folders are read and written.
Segments 2i and 2i + 1 of a microbatch (the batch field `segments`) are the chosen and the rejected answer with their
prompt, a row each. `loss_mask` is 1 at the last token of each, 0 elsewhere.
"""

import jax

from megajax.model import declare
from megajax.step.objective import HiddenSegment, register_objective


@register_objective("reward_model")
class RewardModel(HiddenSegment):
    """-log σ(the chosen answer's score - the rejected one's), the mean over the pairs."""

    TOGETHER = 2
    METRICS = ("accuracy", "margin")  # means over the pairs too, in the lines of metrics.jsonl

    @classmethod
    def parameters(cls, model, settings):
        return {"score": declare((model.hidden_size, 1), ("embed", "outputs"))}

    def values(self, w, hidden, fields):
        return (hidden @ w["score"])[:, 0]

    def loss(self, values, fields):
        chosen, rejected = values.reshape(-1, 2).T
        return -jax.nn.log_sigmoid(chosen - rejected), {"accuracy": chosen > rejected, "margin": chosen - rejected}

    def count(self, fields):
        return (fields["loss_mask"] > 0).reshape(-1, 2).all(1)
