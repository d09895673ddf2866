"""A value or class head: a matrix on the model's last hidden states, in place of the head of the vocabulary.

run: {extensions: [docs/examples/value_head.py]}
objective: {kind: value_head, settings: {outputs: 1}}

It is called `score`, as in transformers' AutoModelForSequenceClassification, whose folders are read and written.
The batch field `labels` [rows, length] has a value for each token, as for a critic; with several outputs the number of
a class. `loss_mask` is 1 at the tokens with a label: at all of them, or at the last one of a sequence to classify it.
"""

import jax
import jax.numpy as jnp
from pydantic import PositiveInt

from megajax.model import declare
from megajax.schema.fields import Section
from megajax.step.objective import Hidden, register_objective


@register_objective("value_head")
class ValueHead(Hidden):
    """Squared error of one output, or cross-entropy of several, at each token with a label."""

    FIELDS = {"labels": jnp.float32}

    class Settings(Section):
        outputs: PositiveInt = 1

    @classmethod
    def parameters(cls, model, settings):
        D, K = model.hidden_size, settings.outputs
        return {"score": declare((D, K), ("embed", "outputs"))}

    def loss(self, w, hidden, fields):
        outputs, labels = hidden @ w["score"], fields["labels"]  # [tokens, K], [tokens]
        if self.settings.outputs == 1:
            return jnp.square(outputs[:, 0] - labels)
        chosen = labels[:, None].astype(jnp.int32)
        return -jnp.take_along_axis(jax.nn.log_softmax(outputs), chosen, axis=1)[:, 0]
