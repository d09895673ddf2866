"""Distillation: the cross-entropy to the probabilities of a frozen teacher, of any size with the same vocabulary.

run: {extensions: [docs/examples/distillation.py]}
objective: {kind: distillation, settings: {temperature: 2}}
teacher: {model: {num_layers: 32, hidden_size: 4096, ...}, source: models/teacher}
"""

import jax

from megajax.schema.fields import Positive, Section
from megajax.step.objective import Logits, register_objective


@register_objective("distillation")
class Distillation(Logits):
    """-Σ p log q of each token: p the teacher's probabilities, q the model's, at a temperature (Hinton et al. 2015)."""

    TEACHER = True

    class Settings(Section):
        temperature: Positive = 1.0

    def loss(self, logits, fields):
        heat = self.settings.temperature
        return -(jax.nn.softmax(fields["teacher_logits"] / heat) * jax.nn.log_softmax(logits / heat)).sum(-1)
